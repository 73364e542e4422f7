"""Profiles: the costs of a model, layer by layer; measured, computed, or read from PipeDream's files."""
