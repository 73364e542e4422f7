"""The mark at which a user cuts a model."""

from typing import Any, TypeVar

import jax

from jpipe.errors import InputError
from jpipe.model.traced.flat._flatten import CUT as MARK

T = TypeVar("T")


def cut(x: T, name: str) -> T:
    """Mark a place in a model where `LayerStack.from_model` cuts it; return `x`.

    Where a model has marks, it is cut at these places alone. Everywhere else a mark does nothing.

    Args:
        x: what the model computes next with, any pytree of arrays. Other values may pass the cut, too.
        name: the id of the layer that ends here. Each mark has its own.

    Raises:
        InputError: the name is no string, or empty.

    Example:
        >>> import jax.numpy as jnp
        >>> float(cut(jnp.sin(0.0), "encoder"))
        0.0
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"cut: expected the id of a layer, a non-empty string, found {name!r}")

    def identity(x: Any) -> Any:
        return x

    identity.__name__ = f"{MARK}{name}]"
    return jax.jit(identity)(x)  # in a trace this is an equation with a name
