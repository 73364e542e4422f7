"""From a config to a pipeline and its batches."""
