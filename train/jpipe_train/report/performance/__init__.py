"""The speed and the memory of a run: measured, watched, and compared with predictions."""
