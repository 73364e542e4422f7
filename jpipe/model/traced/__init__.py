"""Layers cut from a whole model that was written for no pipeline."""
