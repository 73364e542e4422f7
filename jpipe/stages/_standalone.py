"""A stage outside of any pipeline, to be looked at: for profiles."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax

from jpipe.model._layer import LayerSpec
from jpipe.model._optimizer import LayerwiseOptimizer
from jpipe.model._stack import LayerStack
from jpipe.plan import Stage
from jpipe.programs._costs import StageCost
from jpipe.stages._bytes import measure_bytes
from jpipe.stages._compile import trace_call
from jpipe.stages._functions import Loss, StageFunctions, stage_functions

Tree = Any
_CALLS = {"forward": "forward", "backward": "backward", "update": "in_place"}


@dataclass(frozen=True)
class StandaloneStage:
    """One stage of a model by itself: what it would hold in a pipeline, and the programs that would run there. It allocates nothing.

    The model's last layer brings the loss with it; before the model's first layer no gradient is computed.

    Attributes:
        stack: the model.
        stage: which of its layers, and how they are recomputed.
        specs: of these layers, from `LayerStack.specs`.
        labels: shapes and dtypes of a microbatch's labels; only the model's last layer reads them.
        loss: as of a `Pipeline`.
        optimizer: from `find_layerwise`.
    """

    stack: LayerStack
    stage: Stage
    specs: Mapping[str, LayerSpec]
    labels: Tree
    loss: Loss
    optimizer: LayerwiseOptimizer

    @cached_property
    def cost(self) -> StageCost:
        """Exact bytes, from shapes alone; times are units and temporaries unknown, as of `Pipeline.costs`."""
        return measure_bytes(self._functions, self.stage.recompute != "none")

    def trace(self, name: Literal["forward", "backward", "update"], device: jax.Device) -> jax.stages.Traced:
        """One of the programs traced for a device; `.lower().compile()` makes it what a pipeline runs.

        Args:
            name: `forward`, `backward` or `update`; each returns (result, done), where `done` is there when all is computed.
            device: for which.

        Returns:
            A program of the arguments forward(params, state, x, labels, draw); backward(params, kept, saved, message, sums, draw),
            which uses up `accumulators`; update(params, optimizer state, sums, norm), which uses up the first three.
        """
        return trace_call(self._functions, device, _CALLS[name], [len(self.stage.layers)])

    def keep(self, arguments: tuple[Tree, Tree, Tree], outputs: tuple[Tree, Tree]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Of the (state, x, labels) that a forward was given and the (y, new state) that it returned, what its backward takes as `kept`."""
        return self._functions.residuals.keep(arguments, outputs)

    @cached_property
    def _functions(self) -> StageFunctions:
        return stage_functions(self.stack, self.stage, self.specs, self.labels, self.loss, self.optimizer)
