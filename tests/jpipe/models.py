"""The small models, losses, optimizers, batches and plans that the tests of the library share."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe import InputError, Layer, LayerStack, Plan, Tie
from jpipe.schedules import SCHEDULES

WIDTH = 3
ROWS = 2  # of one microbatch


def dense(width: int = WIDTH, activation=jnp.tanh) -> Layer:
    """Build a layer that computes `activation(x @ w + b)`."""

    def init(key, x):
        return {"w": jax.random.normal(key, (x.shape[-1], width), x.dtype), "b": jnp.zeros((width,), x.dtype)}, {}

    def apply(params, state, x, key, train):
        return activation(x @ params["w"] + params["b"][None, :]), state

    return Layer(init, apply)


def noisy(rate: float = 0.5, width: int = WIDTH) -> Layer:
    """Build a dense layer with dropout."""
    inner = dense(width)

    def apply(params, state, x, key, train):
        y, state = inner.apply(params, state, x, None, train)
        if key is not None:
            y = jnp.where(jax.random.bernoulli(key, 1 - rate, y.shape), y / (1 - rate), 0)
        return y, state

    return Layer(inner.init, apply, stochastic=True)


def tracking(width: int = WIDTH) -> Layer:
    """Build a dense layer that subtracts the running mean of its inputs and counts its forwards: both are layer state."""
    inner = dense(width)

    def init(key, x):
        return inner.init(key, x)[0], {"mean": jnp.zeros(x.shape[-1:], x.dtype), "count": jnp.zeros((), jnp.int32)}

    def apply(params, state, x, key, train):
        y, _ = inner.apply(params, {}, x - state["mean"].astype(x.dtype)[None, :], None, train)
        if train:
            state = {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0).astype(state["mean"].dtype), "count": state["count"] + 1}
        return y, state

    return Layer(init, apply)


@functools.cache
def plain_stack(count: int = 4) -> LayerStack:
    """Build a stack of dense layers."""
    return LayerStack({f"layer{i}": dense() for i in range(count)})


@functools.cache
def rich_stack() -> LayerStack:
    """Build a stack of four layers, with layer state at both ends and dropout in the middle."""
    return LayerStack({"track": tracking(), "noise": noisy(), "mix": dense(), "out": tracking()})


@functools.cache
def tied_stack() -> LayerStack:
    """Build the rich stack with one matrix shared by two layers."""
    layers = {"track": tracking(), "noise": noisy(), "mix": dense(), "out": tracking()}
    return LayerStack(layers, ties=[Tie(("noise", "w"), ("out", "w"))])


@functools.cache
def wide_stack(tied: bool = False) -> LayerStack:
    """Build the rich stack four numbers wide, for meshes: its layers name the logical axes of their parameters."""
    over, back = {"w": ("embed", "mlp"), "b": ("mlp",)}, {"w": ("mlp", "embed")}
    layers = {"track": tracking(4), "noise": noisy(width=4), "mix": dense(4), "out": tracking(4)}
    named = {layer_id: replace(layer, axes=axes) for (layer_id, layer), axes in zip(layers.items(), (over, back, over, back), strict=True)}
    return LayerStack(named, ties=[Tie(("noise", "w"), ("out", "w"))] if tied else ())


def recurrent() -> Layer:
    """Build a small recurrent layer over the second dim, with dropout; its outputs are all its states."""

    def init(key, x):
        return {name: jax.random.normal(k, (WIDTH, WIDTH), x.dtype) for name, k in zip("wu", jax.random.split(key), strict=True)}, {}

    def apply(params, state, x, key, train):
        if key is not None:
            x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)

        def step(h, now):
            h = jnp.tanh(now @ params["w"] + h @ params["u"])
            return h, h

        _, states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
        return states.swapaxes(0, 1), state

    return Layer(init, apply, stochastic=True)


def mean_of_positions(x):
    """Return the mean over the second dim."""
    return x.mean(1)


@functools.cache
def sequence_stack() -> LayerStack:
    """Build two recurrent layers and two layers that read each sequence as a whole, for inputs of any length."""
    return LayerStack({"first": recurrent(), "second": recurrent(), "mean": mean_of_positions, "out": tracking()})


LENGTHS = (4, 2, 2, 5, 4, 5, 2, 4)
"""Of the sequences of batches that follow each other: neighbours alike and unlike, and some that come again only later."""


def sequences(count: int, microbatches: int, *, dtype=np.float32) -> list:
    """Return batches for `masked_squares` whose inputs have the lengths `LENGTHS`."""
    rng = np.random.default_rng(5)
    batches = masked_batches(count, microbatches, dtype=dtype)
    return [
        (rng.normal(size=(len(x), length, WIDTH)).astype(dtype), labels)
        for (x, labels), length in zip(batches, LENGTHS[:count], strict=True)
    ]


def masked_squares(y, labels):
    """Return the sum of squared errors times the mask, and the sum of the mask."""
    return (((y - labels["target"]) ** 2).sum(-1) * labels["mask"]).sum(), labels["mask"].sum()


def close(y, labels):
    """Return, as integers, how many elements are within 0.5 of the target, and their number."""
    return (jnp.abs(y - labels["target"]) < 0.5).sum(), y.size


def squares(y, labels):
    """Return the sum of squared errors and the number of elements."""
    return ((y - labels) ** 2).sum(), y.size


def masked_batches(count: int, microbatches: int, *, seed: int = 0, rows: int = ROWS, width: int = WIDTH, dtype=np.float32) -> list:
    """Return batches for `masked_squares` whose microbatches have different weights."""
    rng = np.random.default_rng(seed)
    size = microbatches * rows
    return [
        (
            rng.normal(size=(size, width)).astype(dtype),
            {"target": rng.normal(size=(size, width)).astype(dtype), "mask": rng.choice([0.0, 0.5, 1.0, 3.0], size).astype(dtype)},
        )
        for _ in range(count)
    ]


def batches_of(count: int, rows: int, *, seed: int = 0, width: int = WIDTH, dtype=np.float32) -> list:
    """Return batches for `squares`."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.normal(size=(rows, width)).astype(dtype) for _ in range(2)) for _ in range(count)]


VARIANTS: dict[str, dict] = {name: {"schedule": name} for name in ("naive", "gpipe", "pipedream_flush", "pipedream", "pipedream_2bw")} | {
    "pipedream_vertical_sync": {"schedule": "pipedream", "vertical_sync": True}
}
"""The schedules with one stage on each rank and whole backwards, and every option that changes their numbers."""

WITHOUT_VARIANTS = [name for name in SCHEDULES if name not in VARIANTS]
"""The schedules that run several stages on a rank, or backwards in two halves."""


def is_legal(**fields) -> bool:
    """Return whether such an even plan exists."""
    try:
        Plan.even(**fields)
    except InputError:
        return False
    return True


def cut(ids, sizes, *, recompute="none", replicas=1, **fields) -> Plan:
    """Return a plan whose stages hold `sizes` layers, one after the other; `replicas` is one number, or one for each stage."""
    ends = [sum(sizes[: s + 1]) for s in range(len(sizes))]
    assert ends[-1] == len(ids)
    counts = [replicas] * len(sizes) if isinstance(replicas, int) else replicas
    stages = [
        {"layers": tuple(ids[end - size : end]), "recompute": recompute, "replicas": count}
        for size, end, count in zip(sizes, ends, counts, strict=True)
    ]
    return Plan(stages=stages, **fields)


@functools.cache
def momentum() -> optax.GradientTransformation:
    """Return SGD with momentum, which has state and compiles quickly."""
    return optax.sgd(0.05, momentum=0.9)


def copied(tree):
    """Return a copy of all arrays, which nobody else will donate."""
    return jax.tree.map(jnp.copy, tree)


def on_first_device(tree):
    """Return the same values on one device."""
    return jax.device_put(copied(tree), jax.devices()[0])
