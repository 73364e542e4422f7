"""Metrics of a user's own, as a config names them."""

import jax
import jax.numpy as jnp


def drawn(outputs, labels, key, scale=1.0):
    """Draws a random number."""
    return scale * jax.random.uniform(key), 1


def lost(outputs, labels):
    """Not a number."""
    return jnp.nan, 1


def of_outputs(outputs):
    """Takes no labels."""
    return outputs.sum(), outputs.size
