"""The builder of the functions of all stages of a plan, for batches of any shape."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from jpipe.capabilities.registry import exchange_of, values_of
from jpipe.context import traced_platform
from jpipe.errors import InputError
from jpipe.meshes._partition import partitions
from jpipe.model._function_arguments import Loss, random_parameter
from jpipe.model._layer import LayerSpec
from jpipe.model._precision import Precision
from jpipe.model._stack import LayerStack, Probed
from jpipe.model.layerwise._optimizer import LayerwiseOptimizer
from jpipe.model.layerwise._probe import find_layerwise
from jpipe.plan import Plan, Stage, excluded
from jpipe.schedules import SCHEDULES
from jpipe.stages._batch import Batch, rows_of
from jpipe.stages._gradients import check_gradients, with_gradients
from jpipe.stages.functions._loss import check_loss
from jpipe.stages.functions._stage_functions import Specs, StageFunctions, rng_spec

Tree = Any


@dataclasses.dataclass
class StageBuilder:
    """A builder of each stage's functions, which checks that model, plan, loss, optimizer and batch are compatible.

    It keeps its last result, because building traces the whole model.
    """

    stack: LayerStack  # the model
    plan: Plan  # the plan
    loss: Loss  # `(outputs, labels) -> (sum of the losses, weight)`
    # the optimizer. It is probed once for each model, even for several plans, unless the parameters change with the batch.
    optimizer: optax.GradientTransformation
    precision: Precision  # the precision in which the layers of `stack` already compute
    ema_decay: float | None  # the decay of the moving average of the weights, or None
    delay_factor: float | None  # as in `LayerwiseOptimizer`, for the stages with late gradients
    arguments: Mapping[str, Any]  # all options of the pipeline, as in `excluded`
    _built: tuple[Any, list[StageFunctions]] | None = None  # what the last result depends on, and the last result

    def build(self, spec: Batch) -> list[StageFunctions]:
        """Return the functions of each stage for microbatches of the spec (inputs, labels)."""
        known = spec, jax.dtypes.canonicalize_dtype(np.float64), traced_platform()  # losses are summed in this dtype
        if self._built is not None and self._built[0] == known:
            return self._built[1]
        inputs, labels = spec
        layers = self.stack.specs(inputs)
        unprobed = LayerwiseOptimizer(self.optimizer)  # a placeholder, so that a wrong loss is reported before a wrong optimizer
        split = partitions(self.plan, self.stack, layers, rows_of(spec))
        entries = self.stack.ties.in_stages([stage.layers for stage in self.plan.stages])
        capabilities = values_of(self.plan, self.arguments, entries)
        # Parallel pipelines average only when the state is read, even if they flush.
        at_updates = SCHEDULES[self.plan.schedule].flushes and not self.plan.has_parallel_pipelines
        common = {"capabilities": capabilities, "average_state": ("update" if at_updates else "read") if self.plan.sync_state else None}
        functions = []
        for s, stage in enumerate(self.plan.stages):
            options = common | {"counted": entries.counted[s], "partition": split[s], "number": s if capabilities else 0}
            functions.append(stage_functions(self.stack, stage, layers, labels, self.loss, unprobed, self.precision, **options))
        layerwise = self._layerwise({layer_id: spec.params for layer_id, spec in layers.items()})
        check_gradients(self.stack, layers, len(self.plan.stages[0].layers), self.loss, labels, layerwise.trained)
        layerwise = dataclasses.replace(layerwise, ema_decay=self.ema_decay)
        entries = entries.without([name for name in self.stack.ties.first if layerwise.trained.excludes(name)])
        if problem := excluded(self.plan, **self.arguments, ties=entries.in_several or None):
            raise InputError(problem)
        capabilities = values_of(self.plan, self.arguments, entries)
        optimizers = [dataclasses.replace(layerwise, delay_factor=factor) for factor in self._delay_factors]
        of_stages = zip(functions, optimizers, strict=True)
        complete = [dataclasses.replace(f, optimizer=optimizer, capabilities=capabilities) for f, optimizer in of_stages]
        self._built = known, with_gradients(complete)
        return self._built[1]

    @property
    def _delay_factors(self) -> list[float | None]:
        return [self.delay_factor if delay else None for delay in self.plan.delays]

    def _layerwise(self, params: Tree) -> LayerwiseOptimizer:
        predicts = any(factor is not None for factor in self._delay_factors)
        key = id(self.optimizer), self.precision.has_masters, predicts, self.plan.depth
        probed = self.stack.probed.get(key)
        if probed is None or probed.params != params:
            layerwise = find_layerwise(
                self.optimizer, params, self.precision.has_masters, self.stack.ties, predicts, self.plan.depth, self.stack.tree
            )
            self.stack.probed.clear()  # only the newest result is kept
            probed = self.stack.probed[key] = Probed(self.optimizer, params, layerwise)
        return probed.layerwise


def stage_functions(
    stack: LayerStack,
    stage: Stage,
    layers: Mapping[str, LayerSpec],
    labels: Tree,
    loss: Loss,
    optimizer: LayerwiseOptimizer,
    precision: Precision,
    **options: Any,
) -> StageFunctions:
    """Return the functions of one stage of a model; arguments and `options` are fields of `StageFunctions`."""
    stage = stage.resolved(platform := traced_platform())
    first, last, exchange = stage.layers[0] == stack.ids[0], stage.layers[-1] == stack.ids[-1], exchange_of(options.get("capabilities", {}))
    draws = stack.is_stochastic(stage.layers) or (last and random_parameter(loss)) or exchange.draws
    rng = rng_spec() if draws else (None, None)
    fresh = stack.ties.split({layer_id: spec.params for layer_id, spec in layers.items()}, stage.layers)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, precision.version_dtype(p.dtype)), fresh)
    state = {layer_id: layers[layer_id].state for layer_id in stage.layers}
    x = layers[stage.layers[0]].x
    received = x if first else exchange.specs("activation", x)
    specs = Specs(params, state, received, labels if last else None, rng, fresh, x)
    options = {"input_gradient": not first, "counted": stage.layers, "platform": platform, **options}
    if last:
        check_loss(loss, "loss", f"'{stage.layers[-1]}'", layers[stage.layers[-1]].output, labels)
    return StageFunctions(stack, stage, first, last, loss, optimizer, specs, precision=precision, **options)
