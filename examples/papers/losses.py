"""The loss of the translators."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from examples.papers.arguments import LOSS, check_fractions
from jpipe_train.losses import cross_entropy


def smoothed_cross_entropy(outputs: Any, labels: Any, smoothing: float = 0.1) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum the cross-entropy with smoothed labels (Szegedy et al. 2016): (1 - ε) · nats of the label + ε · mean nats of all symbols.

    Args:
        outputs: logits (…, v).
        labels: integers (…); those below zero are not counted.
        smoothing: ε.

    Returns:
        The sum over the labels, and how many are counted.

    Raises:
        InputError: the smoothing is not from 0 to less than 1.
    """
    check_fractions(LOSS, smoothing=smoothing)
    share = jnp.asarray(smoothing, jnp.float32)
    nats, count = cross_entropy.loss(outputs, labels)
    logs = jax.nn.log_softmax(outputs.astype(cross_entropy.wider(outputs.dtype)))
    of_all = jnp.where(labels >= 0, -logs.mean(axis=-1), jnp.zeros((), logs.dtype)).sum()
    return (1 - share) * nats + share * of_all, count
