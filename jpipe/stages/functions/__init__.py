"""The computations of one stage as pure functions: forward, backward, split backward, update and evaluation."""
