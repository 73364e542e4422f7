"""The squared error of numbers."""

from typing import Any

import jax.numpy as jnp

from jpipe import InputError
from jpipe_train.losses.cross_entropy import wider, with_router_loss


def loss(outputs: Any, labels: Any) -> tuple[Any, Any]:
    """Sum the squares of the errors, in float32 at least, and count the numbers; the router loss is added as `cross_entropy.loss` does.

    Outputs may have a last dim of 1 that the labels have not.

    Raises:
        InputError: there is not one output for each label.
    """
    scores, number = outputs["tokens"] if isinstance(outputs, dict) else outputs, jnp.asarray(labels.size, jnp.float32)
    if scores.shape == (*labels.shape, 1):
        scores = scores[..., 0]
    if scores.shape != labels.shape:
        raise InputError(
            f"loss.name: squared_error: expected outputs of the shape of the targets, {list(labels.shape)}, found {list(scores.shape)}; "
            "change the last layer of the model, or the targets"
        )
    wide = wider(scores.dtype)
    errors = scores.astype(wide) - labels.astype(wide)
    return with_router_loss((errors**2).sum(), number, outputs), number
