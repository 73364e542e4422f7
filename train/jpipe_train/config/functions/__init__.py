"""The functions that a config names: the user's own or optax's, and their arguments."""
