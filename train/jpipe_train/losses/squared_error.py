"""The squared error of outputs and labels that are numbers."""

from typing import Any

import jax.numpy as jnp

from jpipe import InputError
from jpipe_train.losses.cross_entropy import wider, with_router_loss


def loss(outputs: Any, labels: Any) -> tuple[Any, Any]:
    """Return the sum of the squared errors, in float32 or wider, and the number of labels.

    If the outputs have a router loss, it is added once per label, as in `cross_entropy.loss`. Outputs may have an additional last dimension
    of size 1. Raise InputError if there is not one output for each label.
    """
    scores, number = outputs["tokens"] if isinstance(outputs, dict) else outputs, jnp.asarray(labels.size, jnp.float32)
    if scores.shape == (*labels.shape, 1):
        scores = scores[..., 0]
    if scores.shape != labels.shape:
        raise InputError(
            f"loss.name: squared_error: expected outputs with the shape of the targets, {list(labels.shape)}, found {list(scores.shape)}; "
            "change the last layer of the model, or the targets"
        )
    wide = wider(scores.dtype)
    errors = scores.astype(wide) - labels.astype(wide)
    return with_router_loss((errors**2).sum(), number, outputs), number
