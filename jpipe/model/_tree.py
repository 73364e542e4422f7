"""The tree of parameters of a whole model, and where its layers have their arrays in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

Tree = Any


@dataclass(frozen=True)
class ModelTree:
    """The tree of parameters of a whole model that was cut into layers.

    Attributes:
        structures: of that tree; further ones have equal leaves in the same order.
        shapes: of its leaves.
        layers: by layer id, a tree like the layer's parameters with a `Leaf` in place of each array: the leaf or slice of the whole tree.
    """

    structures: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    layers: Mapping[str, Tree]

    def axes(self) -> dict[int, tuple[int, ...]]:
        """Return the axes along which stacked leaves are split into slices, by number of the leaf."""
        return {place.number: place.axes for place in jax.tree.leaves(dict(self.layers)) if place.axes}
