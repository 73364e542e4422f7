"""What the planner finds for the papers' models and clusters, how fast it is, and how right it is on this machine."""
