"""Shapes and dtypes of the arguments of a stage."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jpipe.model._layer import key_spec

Tree = Any


@dataclass(frozen=True)
class Specs:
    """Shapes and dtypes at one stage, for one microbatch.

    Attributes:
        params: the parameters of the weight versions.
        state: the layer state.
        x: the stage input, as the forward gets it: perhaps encoded.
        labels: at the last stage.
        rng: (microbatch, key), or Nones without randomness.
        fresh: the parameters as the layers initialize them.
        input: the stage input, as the layers read it.
    """

    params: Tree
    state: Tree
    x: Tree
    labels: Tree
    rng: tuple[Any, Any]
    fresh: Tree
    input: Tree

    @property
    def arguments(self) -> tuple[Tree, Tree, Tree]:
        """What a forward reads in addition to the weights: (state, x, labels)."""
        return self.state, self.x, self.labels


def rng_spec() -> tuple[Any, Any]:
    """Return the specs of (microbatch, key)."""
    return jax.ShapeDtypeStruct((), np.uint32), key_spec()
