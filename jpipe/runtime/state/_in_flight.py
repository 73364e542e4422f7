"""What a worker holds of each microbatch in flight and of each update that waits for gradients."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Microbatch:
    """A microbatch in flight at a worker. Fields are None until they are computed and after they are used.

    Attributes:
        inputs: the input of the stage.
        labels: the labels, at the last stage.
        residuals: (kept arguments and outputs, saved arrays) of the forward, for the backward.
        output: the output of the stage, until it is sent.
        message: the gradient message from the next stage; at the last stage the output of its forward.
        gradient: the gradient message for the previous stage, until it is sent.
        stash: what the first half of the backward leaves for the second: (its other arguments, the stash).
    """

    inputs: Tree = None
    labels: Tree = None
    residuals: Tree = None
    output: Tree = None
    message: Tree = None
    gradient: Tree = None
    stash: Tree = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PendingUpdate:
    """What waits for an update at a worker. Fields are None until they are computed and after they are used.

    Attributes:
        sums: the gradient accumulators, complete and set aside.
        summed: (accumulators, means of the layer state, (mean loss, weight) at the last stage) over all replicas.
        loss: (mean loss, weight), until all updates of the batch are made.
        others: what capabilities keep for it, by name.
    """

    sums: Tree = None
    summed: Tree = None
    loss: Tree = None
    others: Mapping[str, Tree] = field(default_factory=dict)


Fields = dict[str, Tree]
"""The fields of an entry that are not None, by name, which instructions change while a program runs."""
