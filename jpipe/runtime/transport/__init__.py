"""Transfers between workers: messages, sums over replicas, the threads that wait for them, and the rows of batches on the host."""
