"""Train the same GPT by jpipe, PyTorch and plain JAX on two cores, in one run; `python -m benchmarks.peers` prints a table."""
