"""Compare the papers' tables and figures with the predictions of planner and simulator for the models of `configs/papers/`."""
