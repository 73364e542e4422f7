"""Tests checkpoints against kills and damage, and measures their cost; `python -m benchmarks.faults`."""
