"""Build a pipeline and its batches from a config."""
