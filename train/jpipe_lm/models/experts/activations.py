"""The activations of MLPs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {"gelu": nnx.gelu, "gelu_exact": partial(nnx.gelu, approximate=False), "silu": nnx.silu}
_LIMIT, _SLOPE = 7.0, 1.702  # of the clamped SwiGLU


def activated(name: str, expanded: Float[Array, "*n m"], gate: Float[Array, "*n m"] | None = None) -> Float[Array, "*n m"]:
    """Return the hidden numbers of an MLP: the activation of `expanded`, or of the `gate` times `expanded`.

    `clamped_swiglu` (gpt-oss) first bounds the magnitude of both, the gate only from above, and adds 1 to `expanded`.
    """
    if name == "clamped_swiglu":
        assert gate is not None
        gate, expanded = jnp.minimum(gate, _LIMIT), jnp.clip(expanded, -_LIMIT, _LIMIT)
        return gate * nnx.sigmoid(_SLOPE * gate) * (expanded + 1)
    return ACTIVATIONS[name](expanded) if gate is None else ACTIVATIONS[name](gate) * expanded
