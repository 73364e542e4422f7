"""Preferences: pairs of a chosen and a rejected answer to a prompt, their losses, and the log-probabilities of the reference."""
