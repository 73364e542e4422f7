"""Parameters sharded over meshes: the layout, the collectives of the compiled programs, and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec

from jpipe import InputError, Layer, LayerStack, Pipeline, Plan
from tests.jpipe import models

WIDTH, HIDDEN, ROWS = 8, 16, 4
INIT = nnx.initializers


class Block(nnx.Module):
    """Two linear layers whose weights are sharded over the hidden dimension, and a norm without logical axes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        named = nnx.with_partitioning
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        kernels = named(INIT.lecun_normal(), ("embed", "mlp")), named(INIT.lecun_normal(), ("mlp", "embed"))
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=kernels[0], bias_init=named(INIT.zeros_init(), ("mlp",)), rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=kernels[1], rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


class LinenBlock(linen.Module):
    """The Linen version of `Block`."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(HIDDEN, kernel_init=linen.with_partitioning(INIT.lecun_normal(), ("embed", "mlp")))(x)


STACK = LayerStack({f"block{i}": Block for i in range(2)})
BATCH = np.ones((8, WIDTH), np.float32), np.ones((8, WIDTH), np.float32)


def pipeline(stack=STACK, **fields) -> Pipeline:
    plan = Plan.even(stack.ids, fields.pop("num_stages", 2), "pipedream_flush", 2, **fields)
    return Pipeline(stack, plan, models.squares, optax.sgd(1e-2, momentum=0.9))


def specs(pipe: Pipeline, batch=BATCH) -> dict:
    """Return the partition spec of each sharded parameter of the first stage, by "layer/path"."""
    first = pipe.stage_functions(batch)[0].partition
    return {f"{entry}/{path}": spec for entry, layer_specs in first.params.items() for path, spec in layer_specs.items()}


def test_logical_axes_of_nnx_modules_become_axes_of_the_mesh():
    P = PartitionSpec
    sharded = {"block0/up/kernel": P(None, "model"), "block0/up/bias": P("model"), "block0/down/kernel": P("model")}
    actual = specs(pipeline(mesh={"data": 2, "model": 2}))
    assert {name: spec for name, spec in actual.items() if name.startswith("block0")} == sharded
    assert specs(pipeline(mesh={"data": 2})) == {}
    actual = specs(pipeline(mesh={"data": 2, "model": 2}, fsdp=True))
    assert actual["block0/up/kernel"] == P("data", "model")
    assert actual["block0/norm/scale"] == P("data"), "without logical axes its largest dim is sharded over the rows' axis"


def test_linen_and_layers_and_patterns_name_axes_too():
    P = PartitionSpec
    layer = Layer(models.dense(WIDTH).init, models.dense(WIDTH).apply, axes={"w": ("mlp", "embed")})
    stack = LayerStack({"linen": LinenBlock(), "own": layer, "plain": models.dense(WIDTH)})
    pipe = pipeline(stack, num_stages=1, mesh={"model": 2}, param_axes={"plain/*": ["embed"], "plain/w": ["embed", "mlp"]})
    with pytest.raises(InputError, match=r"layer 'plain': parameter 'w': expected a logical axis or None for each dim, \[8, 8\]"):
        specs(pipe)
    pipe = pipeline(stack, num_stages=1, mesh={"model": 2}, param_axes={"plain/w": ["embed", "mlp"], "plain/*": ["mlp"]})
    assert specs(pipe) == {
        "linen/Dense_0/kernel": P(None, "model"),
        "own/w": P("model"),
        "plain/w": P(None, "model"),
        "plain/b": P("model"),
    }


def test_rules_of_the_plan_replace_the_usual_ones():
    actual = specs(pipeline(mesh={"data": 2, "tensor": 2}, rules={"embed": "tensor", "mlp": None}))
    assert actual["block0/up/kernel"] == PartitionSpec("tensor")
    assert "block0/up/bias" not in actual


def collectives(pipe: Pipeline) -> dict[str, list[tuple[str, str]]]:
    """Return the collectives of each program of stage 0, as (operation, shape of the result), by the program's name."""
    pipe.init(jax.random.key(0), BATCH)
    pattern = re.compile(
        r"= \(?(\w+\[[\d,]*\])\S* (?:.*?\) )?(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    )
    return {name: [(op, shape) for shape, op in pattern.findall(call.as_text())] for name, call in pipe._executor.stages[0].calls.items()}


@pytest.mark.slow
def test_programs_gather_nothing_but_the_shards_of_fsdp():
    plain = collectives(pipeline(mesh={"data": 2, "model": 2}))
    for name in ("forward", "backward", "in_place", "evaluate"):
        assert {op for op, _ in plain[name]} <= {"all-reduce"}, f"{name}: {plain[name]}"
    assert plain["forward"], "sums over the hidden dim"
    assert not plain["in_place"], "updates need no other device"
    sharded = collectives(pipeline(mesh={"data": 2, "model": 2}, fsdp=True))
    assert not sharded["in_place"]
    gathered = [shape for op, shape in sharded["forward"] if op == "all-gather"]
    kernel = f"f32[{WIDTH},{HIDDEN // 2}]"
    assert kernel in gathered, "a kernel is gathered over the rows' axis only, and stays sharded over the other"
    assert f"f32[{WIDTH},{HIDDEN}]" not in gathered
    assert f"f32[{ROWS},{WIDTH}]" not in gathered, "no activation is gathered"
    assert {op for op, _ in sharded["forward"]} <= {"all-reduce", "all-gather"}


REFUSED = {
    "rows": ({"mesh": {"data": 8}}, r"batch: expected a multiple of 8 rows in a microbatch, .* found 4; change the batch size"),
    "dim": (
        {"mesh": {"model": 3}},
        r"layer 'block0': parameter '(down|up)/(kernel|bias)': dim \d, 'mlp', is 16, which the size 3 of the axis 'model' does not divide",
    ),
    "rule": (
        {"mesh": {"model": 2}, "param_axes": {"block0/up/kernel": ["embed", "hidden"]}},
        r"layer 'block0': parameter 'up/kernel': expected logical axes that the rules name, .*, found 'hidden'; add a rule",
    ),
    "one axis twice": (
        {"mesh": {"model": 2}, "rules": {"embed": "model"}},
        r"parameter '(up|down)/kernel': dims 0 and 1 would both be sharded over 'model'",
    ),
    "pattern": ({"mesh": {"model": 2}, "param_axes": {"blok*/kernel": ["mlp"]}}, r"param_axes: 'blok\*/kernel' matches no parameter"),
    "rules that match nothing": (
        {"mesh": {"model": 2}, "rules": {"hidden": "model"}},
        r"rules: no parameter of the model has the logical axis 'hidden'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_do_not_fit_are_refused(case):
    fields, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        pipeline(**fields).check(BATCH)


def test_an_axis_over_which_nothing_is_sharded_is_refused():
    stack = LayerStack({name: models.dense(WIDTH) for name in "ab"})
    with pytest.raises(InputError, match="plan: nothing is sharded over the axis 'model' of the meshes: no layer names logical axes"):
        pipeline(stack, mesh={"data": 2, "model": 2}).check(BATCH)


def test_sizes_are_known_for_devices_that_are_not_here():
    pipe = pipeline(mesh={"data": 4, "model": 4})
    whole, shares = pipeline().costs(BATCH), pipe.costs(BATCH)
    assert shares[0].inputs * 4 == whole[0].inputs
    assert shares[0].weights < whole[0].weights / 3
    with pytest.raises(InputError, match=r"costs: expected 16 devices like .* for the mesh {'data': 4, 'model': 4}, found 8"):
        pipe.costs(BATCH, compiled_for=jax.devices()[0])
    pipe = pipeline(mesh={"data": 2, "model": 2})
    estimated, compiled = pipe.costs(BATCH), pipe.costs(BATCH, compiled_for=jax.devices()[0])
    assert compiled[0].temporary > 0
    assert compiled[0].residuals < estimated[0].residuals, "XLA shards hidden activations over the other axis, too"
