"""Rows that are cut into slices along their positions; see `option`."""
