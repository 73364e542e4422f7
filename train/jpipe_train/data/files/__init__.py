"""Recognize the kind of a data file, and read its rows or arrays in parts."""
