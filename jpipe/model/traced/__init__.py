"""Layers cut from a whole model: it is traced, and its equations are cut where the fewest bytes pass."""
