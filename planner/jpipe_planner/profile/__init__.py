"""Profiles: the costs of a model, layer by layer, either measured, computed, or read from PipeDream's files."""
