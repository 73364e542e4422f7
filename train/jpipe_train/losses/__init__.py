"""The losses that are built in."""
