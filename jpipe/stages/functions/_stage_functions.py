"""One stage of a model: forward and backward as pure functions, and the shapes of their arguments and results."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.capabilities.protocol import Exchange, SumHooks
from jpipe.capabilities.registry import exchange_of, runtimes_for
from jpipe.context import Positions, tracing_at, tracing_on
from jpipe.errors import callers_code, cause
from jpipe.meshes._partial_sums import PartialSums
from jpipe.meshes._partition import ONE_DEVICE, Partition
from jpipe.model._function_arguments import Loss, random_parameter
from jpipe.model._layer import LayerSpec, key_spec
from jpipe.model._precision import PLAIN, LossScale, Precision
from jpipe.model._stack import LayerStack
from jpipe.model._subset import EVERYTHING, Subset, floats_of, is_float, with_floats
from jpipe.model.jaxprs._dependence import calls_host, is_literal, passed_on
from jpipe.model.jaxprs._primitives import all_but_elementwise, all_but_elementwise_on_gpu, all_but_elementwise_on_tpu, all_but_joined
from jpipe.model.jaxprs._row_dims import row_dims
from jpipe.model.layerwise._optimizer import LayerwiseOptimizer
from jpipe.plan import Stage, repeats_forward
from jpipe.stages.functions._effects import describe_effects
from jpipe.stages.functions._late_sums import LateSums, row_dims_of
from jpipe.stages.functions._loss import accumulate, add_entry, call_loss, loss_dtype, zero_accumulators
from jpipe.stages.functions._residuals import Residuals, find_residuals
from jpipe.stages.functions._split_backward import LateInputs, SplitBackward

Tree = Any


@dataclass(frozen=True)
class Specs:
    """The shapes and dtypes at one stage, for one microbatch."""

    params: Tree  # the parameters of the weight versions
    state: Tree  # the layer state
    x: Tree  # the stage input as the forward gets it; a capability may have encoded it
    labels: Tree  # the labels, at the last stage
    rng: tuple[Any, Any]  # (microbatch, key), or Nones without randomness
    fresh: Tree  # the parameters as the layers initialize them
    input: Tree  # the stage input as the layers read it

    @property
    def arguments(self) -> tuple[Tree, Tree, Tree]:
        """The arguments of a forward in addition to the weights: (state, x, labels)."""
        return self.state, self.x, self.labels


def rng_spec() -> tuple[Any, Any]:
    """Return the specs of (microbatch, key)."""
    return jax.ShapeDtypeStruct((), np.uint32), key_spec()


@dataclass(frozen=True)
class StageFunctions:
    """The computations of one stage, as pure functions of pytrees. They do not depend on the schedule.

    `params` and `state` are keyed by layer id. `x` is the stage input, `y` its output; at the last stage y is (sum of the losses,
    weight). `rng` is (microbatch, key), or (None, None) without randomness. A gradient message is (gradient of the floating-point
    leaves of y, weight of the microbatch); at the last stage it is y. `accumulators` sum over a batch: gradients, weight and, at the
    last stage, loss. `scale` is the loss scale of a microbatch if it is dynamic, else None.

    Gradients, accumulators and the arguments and results of an update have only the trained parameters (`optimizer.trained`), with None in
    place of frozen parameters; forwards and backwards read all `params`. Forwards return only the part of the layer state that a microbatch
    changes (`changed`).

    x, y and the gradients in gradient messages are in the form in which they are sent. If a capability encodes them, the receiving stage
    decodes them.

    For a slice of the rows (`positions`), x is a pair: the stage input, and the carries that the stage's layers returned for the slice
    before, by layer id. y is (the stage output, carries for the next slice); `forward` leaves out the carries that are passed on unchanged
    (`with_passed`). Gradients are of both parts of a pair. The first part of the last stage's message is [sum of the losses, gradients of
    the carries].

    Attributes:
        stack: the model.
        stage: the layers of the stage, and their recomputation.
        first: whether the stage is the first one.
        last: whether the stage is the last one.
        loss: `(outputs, labels) -> (sum, weight)`, called at the last stage.
        optimizer: the optimizer, which is applied to each layer separately; its state is keyed by layer id.
        specs: the shapes and dtypes for one microbatch.
        capabilities: for each capability with its own programs the values of its options, by key; see `values_of`.
        average_state: when replicas average their layer state: at each "update", when the state is "read" from the run, or never (None).
        metrics: functions like the loss, by name, which an evaluation also computes.
        number: the number of the stage in its plan.
        counted: the entries that this stage counts in sums over all stages, which count each entry once.
        precision: the dtypes of weight versions and accumulators, and the loss scale; the layers of `stack` already compute in it.
        partition: how the stage's arrays are sharded over the mesh of each worker.
        input_gradient: whether the gradient of x is computed. It is not at the first stage, or if all earlier parameters are frozen.
        output_gradient: whether the gradient of y is computed. It is not if all parameters up to this stage's last layer are frozen.
            Messages without a gradient have an empty list instead.
        platform: the platform for which the layers are traced.
        positions: the positions of the slice of the rows that the functions compute; None for whole rows.
    """

    stack: LayerStack
    stage: Stage
    first: bool
    last: bool
    loss: Loss
    optimizer: LayerwiseOptimizer
    specs: Specs
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    average_state: Literal["update", "read"] | None = None
    metrics: Mapping[str, Loss] = field(default_factory=dict)
    precision: Precision = PLAIN
    number: int = 0
    counted: tuple[str, ...] = ()
    partition: Partition = ONE_DEVICE
    input_gradient: bool = True
    output_gradient: bool = True
    platform: str = "cpu"
    positions: Positions | None = None

    # Computations ------------------------------------------------------------------------------------------------------

    def forward(self, params: Tree, state: Tree, x: Tree, labels: Tree, rng: tuple[Any, Any]) -> tuple[Tree, Tree, tuple[jax.Array, ...]]:
        """Run the forward: return y, the changed part of the state, and the arrays saved for the backward."""
        (y, new_state), saved = self.residuals.run(params, (state, x, labels), rng)
        return self._without_passed(y), self.changed.part(new_state), saved

    def backward(
        self, params: Tree, forward_arrays: Any, saved: Tree, message: Tree, accumulators: Tree, rng: tuple[Any, Any], scale: Any = None
    ) -> tuple[Tree, Tree]:
        """Run the backward: return the gradient message for the previous stage, and the accumulators with this microbatch added."""
        return self.pull_back(self.restored_vjp(params, forward_arrays, saved, rng), message, accumulators, rng, scale)

    def forward_backward(
        self, params: Tree, state: Tree, x: Tree, labels: Tree, accumulators: Tree, rng: tuple[Any, Any], scale: Any = None
    ) -> tuple[Any, Tree, Tree]:
        """Run the last stage's forward and backward as one computation.

        Returns:
            The gradient message for the previous stage; the accumulators with this microbatch added; the changed part of the state.
        """
        functions = self.at_once
        (y, new_state), vjp = functions.linearized(params, (state, x, labels), rng)
        message, accumulators = functions.pull_back(vjp, y, accumulators, rng, scale)
        return message, accumulators, self.changed.part(new_state)

    def backward_input(
        self, params: Tree, forward_arrays: Any, saved: Tree, message: Tree, rng: tuple[Any, Any], scale: Any = None
    ) -> tuple[Tree, list[jax.Array]]:
        """Run the first half of a backward: return the gradient message for the previous stage, and the stash."""
        x_gradient, stash = self.halves.gradients_of_input(params, forward_arrays, saved, message, rng, scale)
        return self.sent_gradient(x_gradient, message[1], rng), stash

    def backward_weight(
        self, params: Tree, late: LateInputs, stash: Sequence[Any], accumulators: Tree, rng: tuple[Any, Any], scale: Any = None
    ) -> Tree:
        """Run the second half of a backward: return the accumulators with this microbatch added."""
        arrays, numbers = late
        return self._accumulated(self.halves.gradients_of_weights(params, arrays, stash, rng, scale), numbers, accumulators, scale)

    def forward_backward_input(
        self, params: Tree, state: Tree, x: Tree, labels: Tree, rng: tuple[Any, Any], scale: Any = None
    ) -> tuple[Tree, Tree, Any]:
        """Run the last stage's forward and the first half of its backward as one computation.

        Returns:
            The gradient message for the previous stage; the changed part of the state; the results that `halves.stash_of` takes.
        """
        y, changed, saved = self.forward(params, state, x, labels, rng)
        forward_arrays = self.residuals.keep((state, x, labels), (y, self.changed.joined(changed, state)))
        gradient, stash = self.backward_input(params, forward_arrays, saved, y, rng, scale)
        return gradient, changed, (y, [saved[i] for i in self.halves.late_saved], stash)

    def init_optimizer(self, params: Tree) -> Tree:
        """Return the optimizer state of new parameters, keyed by layer id."""
        return {layer_id: self.optimizer.init(layer_id, p) for layer_id, p in self.trained.part(params).items()}

    def zero_accumulators(self, params: Tree) -> Tree:
        """Return the accumulators at the start of a batch."""
        return zero_accumulators(self.trained.part(params), self.precision, last=self.last)

    def sum_devices(self, accumulators: Tree) -> Tree:
        """Add up the complete accumulators, or some of their entries, over the devices of the rows."""
        assert self.late_sums is not None
        return {**accumulators, "gradients": self.late_sums.total(accumulators["gradients"])}

    def first_version(self, fresh: Tree) -> Tree:
        """Return the first weight version from initialized parameters; it shares no array with them."""
        return jax.tree.map(lambda p, spec: p.astype(spec.dtype) if p.dtype != spec.dtype else jnp.copy(p), fresh, self.specs.params)

    # Parts of the parameters and the state -------------------------------------------------------------------------------

    @property
    def trained(self) -> Subset:
        """The parameters that updates change, by entry."""
        return self.optimizer.trained

    @cached_property
    def changed(self) -> Subset:
        """The layer state that a microbatch changes: all arrays except those that the layers return unchanged."""
        if not jax.tree.leaves(self.specs.state):
            return EVERYTHING

        def new_state(state: Tree, params: Tree, x: Tree, microbatch: Any, key: Any) -> Tree:
            return self.apply(self.whole(params), state, x, (microbatch, key), train=True)[1]

        traced = jax.make_jaxpr(new_state)(self.specs.state, self.specs.params, self.specs.input, *self.specs.rng)
        flags = [source != i for i, source in enumerate(passed_on(traced.jaxpr))]
        by_layer = jax.tree.unflatten(jax.tree.structure(self.specs.state), flags)
        return Subset({layer_id: tuple(leaves) for layer_id, tree in by_layer.items() if not all(leaves := jax.tree.leaves(tree))})

    def averaged_state(self, state: Tree) -> list[Any]:
        """Select the leaves of the layer state (or of its specs) that replicas average: floating-point leaves that a microbatch changes."""
        return floats_of(self.changed.part(state))

    def with_averages(self, state: Tree, means: Iterable[Any]) -> Tree:
        """Return the layer state with these means in place of the leaves of `averaged_state`."""
        return self.changed.joined(with_floats(self.changed.part(state), means), state)

    @property
    def averages_when_read(self) -> bool:
        """Whether the stage has layer state that replicas average when it is read from the run."""
        return self.average_state == "read" and self.stage.replicas > 1 and bool(self.averaged_state(self.specs.state))

    @property
    def summing(self) -> SumHooks | None:
        """How a capability sums the gradients of the stage's replicas; None: around a ring."""
        return self.exchange.sums if self.stage.replicas > 1 else None

    @property
    def predicts(self) -> bool:
        """Whether updates move the weights ahead by a prediction, because the stage's gradients are late."""
        return self.optimizer.delay_factor is not None

    @cached_property
    def apart(self) -> frozenset[str]:
        """The entries that capabilities update with their own programs."""
        used = runtimes_for(self.capabilities).values()
        return frozenset(name for hooks in used if hooks.apart is not None for name in hooks.apart.names(self))

    def without_apart(self, tree: Mapping[str, Tree]) -> dict[str, Tree]:
        """Select the entries that the stage's own update changes."""
        return {entry: part for entry, part in tree.items() if entry not in self.apart}

    @cached_property
    def added(self) -> dict[str, Any]:
        """A cache for objects that capabilities make from these functions, by the name of the capability."""
        return {}

    def apply(self, params: Tree, state: Tree, x: Tree, rng: tuple[Any, Any], *, train: bool) -> tuple[Tree, Tree]:
        """Run the layers with the parameters of whole layers, and return the output of the last layer and the new state."""
        microbatch, key = rng
        x, carries = (x, None) if self.positions is None else x
        with tracing_on(self.partition.traced), tracing_at(self.positions):
            y, new_state = self.stack.apply(
                self.stage.layers, params, state, x, key=key, microbatch=microbatch, train=train, carries=carries
            )
        if self.positions is not None and self.positions.are_last:
            y = y[0], {}
        return y, new_state

    @cached_property
    def late_sums(self) -> LateSums | None:
        """The gradients that the devices of the rows add up once per update; None if there are none."""
        late = self.partition.sums_late(self.specs.params)
        if not any(jax.tree.leaves(late)):
            return None
        by_layer = self._trained_in_layers.part({layer_id: self.stack.ties.whole(layer_id, late) for layer_id in self.stage.layers})
        partial = PartialSums(self.partition.mesh, self.partition.batch)
        return LateSums(partial, self.trained.part(late), by_layer, lambda: self._vjp_dims, self.partition.rows)

    @cached_property
    def _vjp_dims(self) -> list[int | None]:
        """The dim of the rows of each leaf of the VJP, or None."""
        jaxpr, (state, *flow), rows = self.residuals.forward.jaxpr, self.specs.arguments, self.partition.rows
        none = [[None] * len(jax.tree.leaves(part)) for part in (self.specs.params, state, self.specs.rng)]
        dims = row_dims(jaxpr, [*none[0], *none[1], *row_dims_of(flow, rows), *none[2]])
        leaves = jaxpr.outvars[len(jaxpr.outvars) - len(self.residuals.sources) :]
        return [None if is_literal(var) else dims.get(var) for var in leaves]

    @cached_property
    def exchange(self) -> Exchange:
        """How workers exchange activations and gradients."""
        return exchange_of(self.capabilities)

    def received(self, x: Tree) -> Tree:
        """Decode the stage input into the form that the layers read."""
        if self.first or self.positions is None:
            return x if self.first else self.exchange.decode("activation", x, self.specs.input)
        return self.exchange.decode("activation", x[0], self.specs.input[0]), x[1]

    def sent(self, y: Tree, rng: tuple[Any, Any] | None) -> Tree:
        """Encode the output of the layers into the form that the forward returns; `rng` is None in an evaluation."""
        if self.last or self.positions is None:
            return y if self.last else self.exchange.encode("activation", y, self.number, rng)
        return self.exchange.encode("activation", y[0], self.number, self._rng_of_slice(rng)), y[1]

    def sent_gradient(self, gradient: Tree, weight: Any, rng: tuple[Any, Any]) -> tuple[Tree, Any]:
        """Return the gradient message for the previous stage."""
        encoded = self.exchange.encode("gradient", gradient[: self.gradients_sent], self.number, self._rng_of_slice(rng))
        return [*encoded, *gradient[self.gradients_sent :]], weight

    def _rng_of_slice(self, rng: Any) -> Any:
        """Return (microbatch, key) with another key for each slice of the rows, for random numbers of messages."""
        if self.positions is None or rng is None or rng[1] is None:
            return rng
        return rng[0], jax.random.fold_in(rng[1], self.positions.start)

    def whole(self, params: Tree) -> Tree:
        """Return the parameters of whole layers, by layer id, gathered for use."""
        params = self.partition.gather(params)
        return {layer_id: self.stack.ties.whole(layer_id, params) for layer_id in self.stage.layers}

    @cached_property
    def at_once(self) -> "StageFunctions":
        """The functions for a program that runs forward and backward. They recompute no elementwise operation.

        It would save nothing, because XLA chooses what to keep in one program, and on TPUs it takes longer.
        """
        if self.stage.recompute != "elementwise":
            return self
        return replace(self, stage=self.stage.model_copy(update={"recompute": "none"}))

    # Residuals and halves ------------------------------------------------------------------------------------------------

    @cached_property
    def residuals(self) -> Residuals:
        """The arrays that the backward gets from the forward."""

        def message(error: BaseException) -> str:
            name = self.description
            return f"{name}: the forward cannot be recomputed: {cause(error)}; set recompute to 'none' for the stage, or remove the cause"

        with callers_code(message) if self.stage.recompute != "none" else nullcontext():
            return find_residuals(self.linearize, self.specs.params, self.specs.arguments, self.specs.rng)

    @cached_property
    def halves(self) -> SplitBackward:
        """The backward in two halves."""

        def backward(params: Tree, forward_arrays: Any, saved: Tree, message: Tree, rng: Tree, scale: Any) -> tuple[list[jax.Array], Tree]:
            gradients, x_gradient = self.cotangents(self.restored_vjp(params, forward_arrays, saved, rng), message, scale)
            return x_gradient, gradients

        return SplitBackward(
            backward=backward,
            params=self.specs.params,
            between=self.between_specs,
            rng=self.specs.rng,
            scale=None if self.scale_spec is None else self.scale_spec.value,
            input_count=len(self.moving),
            gradients=self._gradients_spec,
            residuals=self.residuals,
            numbers_of=self._numbers_of,
            describe=lambda: self.description,
        )

    @property
    def description(self) -> str:
        """The layers with side effects, or the stage if there are none, as text for a message."""
        return describe_effects(self.stack, self.stage.layers, self.specs.input if self.positions is None else self.specs.input[0])

    @property
    def repeated_effects(self) -> str:
        """The layers with side effects that the backward repeats, as text for a message; empty if there are none."""
        return self.description if repeats_forward(self.stage.recompute) and calls_host(self.residuals.forward.jaxpr) else ""

    # Shapes and dtypes -----------------------------------------------------------------------------------------------------

    @cached_property
    def optimizer_spec(self) -> Tree:
        """Shapes and dtypes of the optimizer state."""
        return jax.eval_shape(self.init_optimizer, self.specs.params)

    @cached_property
    def accumulators_spec(self) -> Tree:
        """Shapes and dtypes of the accumulators."""
        return jax.eval_shape(self.zero_accumulators, self.specs.params)

    @property
    def scale_spec(self) -> LossScale | None:
        """Shapes and dtypes of the loss scale, if it is dynamic."""
        dynamic = self.precision.dynamic_scale
        return None if dynamic is None else jax.eval_shape(dynamic.first)

    @cached_property
    def outputs_spec(self) -> Tree:
        """Shapes and dtypes of the y that `forward` returns."""
        return self._without_passed(self._forward_spec[0])

    @cached_property
    def between_specs(self) -> tuple[Any, Any, Any]:
        """The shapes and dtypes of (forward_arrays, saved, message): what a backward gets from the forward, and its gradient message."""
        y, changed, saved = self._forward_spec
        forward_arrays = self.residuals.keep(self.specs.arguments, (y, self.changed.joined(changed, self.specs.state)))
        if self.last and self.positions is None:
            return forward_arrays, saved, y
        if self.last:
            return forward_arrays, saved, ([y[0][0], *floats_of(y[1])], y[0][1])
        floats, count = floats_of(self._layers_output) if self.output_gradient else [], self.gradients_received
        gradient = [*self.exchange.specs("gradient", floats[:count]), *floats[count:]]
        return forward_arrays, saved, (gradient, jax.ShapeDtypeStruct((), loss_dtype()))

    @property
    def gradient_spec(self) -> tuple[Tree, Any]:
        """Shapes and dtypes of the gradient message for the previous stage."""
        leaves, count = jax.tree.leaves(self.specs.input), self.gradients_sent
        moving = [leaves[i] for i in self.moving]
        return [*self.exchange.specs("gradient", moving[:count]), *moving[count:]], jax.ShapeDtypeStruct((), loss_dtype())

    @cached_property
    def gradients_sent(self) -> int:
        """The number of arrays in the gradient of the stage input; gradients of carries follow them in a message."""
        flow = len(jax.tree.leaves(self.specs.input if self.positions is None else self.specs.input[0]))
        return sum(i < flow for i in self.moving)

    @cached_property
    def gradients_received(self) -> int:
        """The number of arrays in the received gradient of the stage output; gradients of carries follow them."""
        return 1 if self.last else len(floats_of(self._layers_output if self.positions is None else self._layers_output[0]))

    @cached_property
    def moving(self) -> list[int]:
        """The positions of the leaves of the input for which a gradient is computed. The first stage has gradients of carries only."""
        leaves, first = jax.tree.leaves(self.specs.input), 0
        if not self.input_gradient:
            is_carry = self.positions is not None and self.output_gradient
            first = len(jax.tree.leaves(self.specs.input[0])) if is_carry else len(leaves)
        return [i for i in range(first, len(leaves)) if is_float(leaves[i])]

    @cached_property
    def _layers_output(self) -> Tree:
        """Shapes and dtypes of the output of the layers; for a slice with the carries."""
        if self.positions is None:
            return self.last_layer.output

        def output(params: Tree, state: Tree, x: Tree, microbatch: Any, key: Any) -> Tree:
            return self.apply(self.whole(params), state, x, (microbatch, key), train=True)[0]

        return jax.eval_shape(output, self.specs.params, self.specs.state, self.specs.input, *self.specs.rng)

    # Carries -------------------------------------------------------------------------------------------------------------

    @cached_property
    def passed(self) -> list[int | None]:
        """For each leaf of the carries that the forward leaves: the leaf of the received carries that it is, or None if it is new."""
        jaxpr, (y, _) = self.residuals.forward.jaxpr, self.residuals.results[0]
        first = len(jax.tree.leaves((self.specs.params, self.specs.state, self.specs.x[0])))
        begin, count = (len(jax.tree.leaves(part)) for part in y)
        received = range(first, first + len(jax.tree.leaves(self.specs.input[1])))
        sources = passed_on(jaxpr)[begin : begin + count]
        return [source - first if source is not None and source in received else None for source in sources]

    def _without_passed(self, y: Tree) -> Tree:
        """Leave out the carries that are passed on unchanged; y is unchanged for whole rows."""
        if self.positions is None:
            return y
        return y[0], [leaf for leaf, source in zip(jax.tree.leaves(y[1]), self.passed, strict=True) if source is None]

    def with_passed(self, y: Tree, carries: Tree) -> Tree:
        """Return the result of a forward with the carries that were passed on, which are arrays of the received carries."""
        received, new = jax.tree.leaves(carries), iter(y[1])
        leaves = [next(new) if source is None else received[source] for source in self.passed]
        return y[0], jax.tree.unflatten(jax.tree.structure(self._forward_spec[0][1]), leaves)

    @cached_property
    def last_layer(self) -> LayerSpec:
        """Shapes and dtypes around the last layer."""
        return self.stack.specs(self.specs.input, self.stage.layers)[self.stage.layers[-1]]

    @cached_property
    def evaluation_rng(self) -> tuple[Any, Any]:
        """The specs of (microbatch, key) in an evaluation, or Nones if it draws no random numbers."""
        asks = self.last and any(map(random_parameter, (self.loss, *self.metrics.values())))
        return rng_spec() if asks or self.stack.is_stochastic(self.stage.layers, train=False) else (None, None)

    @cached_property
    def _forward_spec(self) -> Any:
        (y, new_state), vjp = self.residuals.results
        return y, self.changed.part(new_state), jax.eval_shape(self.residuals.saved, jax.tree.leaves(vjp))

    @cached_property
    def _gradients_spec(self) -> Tree:
        """Shapes and dtypes of the gradients of the trained parameters of whole layers, before they are accumulated."""
        return self._trained_in_layers.part(jax.eval_shape(self.whole, self.specs.params))

    # Inside ------------------------------------------------------------------------------------------------------------

    def linearize(self, params: Tree, arguments: tuple[Tree, Tree, Tree], rng: tuple[Any, Any]) -> tuple[tuple[Tree, Tree], Any]:
        """Run the forward in training mode and return its outputs with their VJP.

        A parameter that two layers share is in both layers. Its two gradients are summed only in the accumulators, not before in the dtype
        of the parameter.

        Returns:
            (y, new state); the VJP of y's floating-point leaves with respect to the trained parameters of whole layers and the leaves of x,
            or None if no gradient is computed.
        """
        state, received, labels = arguments
        x = self.received(received)
        leaves, treedef = jax.tree.flatten(x)
        moving, whole = self.moving, self.whole(params)

        def stage(trained: Tree, floats: list[jax.Array]) -> tuple[Any, Any]:
            params = self._trained_in_layers.joined(trained, whole)
            filled = list(leaves)
            for i, leaf in zip(moving, floats, strict=True):
                filled[i] = leaf
            x = jax.tree.unflatten(treedef, filled)
            y, new_state = self.apply(params, state, x, rng, train=True)
            if self.last:
                outputs, *carries = (y,) if self.positions is None else y
                with tracing_at(self.positions):
                    total, weight = self.loss_of(outputs, labels, self.draw_key(self.loss, "", rng, train=True))
                y = (total, weight) if self.positions is None else ((total, weight), *carries)
                return [total, *floats_of(carries)], (y, new_state)
            return floats_of(y), (y, new_state)

        trained, floats = self._trained_in_layers.part(whole), [leaves[i] for i in moving]
        if not self.output_gradient:
            y, new_state = stage(trained, floats)[1]
            return (self.sent(y, rng), new_state), None
        match self.stage.recompute:
            case "none":
                recomputing = stage
            case "elementwise":
                on = {"gpu": all_but_elementwise_on_gpu, "tpu": all_but_elementwise_on_tpu()}
                saves = on.get(self.platform, all_but_elementwise)
                policy = saves if self.positions is None else all_but_joined(saves)
                recomputing = jax.checkpoint(stage, policy=policy, prevent_cse=False)
            case "full":
                recomputing = jax.checkpoint(stage)
            case policy:
                recomputing = jax.checkpoint(stage, policy=getattr(jax.checkpoint_policies, policy))
        try:
            _, vjp, (y, new_state) = jax.vjp(recomputing, trained, floats, has_aux=True)
        except NotImplementedError:  # JAX recomputes no forward with an `io_callback`
            if self.stage.recompute != "elementwise":
                raise
            _, vjp, (y, new_state) = jax.vjp(stage, trained, floats, has_aux=True)
        return (self.sent(y, rng), new_state), vjp

    def linearized(self, params: Tree, arguments: tuple[Tree, Tree, Tree], rng: tuple[Any, Any]) -> tuple[tuple[Tree, Tree], Any]:
        """Return the same as `linearize`; if gradients are added up late, from the trace that `residuals` has examined."""
        return (self.linearize if self.late_sums is None else self.residuals.linearize)(params, arguments, rng)

    @cached_property
    def _trained_in_layers(self) -> Subset:
        """The parameters that updates change, by layer id."""
        return self.stack.ties.in_layers(self.trained, self.specs.params, self.stage.layers)

    def restored_vjp(self, params: Tree, forward_arrays: Any, saved: Tree, rng: tuple[Any, Any]) -> Any:
        """Return the VJP of a forward from its residuals, or None if no gradient is computed."""
        return self.residuals.vjp(params, rng, forward_arrays, saved) if self.output_gradient else None

    def pull_back(self, vjp: Any, message: Tree, accumulators: Tree, rng: tuple[Any, Any], scale: Any) -> tuple[Tree, Tree]:
        """Apply the VJP to a gradient message, and return the message for the previous stage and the new accumulators."""
        gradients, x_gradient = self.cotangents(vjp, message, scale)
        added = self._accumulated(gradients, self._numbers_of(message), accumulators, scale)
        return self.sent_gradient(x_gradient, message[1], rng), added

    def _numbers_of(self, message: Tree) -> tuple[Any, ...]:
        """Return the numbers of a gradient message that are accumulated: (weight,), or at the last stage (loss, weight)."""
        first, weight = message
        return ((first if self.positions is None else first[0]), weight) if self.last else (weight,)

    def cotangents(self, vjp: Any, message: Tree, scale: Any) -> tuple[Tree, list[jax.Array]]:
        """Return the gradients of the trained parameters and of the floating-point leaves of x, times the loss scale."""
        if not self.output_gradient:
            return self._gradients_spec, []  # without leaves
        gradient, _ = message
        scale = self.scale_of(scale)
        if self.last:
            total, *carries = [gradient] if self.positions is None else gradient
            gradient = [jnp.full_like(total, 1.0 if scale is None else scale), *carries]
        else:
            floats, count = floats_of(self._layers_output), self.gradients_received
            gradient = [*self.exchange.decode("gradient", gradient[:count], floats[:count]), *gradient[count:]]
        gradients, x_gradient = vjp(gradient) if self.late_sums is None else self.late_sums.pull_back(vjp, gradient)
        return gradients, x_gradient

    def _accumulated(self, gradients: Tree, numbers: tuple[Any, ...], accumulators: Tree, scale: Any) -> Tree:
        """Add one microbatch to the accumulators: the gradients, and the numbers (weight,), or at the last stage (loss, weight)."""
        return self.accumulate(accumulators, self.stack.ties.by_place(gradients), numbers, scale)

    def accumulate(self, accumulators: Tree, gradients: Iterable[tuple[str, Tree]], numbers: tuple[Any, ...], scale: Any) -> Tree:
        """Add one microbatch to the accumulators, or to some of their entries. The arguments are as in `_loss.accumulate`."""
        add = add_entry if self.late_sums is None else self.late_sums.add
        return accumulate(accumulators, gradients, numbers, self.scale_of(scale), add)

    def scale_of(self, scale: Any) -> Any:
        """Return the loss scale of a microbatch, which is the same in all stages; None if there is none."""
        return self.precision.fixed_scale if scale is None else scale

    def loss_of(self, outputs: Tree, labels: Tree, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Return the loss and the weight of a microbatch; the weight has no gradient."""
        total, weight = call_loss(self.loss, "loss", outputs, labels, key)
        return total, jax.lax.stop_gradient(weight)

    def draw_key(self, function: Loss, name: str, rng: tuple[Any, Any], *, train: bool, of_metric: bool = False) -> jax.Array | None:
        """Return the random key of the loss or a metric for a microbatch, or None if the function takes none."""
        microbatch, key = rng
        return self.stack.draw_key(key, name, microbatch, train, of_metric=of_metric) if random_parameter(function) else None
