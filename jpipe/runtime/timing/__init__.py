"""Measurements of transfers and sums, while a computation runs and in traces."""
