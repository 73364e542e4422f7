"""Measure the planner: its speed, its choices, and its accuracy on this machine."""
