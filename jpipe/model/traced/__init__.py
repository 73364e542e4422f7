"""Layers cut from a traced model."""
