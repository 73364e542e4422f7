"""What checkpoints survive, and what they cost; `python -m benchmarks.faults`."""
