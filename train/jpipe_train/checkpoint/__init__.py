"""Run folders, checkpoints, resuming, warm starts, exports and the history of a run."""
