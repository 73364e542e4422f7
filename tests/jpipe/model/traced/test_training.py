"""Layers cut from a model train through a pipeline as one stage does, with every option of plans and pipelines."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe import LayerStack, Pipeline, Plan, Precision

VOCAB, WIDTH, LENGTH, MICROBATCHES = 7, 4, 6, 4


@pytest.fixture(autouse=True)
def promotion():
    """Models of users promote dtypes and ranks as JAX does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Block(nnx.Module):
    """A residual block with dropout, whose kernel names logical axes."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.linear = nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        h = self.linear(x)
        if jax.sharding.get_abstract_mesh().axis_names:
            h = jax.lax.with_sharding_constraint(h, jax.sharding.PartitionSpec(None, None, "model"))
        return x + self.drop(jnp.tanh(h))


class Model(nnx.Module):
    """An embedding that is also the head, and blocks."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def loss(outputs, labels):
    logits = jax.nn.log_softmax(outputs.astype(jnp.float32))
    return -jnp.take_along_axis(logits, labels[..., None], -1).sum(), jnp.asarray(labels.size, jnp.float32)


def batch(t, length=LENGTH):
    tokens = np.random.default_rng(t).integers(0, VOCAB, (2 * MICROBATCHES, length)).astype(np.int32)
    return tokens, (tokens + 1) % VOCAB


@functools.cache
def stack():
    return LayerStack.from_model(lambda rngs: Model(rngs), jax.ShapeDtypeStruct((2, LENGTH), np.int32))


def train(plan, batches, optimizer, options, state=None):
    """Return the losses, the pipeline and its state after the batches and a drain."""
    pipe = Pipeline(stack(), plan, loss, optimizer, **options)
    state = state(pipe) if state else pipe.init(jax.random.key(3), batches[0])
    losses = []
    for each in batches:
        state, metrics = pipe.step(state, each)
        losses += metrics.losses.values()
    state, metrics = pipe.drain(state, with_metrics=True)
    return [float(value) for value in (*losses, *metrics.losses.values())], pipe, state


@functools.cache
def as_one_stage(lengths, optimizer, options):
    """Return the losses and the parameters of training as one stage."""
    plan = Plan.even(stack().ids, 1, "gpipe", MICROBATCHES)
    losses, pipe, state = train(plan, [batch(t, length) for t, length in enumerate(lengths)], optimizer, dict(options))
    return losses, pipe.params(state)


MOMENTUM = optax.sgd(0.05, momentum=0.9)
FROZEN = optax.multi_transform(
    {"trained": MOMENTUM, "none": optax.set_to_zero()},
    lambda params: {name: "none" if name == "blocks.0" else "trained" for name in params},
)


def on_mesh(mesh, **fields):
    plan = Plan.even(stack().ids, 2, "pipedream_flush", MICROBATCHES)
    return plan.model_copy(update={"stages": tuple(stage.model_copy(update={"mesh": mesh, **fields}) for stage in plan.stages)})


def even(stages, schedule="pipedream_flush", **fields):
    return Plan.even(stack().ids, stages, schedule, MICROBATCHES, **fields)


CASES = {
    "recompute": lambda: (even(2, recompute="full"), {}),
    "recompute_dots": lambda: (even(2, recompute="dots_with_no_batch_dims_saveable"), {}),
    "zb_h1": lambda: (even(3, "zb_h1"), {}),
    "zb_v": lambda: (even(2, "zb_v"), {}),
    "replicas": lambda: (even(2, replicas=2), {}),
    "zero": lambda: (even(2, replicas=2, shard_optimizer=True), {}),
    "tensor": lambda: (on_mesh({"data": 2, "model": 2}), {}),
    "fsdp": lambda: (on_mesh({"data": 2}, fsdp=True), {}),
    "buckets": lambda: (even(2), {"lengths": (LENGTH, 4, LENGTH)}),
    "bfloat16": lambda: (even(2), {"precision": Precision(params="bfloat16"), "tolerance": 0.02}),
    "float16": lambda: (even(2), {"precision": Precision(compute="float16", loss_scale="dynamic"), "tolerance": 0.01}),
    "clip": lambda: (even(2), {"clip_global_norm": 0.1}),
    "ema": lambda: (even(2), {"ema_decay": 0.5}),
    "frozen": lambda: (even(2), {"optimizer": FROZEN}),
}


IN_CI = ("frozen", "tensor")
"""The other cases are much like these, or like those of other tests: only `make test-all` has them."""


@pytest.mark.slow
@pytest.mark.parametrize("case", [case if case in IN_CI else pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES])
def test_training_equals_that_as_one_stage(case):
    plan, options = CASES[case]()
    optimizer, tolerance = options.pop("optimizer", MOMENTUM), options.pop("tolerance", 1e-5)
    lengths = options.pop("lengths", (LENGTH, LENGTH))
    batches = [batch(t, length) for t, length in enumerate(lengths)]
    buckets = list(dict(zip(lengths, batches, strict=True)).values())
    expected, params = as_one_stage(lengths, optimizer, tuple(options.items())) if len(buckets) == 1 else _in_buckets(batches, buckets)
    losses, pipe, state = train(plan, batches, optimizer, options, lambda p: p.init(jax.random.key(3), batches[0], buckets=buckets))
    np.testing.assert_allclose(losses, expected, rtol=tolerance)
    scale = 20 * tolerance  # Adam's steps are relative to the gradients
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=scale, atol=scale), pipe.params(state), params)


def _in_buckets(batches, buckets):
    plan = Plan.even(stack().ids, 1, "gpipe", MICROBATCHES)
    losses, pipe, state = train(plan, batches, MOMENTUM, {}, lambda p: p.init(jax.random.key(3), batches[0], buckets=buckets))
    return losses, pipe.params(state)


@pytest.mark.slow
def test_parameters_are_sharded_by_the_axes_that_a_model_names():
    plan = on_mesh({"data": 1, "model": 2})
    pipe = Pipeline(stack(), plan, loss, MOMENTUM)
    state = pipe.init(jax.random.key(0), batch(0))
    weights = state.workers[-1].weights
    leaves = jax.tree_util.tree_flatten_with_path(weights.read(max(weights.versions)))[0]
    specs = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.sharding.spec for path, leaf in leaves}
    assert [spec for path, spec in specs.items() if path.endswith("kernel")] == [jax.sharding.PartitionSpec(None, "model")]


def test_a_layer_makes_its_own_parameters_alone():
    layers, x = stack().layers, jax.ShapeDtypeStruct((2, LENGTH), np.int32)
    drawn = {}
    for layer_id, spec in stack().specs(x).items():
        jaxpr = jax.make_jaxpr(functools.partial(layers[layer_id].init, x=spec.x))(jax.random.key(0))
        drawn[layer_id] = [shape for shape in _drawn(jaxpr.jaxpr) if len(shape) > 1]
    assert [*drawn.values()] == [[(VOCAB, WIDTH)], [(WIDTH, WIDTH)], [(WIDTH, WIDTH)], [(VOCAB, WIDTH)]]


def _drawn(jaxpr):
    """Return the shapes of all arrays of random bits."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "random_bits":
            yield equation.params["shape"]
        for value in equation.params.values():
            body = getattr(value, "jaxpr", value)
            yield from _drawn(body) if hasattr(body, "eqns") else ()


@pytest.mark.exhaustive
def test_a_checkpoint_goes_on_with_another_cut_and_schedule(tmp_path):
    batches, key = [batch(t) for t in range(3)], jax.random.key(3)
    pipe = Pipeline(stack(), even(2), loss, MOMENTUM)
    state, snapshot, losses = pipe.init(key, batches[0]), pipe.snapshot(2), {}
    for each in batches:
        state, metrics = pipe.step(state, each, observe=snapshot)
        losses |= metrics.losses
    expected = pipe.params(state)
    jpipe.checkpoints.save(tmp_path, snapshot)
    other = Pipeline(stack(), even(3, "zb_h1"), loss, MOMENTUM)
    state = jpipe.checkpoints.load(other, tmp_path, key, batches[0])
    state, metrics = other.step(state, batches[2])
    np.testing.assert_allclose(metrics.losses[2], losses[2], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), other.params(state), expected)
