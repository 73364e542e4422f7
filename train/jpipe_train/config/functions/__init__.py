"""The functions that a config names: the user's own and those of optax, and their arguments."""
