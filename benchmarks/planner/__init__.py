"""The planner's results for the papers' models and clusters, its speed, and its accuracy on this machine."""
