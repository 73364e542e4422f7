"""Sums in parts: the last backward of an update is computed part by part, and each part is summed meanwhile (`Stage.sum_parts`)."""
