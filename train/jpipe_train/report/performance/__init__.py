"""Measure and watch the speed and the memory of a run, and compare them with predictions."""
