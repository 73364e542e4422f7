"""Parallel pipelines on one device as one jitted program: they sum gradients or agree rarely, and what they send has few bits.

Around `Emulation`, which is one pipeline. The rules are those of `jpipe.plan.Agreement` and `jpipe.plan.Links`; sums have error feedback.
What runs differ in is arrays, so that all of them are one program. The letters in the shapes: w pipelines, d stages.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.learning.emulation import Carry, Emulation, Recipe
from jpipe.capabilities.agreement.few_bits import pack, unpack
from jpipe.plan import BLOCK

Tree = Any


class Format(NamedTuple):
    """Floating-point numbers of few bits, as arrays.

    Attributes:
        largest: the magnitude that the largest one of each block gets by its scale; 0: without scales.
        bits: of the mantissa; 0: nothing is rounded.
        least: the exponent below which the distance of two neighbouring numbers gets no smaller.
        stochastic: 1 to round up or down at random, 0 to round to nearest.
    """

    largest: Any
    bits: Any
    least: Any
    stochastic: Any


KINDS: dict[str | None, tuple[float, int, int]] = {  # int8 has a distance of 1 up to 127
    None: (0.0, 0, 0),
    "bfloat16": (0.0, 7, -119),
    "int8": (127.0, 6, 6),
    "fp8": (448.0, 3, -6),
}


def format_of(kind: str | None, stochastic: bool = False) -> Format:
    """Return the format of a kind of `jpipe.plan.Links`; None: nothing is rounded."""
    largest, bits, least = KINDS[kind]
    return Format(np.float32(largest), np.int32(bits), np.int32(least), np.int32(stochastic))


class Exchange(NamedTuple):
    """What pipelines exchange and how it is rounded, as arrays.

    Attributes:
        every: updates of a stage from one agreement to the next, H; 0: gradients are summed for each update instead.
        offsets: of the agreements of each stage, o_s, of shape (d,).
        rate: the learning rate of the outer optimizer.
        momentum: of the outer optimizer.
        delay: updates from the one after which an agreement begins to the one after which it is applied, τ, below H.
        mixing: the weight of the pipeline's own weights when an agreement is applied, α; 0: the pipeline goes on from the agreed weights.
        activations: how messages to the next stage are rounded.
        gradients: how messages to the stage before are rounded.
        sums: how the gradient of each pipeline is rounded before they are summed.
        feedback: 1 to add what rounding has lost to the pipeline's next gradient, 0 to forget it.
    """

    every: Any
    offsets: Any
    rate: Any
    momentum: Any
    delay: Any
    mixing: Any
    activations: Format
    gradients: Format
    sums: Format
    feedback: Any


class _State(NamedTuple):
    pipelines: Carry  # with (w, …) of everything
    errors: Tree  # (w, …): of the rounded gradients
    agreed: Tree
    momentum: Tree


def rounded(x: jax.Array, to: Format, key: jax.Array | None = None) -> jax.Array:
    """Return an array with its numbers rounded, in blocks of neighbouring values of one row.

    Args:
        x: the array; its first dim counts rows, unless it is the only one.
        to: the format.
        key: for stochastic rounding; None: round to nearest.
    """
    return _joined(_rounded_blocks(_blocks(x), to, key), x)


def _blocks(x: jax.Array) -> jax.Array:
    """Return the blocks of an array, the last one of each row filled with zeros."""
    rows = x.reshape(x.shape[0] if x.ndim > 1 else 1, -1)
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % BLOCK))).reshape(-1, BLOCK)


def _joined(blocks: jax.Array, like: jax.Array) -> jax.Array:
    rows = like.shape[0] if like.ndim > 1 else 1
    return blocks.reshape(rows, -1)[:, : like.size // rows].reshape(like.shape)


def _rounded_blocks(values: jax.Array, to: Format, key: jax.Array | None) -> jax.Array:
    largest, limit = to.largest.astype(values.dtype), jnp.where(to.largest > 0, to.largest, jnp.inf).astype(values.dtype)
    scales = (jnp.abs(values).max(axis=1, keepdims=True) * (1 / limit)).astype(jnp.float32).astype(values.dtype)
    scales = jnp.where((largest > 0) & (scales > 0), scales, 1)
    scaled = jnp.clip(values / scales, -limit, limit)
    _, exponents = jnp.frexp(scaled)  # of magnitudes from 0.5 up to 1
    distance = jnp.ldexp(jnp.ones_like(scaled), jnp.maximum(exponents - 1, to.least) - to.bits)
    steps = scaled / distance
    whole = jnp.round(steps)
    if key is not None:
        whole = jnp.where(to.stochastic == 1, jnp.floor(steps + jax.random.uniform(key, steps.shape, steps.dtype)), whole)
    result = jnp.clip(whole * distance, -limit, limit) * scales
    return jnp.where(to.bits > 0, result, values)


@jax.custom_vjp
def sent(x: jax.Array, activations: Format, gradients: Format, key: jax.Array | None) -> jax.Array:
    """Return activations as the next stage gets them; the stage that sends gets their rounded gradient, as if they had not been rounded."""
    return rounded(x, activations, key)


def _sent_forward(x: jax.Array, activations: Format, gradients: Format, key: jax.Array | None) -> tuple[jax.Array, Tree]:
    return rounded(x, activations, key), (gradients, None if key is None else jax.random.fold_in(key, 1))


def _sent_backward(saved: Tree, gradient: jax.Array) -> tuple[Any, ...]:
    return rounded(gradient, *saved), None, None, None


sent.defvjp(_sent_forward, _sent_backward)


class Pipelines:
    """Parallel pipelines, each with an equal share of every batch.

    Args:
        emulation: of one of them.
        count: w.
        rounds: whether anything is rounded. A program without it compiles and runs in less time.
        draws: whether anything is rounded at random; likewise.
        bits: see `jpipe.plan.Agreement`.
    """

    def __init__(
        self, emulation: Emulation, count: int, rounds: bool = True, draws: bool = True, bits: Literal[4, 2] | None = None
    ) -> None:
        self._emulation, self._count, self._rounds, self._draws, self._bits = emulation, count, rounds, draws, bits

    def train(self, recipe: Recipe, exchange: Exchange, params: Tree, data: Tree, held_out: Tree) -> tuple[jax.Array, Tree]:
        """Train once.

        Args:
            recipe: of each pipeline.
            exchange: what they exchange.
            params: the initial weights, by layer id.
            data: (inputs, labels) of all batches of the run, each of shape (evaluations, updates between them, rows, …).
            held_out: (inputs, labels) to be evaluated after each group of updates.

        Returns:
            The held-out losses at regular intervals, and the last weights: those agreed on, or those of all pipelines.
        """
        emulation = self._emulation
        groups, each = jax.tree.leaves(data)[0].shape[:2]
        zeros = jax.tree.map(jnp.zeros_like, params)
        start = _State(self._copies(emulation.start(params)), self._copies(zeros), params, zeros)

        def receive(x: Tree, stage: int, microbatch: Any) -> Tree:
            return jax.tree.map(lambda leaf: rounded(leaf, exchange.activations), x)

        def update(state: _State, inputs: Tree) -> tuple[_State, None]:
            return self._update(recipe, exchange, state, *inputs), None

        def group(state: _State, inputs: Tree) -> tuple[_State, jax.Array]:
            state, _ = jax.lax.scan(update, state, inputs)
            return state, emulation.mean_loss(self._weights(exchange, state), held_out, send=receive if self._rounds else None)

        state, losses = jax.lax.scan(group, start, (jnp.arange(groups * each).reshape(groups, each), data))
        return losses, self._weights(exchange, state)

    def _update(self, recipe: Recipe, exchange: Exchange, state: _State, t: jax.Array, batch: Tree) -> _State:
        key = jax.random.fold_in(jax.random.key(recipe.seed), t)
        keys = jax.random.split(key, (2, self._count)) if self._draws else (None, None)

        def gradients(pipeline: Carry, batch: Tree, key: jax.Array | None) -> Tree:
            def send(x: Tree, stage: int, microbatch: Any) -> Tree:
                of_message = None if key is None else jax.random.fold_in(jax.random.fold_in(key, stage), microbatch)
                return jax.tree.map(lambda leaf: sent(leaf, exchange.activations, exchange.gradients, of_message), x)

            return self._emulation.gradients(recipe, pipeline, batch, send if self._rounds else None)

        m = recipe.delays.shape[1]
        own = jax.vmap(gradients)(state.pipelines, jax.tree.map(partial(self._shares, m), batch), keys[0])
        used, errors = sums(exchange, own, state.errors, keys[1]) if self._rounds else (_used(exchange, own, own), state.errors)
        pipelines = jax.vmap(partial(self._emulation.apply, recipe), in_axes=(0, None, 0))(state.pipelines, t, used)
        return self._agree(exchange, state._replace(pipelines=pipelines, errors=errors), t)

    def _agree(self, exchange: Exchange, state: _State, t: jax.Array) -> _State:
        """Move the agreed weights of the stages that begin to agree, and mix them into the pipelines of those that apply an agreement.

        Nothing reads the agreed weights in between, except an evaluation, which counts an agreement from its beginning.
        """
        newest = jax.tree.map(lambda p: p[:, 0], state.pipelines.versions)
        agreed, momentum, errors = [], [], []
        split = map(self._emulation.split, (state.agreed, state.momentum, newest, state.errors))
        for offset, before, velocity, own, lost in zip(exchange.offsets, *split, strict=True):
            begins = self._due(exchange, t + 1 - offset)
            applied = self._due(exchange, t + 1 - exchange.delay - offset) & (t + 1 > exchange.delay)
            if self._bits is None:
                change = jax.tree.map(lambda a, w: a - w.mean(0), before, own)
            else:
                wanted = jax.tree.map(lambda a, w, e: a[None] - w + e, before, own, lost)
                sent = jax.tree.map(jax.vmap(self._in_few_bits), wanted)
                change = jax.tree.map(lambda leaf: leaf.mean(0), sent)
                lost = jax.tree.map(partial(jnp.where, begins), jax.tree.map(jnp.subtract, wanted, sent), lost)
            errors.append(lost)
            moved = jax.tree.map(lambda d, v: d + exchange.momentum * v, change, velocity)
            after = jax.tree.map(lambda a, d, v: a - exchange.rate * (d + exchange.momentum * v), before, change, moved)
            agreed.append(jax.tree.map(partial(jnp.where, begins), after, before))
            momentum.append(jax.tree.map(partial(jnp.where, begins), moved, velocity))
            mixed = jax.tree.map(lambda w, a: exchange.mixing * w + (1 - exchange.mixing) * a, own, self._copies(agreed[-1]))
            newest = newest | jax.tree.map(partial(jnp.where, applied), mixed, own)
        versions = jax.tree.map(lambda old, new: jnp.concatenate([new[:, None], old[:, 1:]], 1), state.pipelines.versions, newest)
        pipelines, merged = state.pipelines._replace(versions=versions), self._emulation.merged
        return state._replace(pipelines=pipelines, agreed=merged(agreed), momentum=merged(momentum), errors=merged(errors))

    def _in_few_bits(self, leaf: jax.Array) -> jax.Array:
        return unpack(self._bits, pack(self._bits, leaf), leaf)

    def _due(self, exchange: Exchange, updates: jax.Array) -> jax.Array:
        """Return whether pipelines agree and a number of updates is a multiple of those from one agreement to the next."""
        return (exchange.every > 0) & (updates % jnp.maximum(exchange.every, 1) == 0)

    def _weights(self, exchange: Exchange, state: _State) -> Tree:
        of_first = self._emulation.without_prediction(jax.tree.map(lambda a: a[0], state.pipelines))
        return jax.tree.map(partial(jnp.where, exchange.every > 0), state.agreed, of_first)

    def _copies(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (self._count, *jnp.shape(a))), tree)

    def _shares(self, m: int, rows: jax.Array) -> jax.Array:
        """Return the rows of each pipeline: microbatches k, k + w, …, of m w microbatches."""
        return rows.reshape(m, self._count, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(self._count, -1, *rows.shape[1:])


def sums(exchange: Exchange, own: Tree, errors: Tree, keys: jax.Array | None) -> tuple[Tree, Tree]:
    """Return the gradients that each pipeline updates with, its own or the mean of the rounded ones, and what rounding has lost.

    Args:
        exchange: what pipelines exchange.
        own: the gradient of each pipeline, (w, …).
        errors: what rounding has lost before, (w, …).
        keys: of each pipeline; None: nothing is rounded at random.
    """
    wanted = jax.tree.map(lambda g, e: g + exchange.feedback * e, own, errors)
    passed = jax.vmap(partial(_rounded_tree, exchange.sums))(wanted, keys)
    return _used(exchange, own, passed), jax.tree.map(lambda w, p, e: jnp.where(exchange.every == 0, w - p, e), wanted, passed, errors)


def _used(exchange: Exchange, own: Tree, passed: Tree) -> Tree:
    return jax.tree.map(lambda g, p: jnp.where(exchange.every == 0, jnp.broadcast_to(p.mean(0), p.shape), g), own, passed)


def _rounded_tree(to: Format, tree: Tree, key: jax.Array | None) -> Tree:
    """Round all leaves as one array: it compiles much sooner."""
    leaves, structure = jax.tree.flatten(tree)
    blocks = [_blocks(leaf) for leaf in leaves]
    ends = np.cumsum([len(one) for one in blocks])[:-1]
    parts = jnp.split(_rounded_blocks(jnp.concatenate(blocks), to, key), ends)
    return jax.tree.unflatten(structure, [_joined(part, leaf) for part, leaf in zip(parts, leaves, strict=True)])
