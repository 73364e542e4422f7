"""One stage without a pipeline, for profiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax

from jpipe.capabilities.registry import variants_of
from jpipe.meshes._place import Place
from jpipe.model._function_arguments import Loss
from jpipe.model._layer import LayerSpec
from jpipe.model._precision import PLAIN, Precision
from jpipe.model._stack import LayerStack
from jpipe.model.layerwise._optimizer import LayerwiseOptimizer
from jpipe.plan import Plan, Stage, repeats_forward
from jpipe.programs._costs import StageCost
from jpipe.stages._arrays import CHOOSING_LAYOUTS, Arrays
from jpipe.stages._builder import stage_functions
from jpipe.stages._bytes import joined_costs, measure_bytes, nbytes
from jpipe.stages._calls import Call, call_of, trace_call
from jpipe.stages._gradients import with_gradients
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any
Name = Literal["forward", "backward", "forward_backward", "backward_input", "backward_weight", "update"]


@dataclass(frozen=True)
class StandaloneStage:
    """One stage of a model without a pipeline: its bytes and its programs. It allocates no arrays.

    A stage with the model's last layer includes the loss. A stage computes no gradient for its input if it has the model's first layer, or
    if all parameters of earlier layers are frozen.

    Attributes:
        stack: the model.
        stage: the layers of the stage, and their recomputation.
        specs: the specs of the stage's layers, from `LayerStack.specs`, and of the layers before it if the optimizer freezes parameters.
        labels: the shapes and dtypes of a microbatch's labels; only a stage with the model's last layer reads them.
        loss: as in `Pipeline`.
        optimizer: the optimizer from `find_layerwise`.
        precision: the precision in which the layers of `stack` already compute (see `cast_layers`).
    """

    stack: LayerStack
    stage: Stage
    specs: Mapping[str, LayerSpec]
    labels: Tree
    loss: Loss
    optimizer: LayerwiseOptimizer
    precision: Precision = PLAIN

    @cached_property
    def cost(self) -> StageCost:
        """The exact bytes, computed from shapes. Times are in units and temporaries are unknown, as in `Pipeline.costs`."""
        return measure_bytes(self._functions, repeats_forward(self.stage.recompute))

    @property
    def stash_bytes(self) -> int:
        """The bytes that the stage holds between the first half of a backward and the second half."""
        return nbytes(self._functions.halves.stash_spec)

    def trace(self, name: Name, device: jax.Device, *, any_layout: bool = False) -> jax.stages.Traced:
        """Trace one of the programs for a device. `.lower().compile()` of the result returns the program that a pipeline runs.

        Side effects such as host callbacks are left out, because a profile calls the program with dummy values.

        Args:
            name: the name of the program. Each program returns (result, done), where `done` is ready when everything is computed.
            device: the device.
            any_layout: whether XLA chooses the layouts of the residuals, as in a pipeline on TPUs. A backward may choose others than its
                forward, so this is only for analysis.

        Returns:
            The traced program. Its arguments are forward(params, state, x, labels, rng); backward(params, forward_arrays, saved, message,
            accumulators, rng), which donates `accumulators`; forward_backward(params, state, x, labels, message, accumulators, rng), which
            donates `accumulators`, too, and is what the last stage runs; or update(trained params, optimizer state, accumulators, {}),
            which donates its first three arguments. The halves of a backward have the arguments of `StageFunctions`.
        """
        arrays = Arrays(self._functions, Place((device,)), any_layout=any_layout and device.platform in CHOOSING_LAYOUTS)
        call = None
        if name == "forward_backward":
            forward, backward = (call_of(arrays, op).inputs for op in ("forward", "backward"))
            call = Call(self._forward_backward, (5,), (*forward[:4], *backward[3:]), None)
        return trace_call(arrays, "in_place" if name == "update" else name, with_effects=False, call=call)

    def _forward_backward(
        self, params: Tree, state: Tree, x: Tree, labels: Tree, message: Tree, accumulators: Tree, rng: tuple[Any, Any], scale: Any
    ) -> tuple[Tree, ...]:
        """Run a forward and its backward as one computation, also if this is not the last stage."""
        f = self._functions.at_once
        (y, new_state), vjp = f.linearized(params, (state, x, labels), rng)
        return *f.pull_back(vjp, y if f.last else message, accumulators, rng, scale), f.changed.part(new_state), y

    def keep(self, arguments: tuple[Tree, Tree, Tree], outputs: tuple[Tree, Tree]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the `forward_arrays` of a backward from the arguments (state, x, labels) and outputs (y, changed state) of its forward."""
        y, changed = outputs
        return self._functions.residuals.keep(arguments, (y, self._functions.changed.joined(changed, arguments[0])))

    def trained(self, params: Tree) -> Tree:
        """Return the part of the parameters that an update takes and returns."""
        return self._functions.trained.part(params)

    def updated(self, params: Tree, trained: Tree) -> Tree:
        """Return the parameters, with the trained parameters replaced by the results of an update."""
        return self._functions.trained.joined(trained, params)

    @property
    def gradients(self) -> tuple[bool, bool]:
        """Whether a gradient is computed for the stage input, and for the stage output."""
        return self._functions.input_gradient, self._functions.output_gradient

    @cached_property
    def _functions(self) -> StageFunctions:
        f = stage_functions(self.stack, self.stage, self.specs, self.labels, self.loss, self.optimizer, self.precision)
        ids = self.stack.ids[: self.stack.ids.index(self.stage.layers[0])]
        earlier = {layer_id: self.specs[layer_id].params for layer_id in ids if layer_id in self.specs}
        return with_gradients([f], self.stack.ties.split(earlier))[0]


def in_slices(plan: Plan, spec: tuple[Tree, Tree], stages: Sequence[StandaloneStage]) -> list[list[StandaloneStage]]:
    """Return for each slice of the rows stages that compute only this slice.

    Args:
        plan: a plan that cuts rows into slices; its other fields do not count.
        spec: the shapes and dtypes of one microbatch, (inputs, labels).
        stages: stages of one model for whole rows; the last one includes the loss.

    Raises:
        InputError: the model cannot be computed slice by slice.
    """
    result = []
    for functions in variants_of(plan, spec, [stage._functions for stage in stages]):
        result.append([replace(stage) for stage in stages])
        for stage, of_slice in zip(result[-1], functions, strict=True):
            vars(stage)["_functions"] = of_slice  # in place of those for whole rows
    return result


def costs_in_slices(slices: Sequence[Sequence[StandaloneStage]]) -> tuple[StageCost, ...]:
    """Return the costs of stages from `in_slices`: the costs of the mean slice and, in `by_slice`, of each slice."""
    functions = [[stage._functions for stage in stages] for stages in slices]
    return joined_costs(functions, [[stage.cost for stage in stages] for stages in slices])
