"""Whole models of any kind as one layer, and the way back to the user's model."""
