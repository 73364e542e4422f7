"""Test checkpoints against kills and damage, and measure their cost; `python -m benchmarks.faults`."""
