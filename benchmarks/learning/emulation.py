"""Training with delayed weights as one jitted program on one device: each stage reads the weights that its schedule would give it.

The letters in the shapes: d stages, m equal parts of a batch, each a microbatch or a part of one, v weight versions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from jpipe.optimizers import PredictDelayState, predict_delay
from jpipe.stages import find_residuals

Tree = Any
Schedule = Literal[
    "flush",
    "2BW",
    "PipeDream m = d",
    "PipeDream m = 2d",
    "PipeDream m = 1",
    "vertical sync m = d",
    "vertical sync m = 2d",
    "vertical sync m = 1",
]


def microbatches_of(schedule: Schedule, d: int) -> int:
    """Return the number of microbatches of a batch; d for schedules whose names have none."""
    return {"1": 1, "2d": 2 * d}.get(schedule.rpartition(" = ")[2], d)


def delays(schedule: Schedule, d: int, m: int) -> np.ndarray:
    """Return how many updates old the weights are that each part of a batch reads at each stage, int32 of shape (d, m).

    Args:
        schedule: of the pipeline.
        d: the number of stages.
        m: the number of equal parts of a batch, a multiple of the number of microbatches.
    """
    count = microbatches_of(schedule, d)
    stages, microbatches = np.broadcast_arrays(np.arange(d)[:, None], np.arange(m)[None] * count // m)
    ahead = (0 if schedule.startswith("vertical sync") else stages) + microbatches  # of the microbatches that may read old weights
    if schedule == "flush":
        table = 0 * stages
    elif schedule == "2BW":
        table = 1 + 0 * stages
    else:
        table = -((ahead - (d - 1)) // count)
    return np.maximum(table, 0).astype(np.int32)


def warm_up_and_cosine(updates: int, share: float = 0.05, end: float = 0.1) -> Callable[[Any], Any]:
    """Return the factor of the learning rate at each of `updates` updates: a warm-up in the first share, then a cosine to `end`."""
    warm = max(round(updates * share), 1)

    def factor(t: Any) -> Any:
        t = jnp.asarray(t, float)
        falling = end + (1 - end) / 2 * (1 + jnp.cos(jnp.pi * (t - warm) / max(updates - warm, 1)))
        return jnp.where(t < warm, (t + 1) / (warm + 1), falling)

    return factor


class Recipe(NamedTuple):
    """What may differ between the runs of one program, as arrays.

    Attributes:
        seed: of the initial weights and of the batches.
        rate: the largest learning rate.
        delays: see `delays`.
        prediction: λ, for each update of a stage's mean delay.
        constant_prediction: what is added to the λ of each stage, also to one without delay.
        compensation: τ of the spike compensation, for each update of a stage's mean delay.
        constant_compensation: what is added to the τ of each stage; 1 alone is Nesterov's momentum.
        slow: 1 if the learning rate of a stage is divided by its delay at first (PipeMare), otherwise 0.
        momentum: the decay of the first moment.
        stage_clip: the largest norm of the gradients of each stage, in units of `Emulation`'s `clip`; 0 to clip by the norm of all stages.
    """

    seed: Any
    rate: Any
    delays: Any
    prediction: Any
    constant_prediction: Any
    compensation: Any
    constant_compensation: Any
    slow: Any
    momentum: Any
    stage_clip: Any


class Rule(NamedTuple):
    """An optimizer whose numbers are arrays: `init(params)` and `update(gradients, state, params, rate=…, delay=…, momentum=…)`.

    It returns what is added to the parameters of one stage, and the new state. `delay` is that of the spike compensation.
    """

    init: Callable[..., Tree]
    update: Callable[..., tuple[Tree, Tree]]


class Trained(NamedTuple):
    """The results of one run.

    Attributes:
        losses: held-out loss at regular intervals, on the weights without prediction.
        params: the weights that the last update made, by layer id, the prediction included.
        ahead: the prediction in them, by layer id.
    """

    losses: Any
    params: Tree
    ahead: Tree


class Carry(NamedTuple):
    """The state of a pipeline between two updates.

    Attributes:
        versions: of the weights, by layer id, (v, …), the newest first; the prediction included.
        optimizer: the state of each stage.
        ahead: the prediction of each stage.
    """

    versions: Tree
    optimizer: tuple[Tree, ...]
    ahead: tuple[PredictDelayState, ...]


Backward = Literal["stashed", "newest", "recomputed"]
"""The weights that a backward reads: the weights of its forward; the newest; or the newest, with which it also repeats the forward."""

Send = Callable[[Tree, int, Any], Tree]
"""What becomes of the activations, and of their gradients, between two stages: `(activations, stage that receives, microbatch)`."""


class Emulation:
    """Trains a stack cut into stages, with every stage at its own delay.

    Args:
        stack: layers without state and without random numbers.
        stages: the layer ids of each stage.
        loss: `(outputs, labels) -> (sum, weight)`.
        rule: the optimizer.
        schedule: the factor of the learning rate at each update, counted from 0.
        slow_updates: the number of updates over which a learning rate divided by the delay rises to the whole one.
        versions: how many weight versions are kept, at least the largest delay and one.
        clip: the largest norm of a gradient, or None for no clipping.
        backward: the weights that backwards read.
    """

    def __init__(
        self,
        stack: jpipe.LayerStack,
        stages: Sequence[Sequence[str]],
        loss: Callable[[Any, Any], tuple[Any, Any]],
        rule: Rule,
        schedule: Callable[[jax.Array], Any],
        slow_updates: int,
        versions: int,
        clip: float | None = 1.0,
        backward: Backward = "stashed",
    ) -> None:
        self._stack, self._stages, self._loss, self._rule = stack, [tuple(stage) for stage in stages], loss, rule
        self._schedule, self._slow_updates, self._versions, self._clip = schedule, slow_updates, versions, clip
        self._backward = backward
        self._stage_of = {layer_id: s for s, stage in enumerate(self._stages) for layer_id in stage}

    def train(self, recipe: Recipe, params: Tree, data: Tree, held_out: Tree) -> Trained:
        """Train once.

        Args:
            recipe: of the run.
            params: the initial weights, by layer id.
            data: (inputs, labels) of all batches of the run, each of shape (evaluations, updates between them, rows, …).
            held_out: (inputs, labels) to be evaluated after each group of updates.
        """
        groups, each = jax.tree.leaves(data)[0].shape[:2]
        numbers = jnp.arange(groups * each).reshape(groups, each)

        def update(carry: Carry, inputs: Tree) -> tuple[Carry, None]:
            t, batch = inputs
            return self.apply(recipe, carry, t, self.gradients(recipe, carry, batch)), None

        def group(carry: Carry, inputs: Tree) -> tuple[Carry, jax.Array]:
            carry, _ = jax.lax.scan(update, carry, inputs)
            return carry, self.mean_loss(self.without_prediction(carry), held_out)

        carry, losses = jax.lax.scan(group, self.start(params), (numbers, data))
        return Trained(losses, jax.tree.map(lambda p: p[0], carry.versions), self.merged([state.ahead for state in carry.ahead]))

    def start(self, params: Tree) -> Carry:
        """Return the state before the first update, from the initial weights by layer id."""
        split = self.split(params)
        return Carry(
            jax.tree.map(lambda p: jnp.broadcast_to(p, (self._versions, *p.shape)), params),
            tuple(map(self._rule.init, split)),
            tuple(map(predict_delay().init, split)),
        )

    def gradients(self, recipe: Recipe, carry: Carry, batch: Tree, send: Send | None = None) -> Tree:
        """Return the mean gradient of a batch by layer id, not clipped, at the weights that the schedule reads.

        Args:
            recipe: of the run.
            carry: the state.
            batch: (inputs, labels).
            send: between two stages; None: the next stage gets what the stage makes.
        """
        m = recipe.delays.shape[1]
        microbatches = jax.tree.map(lambda a: a.reshape(m, -1, *a.shape[1:]), batch)
        read = {i: jax.tree.map(lambda p, s=s: p[recipe.delays[s]], carry.versions[i]) for i, s in self._stage_of.items()}

        newest = None if self._backward == "stashed" else jax.tree.map(lambda p: p[0], carry.versions)

        def mean_gradient(params: Tree, microbatch: Tree, number: Any) -> Tree:  # the gradients that stages send are those of the sum
            gradients, weight = jax.grad(self._total, has_aux=True)(params, microbatch, number, send, newest)
            return jax.tree.map(lambda g: g / weight, gradients)

        return jax.tree.map(lambda g: g.mean(0), jax.vmap(mean_gradient)(read, microbatches, jnp.arange(m)))

    def apply(self, recipe: Recipe, carry: Carry, t: Any, gradients: Tree) -> Carry:
        """Return the state after update t, counted from 0.

        Args:
            recipe: of the run.
            carry: the state.
            t: the number of the update.
            gradients: by layer id, not clipped.
        """
        clipped = self._clipped(self.split(gradients), recipe.stage_clip)
        newest, rate = self.split(jax.tree.map(lambda p: p[0], carry.versions)), recipe.rate * self._schedule(t)
        ages = jnp.minimum(recipe.delays, t)  # the first updates read the initial weights
        changed, optimizer, ahead = [], [], []
        for s, (params, gradient) in enumerate(zip(newest, clipped, strict=True)):
            delay = ages[s].astype(rate.dtype).mean()
            slower = rate * jnp.maximum(delay, 1) ** (recipe.slow * (jnp.minimum(t / self._slow_updates, 1) - 1))
            compensation = recipe.compensation * delay + recipe.constant_compensation
            options = {"rate": slower, "delay": compensation, "momentum": recipe.momentum}
            updates, state = self._rule.update(gradient, carry.optimizer[s], params, **options)
            factor = recipe.prediction * delay + recipe.constant_prediction
            updates, prediction = predict_delay().update(updates, carry.ahead[s], delay=factor)
            changed.append(optax.apply_updates(params, updates))
            optimizer.append(state)
            ahead.append(prediction)
        new = self.merged(changed)
        versions = jax.tree.map(lambda old, p: jnp.concatenate([p[None], old[:-1]]), carry.versions, new)
        return Carry(versions, tuple(optimizer), tuple(ahead))

    def mean_loss(self, params: Tree, batch: Tree, microbatch: Any = 0, send: Send | None = None) -> jax.Array:
        """Return the mean loss of a batch.

        Args:
            params: by layer id.
            batch: (inputs, labels).
            microbatch: its number, for `send`.
            send: between two stages; None: the next stage gets what the stage makes.
        """
        total, weight = self._total(params, batch, microbatch, send)
        return total / weight

    def without_prediction(self, carry: Carry) -> Tree:
        """Return the newest weights by layer id, without the prediction in them."""
        ahead = self.merged([state.ahead for state in carry.ahead])
        return jax.tree.map(lambda p, a: p[0] - a, carry.versions, ahead)

    def split(self, tree: Tree) -> list[Tree]:
        """Return the part of each stage of a tree by layer id."""
        return [{layer_id: tree[layer_id] for layer_id in stage} for stage in self._stages]

    def merged(self, stages: Sequence[Tree]) -> Tree:
        """Return a tree by layer id from the parts of the stages."""
        return {layer_id: tree for stage in stages for layer_id, tree in stage.items()}

    def _total(self, params: Tree, batch: Tree, microbatch: Any, send: Send | None, newest: Tree = None) -> tuple[jax.Array, Any]:
        x, labels = batch
        for s, stage in enumerate(self._stages):
            x = send(x, s, microbatch) if s and send is not None else x
            own = [{layer_id: tree[layer_id] for layer_id in stage} for tree in (params, newest or params)]
            x = self._applied(stage, own[0], x) if newest is None else self._without_stash(stage, *own, x)
        return self._loss(x, labels)

    def _applied(self, stage: Sequence[str], params: Tree, x: Tree) -> Tree:
        return self._stack.apply(stage, params, {layer_id: {} for layer_id in self._stack.ids}, x, key=None, microbatch=0, train=True)[0]

    def _without_stash(self, stage: Sequence[str], params: Tree, newest: Tree, x: Tree) -> Tree:
        """Apply a stage with `params`; its backward reads `newest`, and the activations of the forward unless it repeats the forward."""

        def forward(params: Tree, arguments: Tree, rng: Tree) -> tuple[Tree, Any]:
            y, vjp = jax.vjp(partial(self._applied, stage), params, arguments[0])
            return (y, {}), vjp

        residuals = find_residuals(forward, params, (x,), ())

        def begin(params: Tree, newest: Tree, x: Tree) -> tuple[Tree, Tree]:
            outputs, saved = residuals.run(params, (x,), ())
            return outputs[0], (newest, x, (residuals.keep((x,), outputs), saved))

        def end(kept: Tree, gradient: Tree) -> tuple[Tree, None, Tree]:
            newest, x, (arrays, saved) = kept
            vjp = residuals.vjp(newest, (), arrays, saved) if self._backward == "newest" else forward(newest, (x,), ())[1]
            of_params, of_x = vjp(gradient)
            return of_params, None, of_x

        applied = jax.custom_vjp(lambda params, newest, x: self._applied(stage, params, x))
        applied.defvjp(begin, end)
        return applied(params, newest, x)

    def _clipped(self, gradients: list[Tree], stage_clip: jax.Array) -> list[Tree]:
        if self._clip is None:
            return gradients
        norms = [optax.tree.norm(gradient) for gradient in gradients]
        whole = jnp.sqrt(sum(norm**2 for norm in norms))
        largest = [self._clip * jnp.where(stage_clip > 0, stage_clip / norm, 1 / whole) for norm in norms]
        factors = [jnp.minimum(1, factor) for factor in largest]
        return [jax.tree.map(lambda g, f=f: g * f, gradient) for gradient, f in zip(gradients, factors, strict=True)]
