"""Timelines and memory as pictures, and as traces for Perfetto."""
