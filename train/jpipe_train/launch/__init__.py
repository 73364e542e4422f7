"""Several processes: how they start, connect, agree and stop."""
