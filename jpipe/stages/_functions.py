"""One stage as pure functions: forward, backward, whole or in two halves, fused, update, evaluate. They do not depend on the schedule."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.errors import InputError, callers_code, cause
from jpipe.meshes._partition import ONE_DEVICE, Partition
from jpipe.model._layer import LayerSpec, describe, key_spec
from jpipe.model._losses import Loss, asked_for, called
from jpipe.model._optimizer import LayerwiseOptimizer, masters_of
from jpipe.model._precision import PLAIN, LossScale, Precision, widened
from jpipe.model._stack import LayerStack
from jpipe.model._subset import EVERYTHING, Subset
from jpipe.model._ties import NOTHING_SHARED, Sharing
from jpipe.model.jaxprs._dependence import passed_on
from jpipe.plan import Stage
from jpipe.stages._residuals import Residuals, find_residuals
from jpipe.stages._split import Halves, NotSplittable, split, undivided

Tree = Any


class GlobalNorm(NamedTuple):
    """The gradients of all stages, as far as an update has to know them; scalars.

    Attributes:
        norm: square root of the sum of the squares of the mean gradients.
        nonfinite: how many of their entries are NaN or infinite.
    """

    norm: Any
    nonfinite: Any


@dataclass(frozen=True)
class Specs:
    """Shapes and dtypes at one stage: its weights, state, input and labels for one microbatch, and (microbatch, key) of its rng.

    `fresh` are the parameters as the layers make them, `params` those of the weight versions.
    """

    params: Tree
    state: Tree
    x: Tree
    labels: Tree
    rng: tuple[Any, Any]
    fresh: Tree

    @property
    def arguments(self) -> tuple[Tree, Tree, Tree]:
        """(state, x, labels): what a forward reads besides the weights."""
        return self.state, self.x, self.labels


@dataclass(frozen=True)
class StageFunctions:
    """The computations of one stage, as pure functions of pytrees.

    `params` and `state` are keyed by layer id. `x` is the stage input, `y` its output; at the last stage y is (sum of the losses,
    weight). `rng` is (microbatch, key), or (None, None) without randomness. A gradient message is (gradient of the floating-point
    leaves of y, weight of the microbatch); at the last stage it is y. `accumulators` sum over a batch: gradients, weight and, at the
    last stage, loss. `scale` is the loss scale of a microbatch if it is dynamic, else None.

    Gradients, accumulators and what an update takes and gives have the trained parameters only (`optimizer.trained`), with None in the
    places of frozen ones; forwards and backwards read whole `params`. What they give of the layer state is what a microbatch changes
    (`changed`), likewise.

    Attributes:
        stack: the model.
        stage: its layers, and how they are recomputed.
        first, last: whether it is the first or the last stage.
        loss: `(outputs, labels) -> (sum, weight)`, called at the last stage.
        optimizer: applied to each layer separately; its state is keyed by layer id.
        specs: shapes and dtypes for one microbatch.
        clip_global_norm: the norm to which the gradients of all stages are clipped, if any.
        skip_nonfinite: whether an update changes nothing if any gradient of any stage is NaN or infinite.
        update_scale: a factor for the optimizer's updates.
        average_state: when replicas average their layer state: with each update, when it is read from the run, or never.
        metrics: functions like the loss, by name, which an evaluation also computes.
        number: of the stage in its plan.
        sharing: which shared parameters the stages of the plan hold.
        precision: the dtypes of weight versions and accumulators, and the loss scale; the layers of `stack` compute as it says already.
        partition: how its arrays are sharded over the mesh of each of its workers.
        input_gradient: whether the gradient of x is computed: not at the first stage, and not where all parameters before are frozen.
        output_gradient: whether that of y is: not if all parameters up to here are frozen. Messages without a gradient have an empty
            list in its place.
    """

    stack: LayerStack
    stage: Stage
    first: bool
    last: bool
    loss: Loss
    optimizer: LayerwiseOptimizer
    specs: Specs
    clip_global_norm: float | None = None
    skip_nonfinite: bool = False
    update_scale: float = 1.0
    average_state: Literal["update", "read"] | None = None
    metrics: Mapping[str, Loss] = field(default_factory=dict)
    precision: Precision = PLAIN
    number: int = 0
    sharing: Sharing = NOTHING_SHARED
    partition: Partition = ONE_DEVICE
    input_gradient: bool = True
    output_gradient: bool = True

    def forward(self, params: Tree, state: Tree, x: Tree, labels: Tree, rng: tuple[Any, Any]) -> tuple[Tree, Tree, tuple[jax.Array, ...]]:
        """(y, what changes of the state, arrays saved for the backward)."""
        (y, new_state), vjp = self._linearize(params, (state, x, labels), rng)
        return y, self.changed.part(new_state), self.residuals.saved(jax.tree.leaves(vjp))

    def backward(
        self, params: Tree, kept: Any, saved: Tree, message: Tree, accumulators: Tree, rng: tuple[Any, Any], scale: Any = None
    ) -> tuple[Tree, Tree]:
        """(gradient message for the stage before, accumulators with this microbatch added)."""
        return self._pull_back(self._restored_vjp(params, kept, saved, rng), message, accumulators, scale)

    def backward_input(
        self, params: Tree, kept: Any, saved: Tree, message: Tree, rng: tuple[Any, Any], scale: Any = None
    ) -> tuple[Tree, list[jax.Array]]:
        """The first half of a backward: (gradient message for the stage before, stash). `rest` says what else the second half needs."""
        x_gradient, stash = self._halves.first(jax.tree.leaves((params, kept, saved, message, rng, scale)))
        return (x_gradient, message[1]), stash

    def rest(self, kept: Any, saved: Tree, message: Tree) -> tuple[list[Any], tuple[Any, ...]]:
        """What the second half of a backward needs besides the stash, of its residuals and its message: (arrays, numbers of the message).

        Nothing is computed. All other arrays can be let go after the first half.
        """
        leaves = dict(enumerate(jax.tree.leaves((self.specs.params, kept, saved, message))))
        return [leaves[i] for i in self._rest_positions], tuple(message) if self.last else (message[1],)

    def backward_weight(
        self,
        params: Tree,
        rest: tuple[list[Any], tuple[Any, ...]],
        stash: Sequence[Any],
        accumulators: Tree,
        rng: tuple[Any, Any],
        scale: Any = None,
    ) -> Tree:
        """The second half of a backward: the accumulators with this microbatch added."""
        kept, numbers = rest
        given = jax.tree.leaves((params, self.between_specs, rng, scale))
        for position, leaf in zip(self._rest_positions, kept, strict=True):
            given[position] = leaf
        found = self._halves.second([given[i] for i in self._halves.arguments], stash)
        gradients = jax.tree.unflatten(jax.tree.structure(self._gradients_spec), found)
        return self._accumulated(gradients, numbers, accumulators, scale)

    def forward_backward_input(
        self, params: Tree, state: Tree, x: Tree, labels: Tree, rng: tuple[Any, Any], scale: Any = None
    ) -> tuple[Tree, Tree, Any]:
        """The last stage's forward and the first half of its backward in one.

        Returns:
            (gradient message, what changes of the state, what `stash_of` takes).
        """
        y, changed, saved = self.forward(params, state, x, labels, rng)
        kept = self.residuals.keep((state, x, labels), (y, self.changed.joined(changed, state)))
        gradient, stash = self.backward_input(params, kept, saved, y, rng, scale)
        return gradient, changed, (y, [saved[i] for i in self.rest_of_saved], stash)

    def stash_of(
        self, arguments: tuple[Tree, Tree, Tree], new_state: Tree, made: Any
    ) -> tuple[tuple[list[Any], tuple[Any, ...]], list[Any]]:
        """(rest, stash) for `backward_weight` after `forward_backward_input` of these (state, x, labels); nothing is computed."""
        y, own, stash = made
        saved = dict(zip(self.rest_of_saved, own, strict=True))
        kept = self.residuals.keep(arguments, (y, new_state))
        others = 0  # in the place of an array that is not read; a None would not be a leaf
        return self.rest(kept, tuple(saved.get(i, others) for i in range(self.residuals.count)), y), stash

    def _restored_vjp(self, params: Tree, kept: Any, saved: Tree, rng: tuple[Any, Any]) -> Any:
        """The VJP of a forward from its residuals; None where no gradient is computed."""
        return self.residuals.vjp(params, rng, kept, saved) if self.output_gradient else None

    def forward_backward(
        self, params: Tree, state: Tree, x: Tree, labels: Tree, accumulators: Tree, rng: tuple[Any, Any], scale: Any = None
    ) -> tuple[Any, Tree, Tree]:
        """The last stage's forward and backward in one: (gradient message, accumulators, what changes of the state)."""
        (y, new_state), vjp = self._linearize(params, (state, x, labels), rng)
        message, accumulators = self._pull_back(vjp, y, accumulators, scale)
        return message, accumulators, self.changed.part(new_state)

    def sum_squares(self, accumulators: Tree) -> GlobalNorm:
        """For each layer the sum of the squares of its mean gradient, as `norm`, and the number of its entries that are not finite."""
        divisor = _divisor(accumulators["weight"])
        means = {layer_id: _mean(gradient, divisor) for layer_id, gradient in accumulators["gradients"].items()}
        leaves = [[leaf.astype(self.loss_dtype) for leaf in jax.tree.leaves(means[entry])] for entry in self.counted]
        zero = jnp.zeros((), self.loss_dtype)
        squares = [sum((jnp.square(leaf).sum() for leaf in layer), zero) for layer in leaves]
        nonfinite = [sum(((~jnp.isfinite(leaf)).sum(dtype=self.loss_dtype) for leaf in layer), zero) for layer in leaves]
        return GlobalNorm(jnp.stack(squares), jnp.stack(nonfinite))

    def update(
        self, params: Tree, optimizer_state: Tree, accumulators: Tree, norm: GlobalNorm | None = None
    ) -> tuple[Tree, Tree, Tree, tuple[jax.Array, jax.Array] | None]:
        """One optimizer step with the mean gradient: (new params, new optimizer state, zero accumulators, (mean loss, weight)).

        Of the trained parameters of the entries whose optimizer state is given; accumulators may be of more. (Those that other stages
        hold, too, have `update_shared`.) Only the last stage returns the loss and weight of the batch. A batch whose weights are all
        zero has gradient and loss zero. `norm` is that of all stages; it is needed to clip, and to skip batches whose gradients are not
        finite.
        """
        new_params, new_state = self._updated(params, optimizer_state, accumulators, norm)
        zeros = jax.tree.map(jnp.zeros_like, accumulators)
        return new_params, new_state, zeros, self.mean_loss(accumulators) if self.last else None

    def update_shared(
        self, params: Tree, optimizer_state: Tree, gradients: Tree, weight: jax.Array, norm: GlobalNorm | None
    ) -> tuple[Tree, Tree, Tree]:
        """`update` of shared parameters, by name: (new params, new optimizer state, zero gradients).

        All stages that hold them run this same program. As a part of the update of different stages XLA would round it differently.
        """
        new_params, new_state = self._updated(params, optimizer_state, {"gradients": gradients, "weight": weight}, norm)
        return new_params, new_state, jax.tree.map(jnp.zeros_like, gradients)

    def _updated(self, params: Tree, optimizer_state: Tree, accumulators: Tree, norm: GlobalNorm | None) -> tuple[Tree, Tree]:
        """(new params, new optimizer state), the old ones if the batch is skipped."""
        if not self.skip_nonfinite:
            return self._optimized(params, optimizer_state, accumulators, norm)
        assert norm is not None
        # With `where` instead, XLA rounds the update in other ways than without `skip_nonfinite`.
        new_params, new_state = jax.lax.cond(norm.nonfinite == 0, self._optimized, _unchanged, params, optimizer_state, accumulators, norm)
        return new_params, new_state

    def _optimized(self, params: Tree, optimizer_state: Tree, accumulators: Tree, norm: GlobalNorm | None) -> tuple[Tree, Tree]:
        """(new params, new optimizer state)."""
        divisor = _divisor(accumulators["weight"])
        new_params, new_state = {}, {}
        for layer_id in optimizer_state:
            mean = _mean(accumulators["gradients"][layer_id], divisor)
            if self.clip_global_norm is not None:
                assert norm is not None
                mean = jax.tree.map(lambda g: _clip(g, norm.norm, self.clip_global_norm), mean)
            new_params[layer_id], new_state[layer_id] = self.optimizer.update(
                layer_id, mean, optimizer_state[layer_id], params[layer_id], self.update_scale
            )
        return new_params, new_state

    def next_scale(self, scale: LossScale, norm: GlobalNorm) -> LossScale:
        """The dynamic loss scale of the version that an update makes, from that of the version before."""
        assert self.precision.dynamic_scale is not None
        return self.precision.dynamic_scale.after(scale, norm.nonfinite == 0)

    def mean_loss(self, accumulators: Tree) -> tuple[jax.Array, jax.Array]:
        """(mean loss, weight) of a batch, at the last stage."""
        return accumulators["loss"] / _divisor(accumulators["weight"]), accumulators["weight"]

    def finish(self, summed: tuple[Tree, list[jax.Array]]) -> tuple[Tree, list[jax.Array], tuple[jax.Array, jax.Array] | None]:
        """(accumulators, means of the layer state, at the last stage (mean loss, weight) of the batch) from the sums over replicas."""
        accumulators, state = summed
        return accumulators, self.mean_state(state), self.mean_loss(accumulators) if self.last else None

    def evaluate(self, params: Tree, state: Tree, x: Tree, labels: Tree, rng: tuple[Any, Any]) -> Tree:
        """The stage output in evaluation mode; at the last stage (sum, weight) of the loss and of each metric, in their order."""
        y = self.predict(params, state, x, None, rng)
        if not self.last:
            return y
        found = [self._loss_of(y, labels, self._drawn(self.loss, "", rng, train=False))]
        for name, metric in self.metrics.items():
            key = self._drawn(metric, name, rng, train=False, of_metric=True)
            found.append(_summed(metric, f"metrics: '{name}'", y, labels, self.loss_dtype, key))
        return found

    def predict(self, params: Tree, state: Tree, x: Tree, labels: None, rng: tuple[Any, Any]) -> Tree:
        """The stage output in evaluation mode, of the last stage too; it takes what `evaluate` takes, without labels."""
        microbatch, key = rng
        y, _ = self.stack.apply(self.stage.layers, self._whole(params), state, x, key=key, microbatch=microbatch, train=False)
        return y

    def init_optimizer(self, params: Tree) -> Tree:
        """Optimizer state of new parameters, whole ones, keyed by layer id."""
        return {layer_id: self.optimizer.init(layer_id, p) for layer_id, p in self.trained.part(params).items()}

    def average_params(self, optimizer_state: Tree, newest: Tree, like: Tree) -> Tree:
        """The moving average of the parameters, by layer id, in the dtypes of `like`; needs `optimizer.ema_decay`.

        That of a frozen parameter is the parameter itself, in the newest version.
        """
        average = self.trained.joined({i: self.optimizer.average(optimizer_state[i]) for i in self.specs.params}, newest)
        return jax.tree.map(lambda mean, leaf: mean.astype(leaf.dtype), average, like)

    def master_params(self, optimizer_state: Tree, newest: Tree) -> Tree:
        """The masters in an optimizer state, by layer id. A frozen parameter has none: it is that of the newest version, as precise."""
        frozen = masters_of(self.trained.others(newest))
        return self.trained.joined({entry: held.masters for entry, held in optimizer_state.items()}, frozen)

    def zero_accumulators(self, params: Tree) -> Tree:
        """The accumulators at the start of a batch."""
        numbers = ("loss", "weight") if self.last else ("weight",)
        gradients = jax.tree.map(lambda p: jnp.zeros(p.shape, self.precision.accumulator_dtype(p.dtype)), dict(self.trained.part(params)))
        return {"gradients": gradients} | {name: jnp.zeros((), self.loss_dtype) for name in numbers}

    def first_version(self, fresh: Tree) -> Tree:
        """The weight version of parameters as the layers make them; shares no array with them."""
        return jax.tree.map(lambda p, spec: p.astype(spec.dtype) if p.dtype != spec.dtype else jnp.copy(p), fresh, self.specs.params)

    def averaged_state(self, state: Tree) -> list[Any]:
        """What replicas average of the layer state (or its specs): the floating-point leaves that a microbatch changes."""
        return floats_of(self.changed.part(state))

    def with_averages(self, state: Tree, means: Iterable[Any]) -> Tree:
        """The layer state with these in the places of `averaged_state`."""
        return self.changed.joined(with_floats(self.changed.part(state), means), state)

    def mean_state(self, total: list[jax.Array]) -> list[jax.Array]:
        """The mean of each floating-point leaf of the layer state over the replicas, from their sum."""
        # XLA may replace a division by a constant by this product; written out, the bits do not depend on that.
        return [leaf * (1 / self.stage.replicas) for leaf in total]

    @cached_property
    def residuals(self) -> Residuals:
        """What the backward gets from the forward."""

        def message(error: BaseException) -> str:
            return (
                f"{self.words}: it cannot be recomputed: {cause(error)}; set recompute to 'none' for the stage, or leave out what is named"
            )

        with callers_code(message) if self.stage.recompute != "none" else nullcontext():
            return find_residuals(self._linearize, self.specs.params, self.specs.arguments, self.specs.rng)

    @property
    def repeated_effects(self) -> str:
        """Where in the stage the backward repeats side effects of the forward, for messages; empty if it does not."""
        return self.words if self.stage.recompute != "none" and self.residuals.has_effects else ""

    @property
    def words(self) -> str:
        """The layers with side effects, for messages; or else the stage."""
        layers = with_effects(self.stack, self.stack.specs(self.specs.x, self.stage.layers))
        names = ", ".join(f"'{layer_id}'" for layer_id in layers)
        return f"layer {names}" if layers else f"the stage of layer '{self.stage.layers[0]}'"

    @property
    def trained(self) -> Subset:
        """The parameters that updates change, by entry."""
        return self.optimizer.trained

    @cached_property
    def trained_in_layers(self) -> Subset:
        """The parameters that updates change, by layer id."""
        return self.stack.ties.in_layers(self.trained, self.specs.params, self.stage.layers)

    @cached_property
    def changed(self) -> Subset:
        """The layer state that a microbatch changes: all but the arrays that the layers hand back as they got them."""
        if not jax.tree.leaves(self.specs.state):
            return EVERYTHING

        def new_state(state: Tree, params: Tree, x: Tree, microbatch: Any, key: Any) -> Tree:
            return self.stack.apply(self.stage.layers, self._whole(params), state, x, key=key, microbatch=microbatch, train=True)[1]

        traced = jax.make_jaxpr(new_state)(self.specs.state, self.specs.params, self.specs.x, *self.specs.rng)
        flags = [source != i for i, source in enumerate(passed_on(traced.jaxpr))]
        by_layer = jax.tree.unflatten(jax.tree.structure(self.specs.state), flags)
        return Subset({layer_id: tuple(leaves) for layer_id, tree in by_layer.items() if not all(leaves := jax.tree.leaves(tree))})

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

    @property
    def global_norm(self) -> bool:
        """Whether updates use the norm of the gradients of all stages."""
        return self.clip_global_norm is not None or self.skip_nonfinite

    def take_shared(self, accumulators: Tree) -> dict[str, jax.Array]:
        """The gradients of the shared parameters that other stages hold, too; in memory of their own."""
        return {name: jnp.copy(gradient) for name, gradient in self.take_shared_spec(accumulators).items()}

    def take_shared_spec(self, accumulators: Tree) -> dict[str, Any]:
        """Specs of `take_shared` of these accumulators."""
        return {name: accumulators["gradients"][name] for names in self.sharing.groups_of(self.number).values() for name in names}

    def shared_with(self, other: int, taken: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `take_shared` (or their specs) that another stage holds."""
        return {name: taken[name] for name in self.sharing.between(self.number, other)}

    def add_shared(self, group: int, accumulators: Tree, received: Mapping[int, Mapping[str, jax.Array]]) -> Tree:
        """The accumulators with the gradients of a group summed over its stages, in their order; `received` are those of the others."""
        stages, names = self.sharing.groups[group]
        gradients = dict(accumulators["gradients"])
        for name in names:
            first, *rest = (gradients[name] if s == self.number else received[s][name] for s in stages)
            gradients[name] = sum(rest, first)
        return {**accumulators, "gradients": gradients}

    @property
    def counted(self) -> tuple[str, ...]:
        """The entries that this stage counts in the global norm."""
        return self.sharing.counted[self.number] if self.sharing.counted else self.stage.layers

    @property
    def norm_spec(self) -> GlobalNorm:
        """Shapes and dtypes of the norm."""
        number = jax.ShapeDtypeStruct((), self.loss_dtype)
        return GlobalNorm(number, number)

    def squares_spec(self, counts: Sequence[int]) -> tuple[GlobalNorm, ...]:
        """Shapes and dtypes of the sums of squares of stages that count so many entries."""
        numbers = (jax.ShapeDtypeStruct((count,), self.loss_dtype) for count in counts)
        return tuple(GlobalNorm(number, number) for number in numbers)

    @property
    def averages_when_read(self) -> bool:
        """Whether there is layer state that replicas average when it is read from the run."""
        return self.average_state == "read" and self.stage.replicas > 1 and bool(self.averaged_state(self.specs.state))

    @property
    def loss_dtype(self) -> Any:
        """Losses and weights are summed in float32, or in float64 where JAX has it enabled."""
        return jax.dtypes.canonicalize_dtype(jnp.float64)

    # Inside ------------------------------------------------------------------------------------------------------------

    def _linearize(self, params: Tree, arguments: tuple[Tree, Tree, Tree], rng: tuple[Any, Any]) -> tuple[tuple[Tree, Tree], Any]:
        """((y, new state), the VJP of y's floating-point leaves with respect to the trained parameters of whole layers and x's).

        A parameter that two layers share is in both: its gradients in the two places are summed in the accumulators, and not before, in
        the dtype of the parameter. Where no gradient is computed, there is None in place of a VJP.
        """
        state, x, labels = arguments
        microbatch, key = rng
        leaves, treedef = jax.tree.flatten(x)
        moving = [i for i, leaf in enumerate(leaves) if _is_float(leaf)] if self.input_gradient else []
        whole = self._whole(params)

        def stage(trained: Tree, floats: list[jax.Array]) -> tuple[Any, Any]:
            params = self.trained_in_layers.joined(trained, whole)
            filled = list(leaves)
            for i, leaf in zip(moving, floats, strict=True):
                filled[i] = leaf
            x = jax.tree.unflatten(treedef, filled)
            y, new_state = self.stack.apply(self.stage.layers, params, state, x, key=key, microbatch=microbatch, train=True)
            if self.last:
                total, weight = self._loss_of(y, labels, self._drawn(self.loss, "", rng, train=True))
                return [total], ((total, weight), new_state)
            return floats_of(y), (y, new_state)

        trained, floats = self.trained_in_layers.part(whole), [leaves[i] for i in moving]
        if not self.output_gradient:
            return stage(trained, floats)[1], None
        if self.stage.recompute == "full":
            stage = jax.checkpoint(stage)
        elif self.stage.recompute != "none":
            stage = jax.checkpoint(stage, policy=getattr(jax.checkpoint_policies, self.stage.recompute))
        _, vjp, outputs = jax.vjp(stage, trained, floats, has_aux=True)
        return outputs, vjp

    def _whole(self, params: Tree) -> Tree:
        """The parameters of whole layers, by layer id, as they are used."""
        params = self.partition.gather(params)
        return {layer_id: self.stack.ties.whole(layer_id, params) for layer_id in self.stage.layers}

    def _pull_back(self, vjp: Any, message: Tree, accumulators: Tree, scale: Any) -> tuple[Tree, Tree]:
        """Apply the VJP to a gradient message: (gradient message for the stage before, new accumulators)."""
        gradients, x_gradient = self._cotangents(vjp, message, scale)
        added = self._accumulated(gradients, tuple(message) if self.last else (message[1],), accumulators, scale)
        return (x_gradient, message[1]), added

    def _cotangents(self, vjp: Any, message: Tree, scale: Any) -> tuple[Tree, list[jax.Array]]:
        """(gradients of the trained parameters, gradients of the floating-point leaves of x), times the loss scale."""
        if not self.output_gradient:
            return self._gradients_spec, []  # without leaves
        gradient, _ = message
        scale = self._scale(scale)
        found = vjp([jnp.full_like(gradient, 1.0 if scale is None else scale)] if self.last else gradient)
        return found[0], found[1]

    def _accumulated(self, gradients: Tree, numbers: tuple[Any, ...], accumulators: Tree, scale: Any) -> Tree:
        """The accumulators with the gradients of one microbatch and the numbers of its message, (loss at the last stage, weight), added."""
        sums, scale = dict(accumulators["gradients"]), self._scale(scale)
        for entry, part in self.stack.ties.by_place(gradients):
            sums[entry] = jax.tree.map(lambda total, g: total + _unscaled(g, total.dtype, scale), sums[entry], part)
        *loss, weight = numbers
        added = {"gradients": sums, "weight": accumulators["weight"] + weight}
        if self.last:
            added["loss"] = accumulators["loss"] + loss[0]
        return added

    def _scale(self, scale: Any) -> Any:
        """The loss scale of a microbatch, the same in all stages; None if there is none."""
        return self.precision.fixed_scale if scale is None else scale

    @cached_property
    def outputs_spec(self) -> Tree:
        """Shapes and dtypes of y."""
        return self._forward_spec[0]

    @cached_property
    def _forward_spec(self) -> Any:
        """Shapes and dtypes of (y, what changes of the state, saved arrays)."""
        return jax.eval_shape(self.forward, self.specs.params, *self.specs.arguments, self.specs.rng)

    @cached_property
    def between_specs(self) -> tuple[Any, Any, Any]:
        """Shapes and dtypes of what a backward gets from the forward, and of its gradient message: (kept, saved, message)."""
        y, changed, saved = self._forward_spec
        kept = self.residuals.keep(self.specs.arguments, (y, self.changed.joined(changed, self.specs.state)))
        if self.last:
            return kept, saved, y
        return kept, saved, (floats_of(y) if self.output_gradient else [], jax.ShapeDtypeStruct((), self.loss_dtype))

    @cached_property
    def _halves(self) -> Halves:
        """The backward cut in two."""
        scale = None if self.scale_spec is None else self.scale_spec.value
        arguments = self.specs.params, *self.between_specs, self.specs.rng, scale
        specs, treedef = jax.tree.flatten(arguments)

        def backward(*leaves: Any) -> list[Any]:
            params, kept, saved, message, rng, scale = jax.tree.unflatten(treedef, leaves)
            gradients, x_gradient = self._cotangents(self._restored_vjp(params, kept, saved, rng), message, scale)
            return [*x_gradient, *jax.tree.leaves(gradients)]

        inputs = len(floats_of(self.specs.x)) if self.input_gradient else 0
        outputs = inputs + len(jax.tree.leaves(self._gradients_spec))
        counts = [len(jax.tree.leaves(part)) for part in (self.specs.params, self.between_specs, (self.specs.rng, scale))]
        free = [True] * counts[0] + [False] * counts[1] + [True] * counts[2]
        in_first = [i < inputs for i in range(outputs)]
        try:
            return split(backward, specs, in_first, free)
        except NotSplittable as error:
            warnings.warn(
                f"{self.words}: its backward cannot be split: {error}; the whole backward runs in place of the backward for inputs",
                stacklevel=2,
            )
            return undivided(backward, specs, in_first)

    @cached_property
    def _gradients_spec(self) -> Tree:
        """Shapes and dtypes of the gradients of the trained parameters of whole layers, before they are accumulated."""
        return self.trained_in_layers.part(jax.eval_shape(self._whole, self.specs.params))

    @cached_property
    def _rest_positions(self) -> tuple[int, ...]:
        """What the second half of a backward reads of kept, saved and message, as positions in (params, kept, saved, message)."""
        params, between = len(jax.tree.leaves(self.specs.params)), len(jax.tree.leaves(self.between_specs))
        return tuple(i for i in self._halves.arguments if params <= i < params + between)

    @cached_property
    def rest_of_saved(self) -> tuple[int, ...]:
        """Which of the saved arrays of a forward the second half of a backward reads."""
        kept, saved, _ = self.between_specs
        begin = len(jax.tree.leaves((self.specs.params, kept)))
        return tuple(i - begin for i in self._rest_positions if begin <= i < begin + len(saved))

    def reads_argument_late(self, position: int) -> bool:
        """Whether the second half of a backward reads this residual, an argument by its position among (state, x, labels)."""
        place = self.residuals.arguments.index(position)
        return len(jax.tree.leaves(self.specs.params)) + place in self._rest_positions

    def reads_output_late(self, position: int) -> bool:
        """Likewise an output, by its position among (y, new state)."""
        place = len(self.residuals.arguments) + self.residuals.outputs.index(position)
        return len(jax.tree.leaves(self.specs.params)) + place in self._rest_positions

    @property
    def stash_spec(self) -> tuple[Any, Any]:
        """Shapes and dtypes of (rest, stash), which stay from the first half of a backward to the second."""
        return self.rest(*self.between_specs), list(self._halves.stash)

    def _loss_of(self, outputs: Tree, labels: Tree, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        total, weight = _summed(self.loss, "loss", outputs, labels, self.loss_dtype, key)
        return total, jax.lax.stop_gradient(weight)

    def _drawn(self, function: Loss, name: str, rng: tuple[Any, Any], *, train: bool, of_metric: bool = False) -> jax.Array | None:
        """The key of the loss or a metric for a microbatch, if it asks for one."""
        microbatch, key = rng
        return self.stack.draw_key(key, name, microbatch, train, of_metric=of_metric) if asked_for(function) else None

    @cached_property
    def evaluation_rng(self) -> tuple[Any, Any]:
        """Specs of (microbatch, key) of an evaluation, or Nones if it draws no random numbers."""
        asks = self.last and any(map(asked_for, (self.loss, *self.metrics.values())))
        return rng_spec() if asks or self.stack.is_stochastic(self.stage.layers, train=False) else (None, None)


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
    """The functions of one stage of a model; `options` are the other fields of `StageFunctions`.

    Raises:
        InputError: a loss that does not fit.
    """
    first, last = stage.layers[0] == stack.ids[0], stage.layers[-1] == stack.ids[-1]
    rng = rng_spec() if stack.is_stochastic(stage.layers) or (last and asked_for(loss)) else (None, None)
    fresh = stack.ties.split({layer_id: spec.params for layer_id, spec in layers.items()}, stage.layers)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, precision.version_dtype(p.dtype)), fresh)
    state = {layer_id: layers[layer_id].state for layer_id in stage.layers}
    specs = Specs(params, state, layers[stage.layers[0]].x, labels if last else None, rng, fresh)
    options = {"input_gradient": not first, **options}
    functions = StageFunctions(stack, stage, first, last, loss, optimizer, specs, precision=precision, **options)
    if last:
        check_summed(loss, "loss", functions, layers[stage.layers[-1]].output)
    return functions


def check_metrics(last: StageFunctions, metrics: Mapping[str, Loss]) -> None:
    """Refuse metrics that do not fit the outputs and labels of the last stage.

    Raises:
        InputError: names the metric.
    """
    if metrics:
        outputs = last.stack.specs(last.specs.x, last.stage.layers)[last.stage.layers[-1]].output
        for name, metric in metrics.items():
            check_summed(metric, f"metrics: '{name}'", last, outputs)


def check_summed(function: Loss, where: str, last: StageFunctions, outputs: Tree) -> None:
    """Refuse a loss or a metric that does not take the outputs and labels of the last stage.

    Raises:
        InputError: it fails on them, or does not return two scalars; the message begins with `where`.
    """
    labels = last.specs.labels

    def message(error: BaseException) -> str:
        return (
            f"{where}: it does not take outputs {describe(outputs)} of layer '{last.stage.layers[-1]}' and labels {describe(labels)}; "
            f"it says: {cause(error)}; fix the function"
        )

    with callers_code(message):
        jax.eval_shape(lambda y, labels, key: _summed(function, where, y, labels, last.loss_dtype, key), outputs, labels, key_spec())


def rng_spec() -> tuple[Any, Any]:
    """Specs of (microbatch, key)."""
    return jax.ShapeDtypeStruct((), np.uint32), key_spec()


def _summed(function: Loss, where: str, outputs: Tree, labels: Tree, dtype: Any, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    result = called(function, outputs, labels, key)
    of = "sum of the losses" if where == "loss" else "sum"
    if not (isinstance(result, tuple) and len(result) == 2 and all(_is_scalar(part) for part in result)):
        values = "losses" if where == "loss" else "values"
        raise InputError(f"{where}: expected ({of}, weight), two scalars, found {describe(result)}; return {values}.sum(), count")
    total, weight = result
    kind = jnp.floating if where == "loss" else jnp.number
    if not jnp.issubdtype(jnp.result_type(total), kind) or jnp.iscomplexobj(total):
        expected = "a real floating-point number, which has a gradient" if where == "loss" else "a real number"
        raise InputError(f"{where}: expected the {of} to be {expected}, found {jnp.result_type(total)}; convert it to float32")
    if jnp.iscomplexobj(weight):
        raise InputError(f"{where}: expected the weight to be a real number, found {jnp.result_type(weight)}; return a count")
    return jnp.asarray(total, dtype), jnp.asarray(weight, dtype)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, complex)) or (hasattr(value, "dtype") and jnp.shape(value) == ())


def norm_of(squares: tuple[GlobalNorm, ...]) -> GlobalNorm:
    """The norm from `sum_squares` of each stage; added layer by layer, so that it does not depend on the cut."""
    total = jnp.zeros((), squares[0].norm.dtype)
    for layer in jnp.concatenate([stage.norm for stage in squares]):
        total += layer
    return GlobalNorm(jnp.sqrt(total), jnp.concatenate([stage.nonfinite for stage in squares]).sum())


def with_effects(stack: LayerStack, layers: Mapping[str, LayerSpec]) -> list[str]:
    """The layers whose forward or backward has side effects."""

    def backward(layer_id: str, moves: bool, params: Tree, state: Tree, x: Tree, key: jax.Array) -> Any:
        def forward(params: Tree, floats: list[jax.Array]) -> list[jax.Array]:
            inputs = with_floats(x, floats) if moves else x
            return floats_of(stack.layers[layer_id].apply(params, state, inputs, key, True)[0])

        y, vjp = jax.vjp(forward, params, floats_of(x))
        return vjp(jax.tree.map(jnp.ones_like, y))

    def has_effects(layer_id: str, spec: LayerSpec) -> bool:
        arguments = spec.params, spec.state, spec.x, key_spec()
        try:
            return bool(jax.make_jaxpr(partial(backward, layer_id, True))(*arguments).effects)
        except Exception:  # a layer of the first stage need not have a gradient for its input
            return bool(jax.make_jaxpr(partial(backward, layer_id, False))(*arguments).effects)

    return [layer_id for layer_id, spec in layers.items() if has_effects(layer_id, spec)]


def _unchanged(params: Tree, optimizer_state: Tree, accumulators: Tree, norm: GlobalNorm) -> tuple[Tree, Tree]:
    return params, optimizer_state


def _unscaled(gradient: jax.Array, dtype: Any, scale: Any) -> jax.Array:
    """The gradient of one microbatch as it is accumulated: in the dtype of the sum, without the loss scale."""
    wide = widened(gradient, dtype)
    return wide if scale is None else wide / jnp.asarray(scale, dtype)


def _divisor(weight: jax.Array) -> jax.Array:
    return jnp.where(weight == 0, jnp.ones_like(weight), weight)


def _mean(gradient: Tree, divisor: jax.Array) -> Tree:
    """The gradient divided in the precision of the weight, which may be too large for the gradient's dtype."""
    return jax.tree.map(lambda g: (g.astype(divisor.dtype) / divisor).astype(g.dtype), gradient)


def _clip(gradient: jax.Array, norm: jax.Array, largest: float | None) -> jax.Array:
    """As `optax.clip_by_global_norm`; if the norm is NaN, all gradients become NaN."""
    assert largest is not None
    return jnp.where(norm < largest, gradient, gradient / norm.astype(gradient.dtype) * largest)


def floats_of(tree: Tree) -> list[Any]:
    """The floating-point leaves (or specs), in order."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def with_floats(tree: Tree, floats: Iterable[Any]) -> Tree:
    """The tree with other floating-point leaves, as `floats_of` gives them."""
    leaves, treedef, new = *jax.tree.flatten(tree), iter(floats)
    return jax.tree.unflatten(treedef, [next(new) if _is_float(leaf) else leaf for leaf in leaves])


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
