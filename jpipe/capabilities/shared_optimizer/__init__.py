"""Shared optimizer: replicas of a stage share its optimizer state, and each updates some of the layers (`Plan.shard_optimizer`)."""
