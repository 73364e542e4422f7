"""Searches: parallel equal pipelines, and PipeDream's stages, each with its own number of replicas."""
