"""Shared optimizer: each replica of a stage keeps the optimizer state of some layers and updates these (`Plan.shard_optimizer`)."""
