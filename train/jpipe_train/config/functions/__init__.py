"""The functions that a config names, from the user's modules or from optax, and their arguments."""
