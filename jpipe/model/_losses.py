"""Losses and metrics as users write them: functions of outputs and labels that may ask for random numbers."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jpipe.model._calls import parameters_of

Tree = Any
Loss = Callable[..., tuple[jax.Array, jax.Array]]
"""`(outputs, labels) -> (sum, weight)`; with a further parameter `rngs` or `key`, it gets random numbers."""


def random_parameter(function: Loss) -> str | None:
    """Return the parameter that asks for random numbers: `rngs` or `key`, if its only default is None."""
    parameters = list(parameters_of(function).values())[2:]  # after the outputs and labels
    names = (p.name for p in parameters if p.name in ("rngs", "key") and (p.default is None or p.default is p.empty))
    return next(names, None)


def call_with_randomness(function: Loss, outputs: Tree, labels: Tree, key: jax.Array | None) -> Any:
    """Call a loss or a metric, with random numbers if it asks for them: `rngs` a `flax.nnx.Rngs`, `key` the key itself."""
    name = random_parameter(function)
    if name is None:
        return function(outputs, labels)
    assert key is not None
    randomness: dict[str, Any] = {name: nnx.Rngs(key) if name == "rngs" else key}
    return function(outputs, labels, **randomness)
