"""Metrics of a user's own, as a config names them."""

import jax.numpy as jnp


def lost(outputs, labels):
    """Not a number."""
    return jnp.nan, 1


def of_outputs(outputs):
    """Takes no labels."""
    return outputs.sum(), outputs.size
