"""The papers' tables and figures beside what the planner and the simulator predict for the models of `configs/papers/`."""
