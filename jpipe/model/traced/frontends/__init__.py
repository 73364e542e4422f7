"""Whole models of each kind as one layer."""
