"""Searches: parallel equal pipelines, and PipeDream's stages, which have individual numbers of replicas."""
