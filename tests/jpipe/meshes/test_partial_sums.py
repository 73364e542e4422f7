"""Gradients that the devices of the rows add up once per update: the same numbers, and no sum over devices in a backward."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import Layer, LayerStack, Pipeline, Plan, Tie
from jpipe.context import traced_mesh

ROWS, LENGTH, SYMBOLS, WIDTH, BATCHES = 4, 6, 11, 4, 3


def layer(apply, **shapes) -> Layer:
    """Build a layer of `apply(params, x)` with random parameters."""

    def init(key, x):
        keys = jax.random.split(key, len(shapes))
        return {name: jax.random.normal(k, shape) / 2 for (name, shape), k in zip(shapes.items(), keys, strict=True)}, {}

    return Layer(init, lambda params, state, x, key, train: (apply(params, x), state))


def norm(p, x):
    """Normalize over the last dim."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 0.1) * p["scale"][None, None, :]


def attention(p, x):
    """Attend within a sequence; one array has all four kernels."""
    q, k, v, out = p["w"]
    q, k, v = jnp.moveaxis((x @ jnp.concatenate([q, k, v], 1) + p["b"][None, None, :]).reshape(*x.shape[:2], 3, WIDTH), 2, 0)
    weights = jax.nn.softmax(jnp.einsum("bqw,bkw->bqk", q, k), axis=-1)
    return x + jnp.einsum("bqk,bkw->bqw", weights, v) @ out


def convolution(p, x):
    """Convolve over the positions."""
    return jax.lax.conv_general_dilated(x, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def scanned(p, x):
    """Apply blocks with stacked kernels and one bias for all."""

    def block(x, w):
        return jnp.tanh(x @ w + p["b"][None, None, :]), None

    return jax.lax.scan(block, x, p["w"])[0]


def batch_norm(p, x):
    """Normalize over the rows, so that each row depends on all."""
    return x / jnp.sqrt((x**2).mean((0, 1)) + 1)[None, None, :] * p["scale"]


def factors(p, x):
    """Multiply by a product of two small matrices, with the scalar of a penalty that no row changes."""
    w = p["a"] @ p["b"]
    return x @ w + 0.01 * (w**2).sum()


def mapped(p, x):
    """Multiply each device's rows by a kernel that a `shard_map` reads twice."""

    def local(w, b, x):
        return jnp.tanh(x @ w) @ w + b[None, None, :]

    if (stage := traced_mesh()) is None:
        return local(p["w"], p["b"], x)
    rows = jax.P(stage.rows)
    return jax.shard_map(local, mesh=stage.mesh, in_specs=(jax.P(), jax.P(), rows), out_specs=rows)(p["w"], p["b"], x)


LAYERS = {
    "embed": layer(lambda p, x: p["table"][x], table=(SYMBOLS, WIDTH)),
    "norm": layer(norm, scale=(WIDTH,)),
    "attention": layer(attention, w=(4, WIDTH, WIDTH), b=(3 * WIDTH,)),
    "convolution": layer(convolution, kernel=(3, WIDTH, WIDTH)),
    "scan": layer(scanned, w=(3, WIDTH, WIDTH), b=(WIDTH,)),
    "batch norm": layer(batch_norm, scale=()),
    "mapped": layer(mapped, w=(WIDTH, WIDTH), b=(WIDTH,)),
    "factors": layer(factors, a=(WIDTH, 2), b=(2, WIDTH)),
    "out": layer(lambda p, x: x @ p["table"].T, table=(SYMBOLS, WIDTH)),
}


def loss(y, labels):
    """Return the weighted squares; rows have different weights."""
    return (((y - labels["target"]) ** 2).sum((1, 2)) * labels["weight"]).sum(), labels["weight"].sum()


def batches(dtype=np.float64):
    rng, rows = np.random.default_rng(3), 2 * ROWS
    target = (rows, LENGTH, SYMBOLS)
    return [
        (
            rng.integers(SYMBOLS, size=(rows, LENGTH)),
            {"target": rng.normal(size=target).astype(dtype), "weight": rng.integers(1, 4, size=rows).astype(dtype)},
        )
        for _ in range(BATCHES)
    ]


def trained(ties=(), clip=None, names=tuple(LAYERS), **fields):
    """Train a pipeline of these layers, and return it with its parameters."""
    stack = LayerStack({name: LAYERS[name] for name in names}, ties=ties)
    plan = Plan.even(stack.ids, fields.pop("num_stages", 2), fields.pop("schedule", "pipedream_flush"), 2, **fields)
    pipe = Pipeline(stack, plan, loss, optax.sgd(0.01, momentum=0.9), clip_global_norm=clip)
    state = pipe.init(jax.random.key(0), batches()[0])
    for batch in batches():
        state, _ = pipe.step(state, batch)
    return pipe, pipe.params(pipe.drain(state))


CASES = {
    "flush": {},
    "fused and recomputed": {"recompute": "full", "num_stages": 1},
    "elementwise": {"recompute": "elementwise"},
    "2bw": {"schedule": "pipedream_2bw", "ties": [Tie(("embed", "table"), ("out", "table"))], "clip": 0.5},
    "tied in one stage": {"num_stages": 1, "ties": [Tie(("embed", "table"), ("out", "table"))]},
    "pipedream": {"schedule": "pipedream"},
    "halves": {"schedule": "zb_h1"},
    "replicas in parts": {"replicas": 2, "sum_parts": 2},
    "parts beside a stage of one layer": {"names": ("embed", "norm", "out"), "replicas": 2, "sum_parts": 2},
}


@pytest.mark.numbers
@pytest.mark.thinned(most=1, most_slow=2)
@pytest.mark.parametrize("case", CASES)
def test_a_mesh_changes_no_number(case, float64):
    expected, found = (trained(**CASES[case], **mesh)[1] for mesh in ({}, {"mesh": {"data": 2}}))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_one_program_for_forward_and_backward_recomputes_nothing_of_elementwise(float64):
    stack, counts = LayerStack(LAYERS), []
    for recompute in ("none", "elementwise"):
        plan = Plan.even(stack.ids, 1, "pipedream_flush", 2, mesh={"data": 2}, recompute=recompute)
        f = Pipeline(stack, plan, loss, optax.sgd(0.01)).stage_functions(batches()[0])[0]
        assert f.late_sums is not None
        program = jax.make_jaxpr(f.forward_backward)(f.specs.params, *f.specs.arguments, f.accumulators_spec, f.specs.rng)
        counts.append(str(program).count("= exp"))
    assert counts[0] == counts[1] > 0


def sums(program) -> int:
    """Return how many numbers a program adds up over devices."""
    found = re.findall(r"= (\(.*?\)|\S+) all-reduce(?:-start)?\(", program.as_text())
    shapes = [shape for each in found for shape in re.findall(r"\w+\[([\d,]*)\]", each)]
    return sum(int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes)


def test_backwards_add_up_nothing_over_the_devices_of_the_rows(float64):
    """Only a scale of batch normalization needs a sum over all rows, as do its inputs: a few numbers."""
    pipe = trained(mesh={"data": 2})[0]
    for stage in pipe._executor.stages.values():
        count = sum(leaf.size for leaf in jax.tree.leaves(stage.functions.specs.params))
        backward = stage.calls["forward_backward" if stage.functions.last else "backward"]
        assert sums(stage.calls["sum_devices"]) == count
        assert sums(backward) <= 3 * WIDTH
