"""The run folder: checkpoints, resuming, warm starts, exports, and the history of a run."""
