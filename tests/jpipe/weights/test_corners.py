"""Corner cases in which a dtype, a structure or reused memory could silently change the numbers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jpipe import InputError, Layer, LayerStack, Pipeline, Plan
from jpipe._arguments import as_key
from jpipe.programs._instructions import Update
from tests.jpipe.models import batches_of, momentum, plain_stack, squares
from tests.jpipe.running import check_equal, train

pytestmark = pytest.mark.usefixtures("lenient")


def squares32(y, labels):
    return squares(y.astype(jnp.float32), labels)


def first_loss(stack, depth, loss=squares32):
    (batch,) = batches_of(1, 4)
    pipe = Pipeline(stack, Plan.even(stack.ids, depth, "gpipe", 2), loss, optax.sgd(0.1))
    return train(pipe, [batch]).losses[0]


class HalfDense(nnx.Module):
    """A dense layer that computes in bfloat16, which determines the dtype of its output."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.full((3,), 0.5))
        self.dense = nnx.Linear(3, 3, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x) * self.scale[...][None, :]


@pytest.mark.slow
def test_weak_types_do_not_make_the_numbers_depend_on_the_cut():
    stack = LayerStack({"weak": lambda x: jnp.where(x > 0, 1.0, 0.0), "dense": HalfDense, "single": lambda x: x * 1.0})
    losses = {first_loss(stack, depth) for depth in (1, 2, 3)}
    assert len(losses) == 1
    assert [str(spec.output.dtype) for spec in stack.specs(jnp.zeros((2, 3))).values()] == ["float32"] * 3


def test_a_weight_too_large_for_the_gradients_dtype_still_divides():
    def dense16():
        return Layer(
            lambda key, x: ({"w": jnp.ones((3, 3), jnp.float16)}, {}), lambda p, s, x, key, train: (x.astype(jnp.float16) @ p["w"], s)
        )

    stack = LayerStack({"a": dense16()})
    loss = lambda y, labels: (y.astype(jnp.float32).sum() * 60_000, 70_000)  # noqa: E731 - as a user writes it
    pipe = Pipeline(stack, Plan.even(("a",), 1, "gpipe", 1), loss, optax.sgd(500.0))
    x = np.full((1, 3), 1e-3, np.float32)
    after = train(pipe, [(x, x)]).params["a"]["w"]
    np.testing.assert_allclose(np.asarray(after, np.float32), 1 - 500 * 60_000 * 1e-3 / 70_000, rtol=2e-3)


class Stacked(nnx.Module):
    """Stacked blocks with dropout in a scan, whose random streams are stacks of keys."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def build(rngs):
            return Noisy(rngs)

        self.blocks = build(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)


class Noisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.dense(x))


@pytest.mark.slow
def test_stacked_modules_draw_a_number_of_their_own_each():
    stack = LayerStack({"stacked": Stacked})
    x = jnp.ones((1, 3))
    params, state = stack.init_layer("stacked", jax.random.key(0), x)

    def run(microbatch):
        everything = {"stacked": params}, {"stacked": state}
        return stack.apply(stack.ids, *everything, x, key=jax.random.key(1), microbatch=microbatch, train=True)[0]

    assert jnp.array_equal(run(0), run(0))
    assert not jnp.array_equal(run(0), run(1))
    assert first_loss(stack, 1) > 0


def test_a_scan_over_layers_leaves_no_weights_behind():
    class Half(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return linen.Dense(3, dtype=jnp.bfloat16)(x).astype(jnp.float32), None

    class Tower(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.scan(Half, variable_axes={"params": 0}, split_rngs={"params": True}, length=5)()(x, None)[0]

    stack = LayerStack({"tower": Tower(), "out": lambda x: x})
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 2), squares, momentum())
    batch = batches_of(1, 8)[0]
    functions = pipe.stage_functions(batch)[0]
    saved = jax.eval_shape(functions.forward, functions.specs.params, *functions.specs.arguments, functions.specs.rng)[2]
    assert [leaf.shape for leaf in saved] == [(5, 4, 3)]  # the activations of the five layers; their kernels are (5, 3, 3)
    state = pipe.init(jax.random.key(0), batch)
    flops = {
        name: call.cost_analysis()["flops"] for name, call in pipe._executor.stages[0].calls.items() if name in ("forward", "backward")
    }
    assert flops["backward"] < 2.5 * flops["forward"]  # two products a layer: the forward that is traced again is not run again
    pipe.step(state, batch)


def test_frozen_parameters_stay_frozen():
    stack = LayerStack({"norm": lambda rngs: nnx.BatchNorm(3, use_running_average=True, rngs=rngs)})
    before = stack.init_layer("norm", jax.random.key(0), jnp.ones((2, 3)))[1]
    pipe = Pipeline(stack, Plan.even(stack.ids, 1, "gpipe", 1), squares, momentum())
    check_equal(jax.device_get(train(pipe, batches_of(2, 4)).layer_state["norm"]), jax.device_get(before))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            Layer(lambda key, x: ({}, {"n": jnp.zeros((), jnp.int32)}), lambda p, s, x, key, train: (x, {"n": s["n"] + 1.0})),
            r"layer 'a': the state that a forward returns has other shapes .* expected \['n'\] int32\[\], found \['n'\] float32\[\]",
        ),
        (
            Layer(lambda key, x: ({}, {}), lambda p, s, x, key, train: (x if train else x.sum(), s)),
            r"layer 'a': its output in evaluation .* expected float32\[4, 3\], found float32\[\]",
        ),
        (linen.BatchNorm(use_running_average=False), r"layer 'a' .* it raises ModifyScopeVariableError"),
    ],
)
def test_layers_whose_form_changes_are_refused_before_any_device_work(layer, message):
    with pytest.raises(InputError, match=message):
        LayerStack({"a": layer, "b": lambda x: x}).specs(jnp.zeros((4, 3)))  # the last layer may return anything in evaluation


@pytest.mark.parametrize(
    ("key", "description"),
    [
        (0, "int"),
        (np.uint32([0, 0]), "ndarray"),
        (jax.random.key(0, impl="rbg"), r"key<rbg>\[\]"),
        (jax.random.split(jax.random.key(0)), r"key<fry>\[2\]"),
    ],
)
def test_an_invalid_key_is_refused(key, description):
    with pytest.raises(InputError, match=rf"expected a random key like jax.random.key\(0\).*found {description}"):
        as_key(key)


def test_an_old_style_key_is_the_same_as_a_new_one():
    stack = plain_stack(1)
    pipe, batch = Pipeline(stack, Plan.even(stack.ids, 1, "gpipe", 1), squares, momentum()), batches_of(1, 2)[0]
    old, new = (pipe.params(pipe.init(key, batch)) for key in (jax.random.PRNGKey(3), jax.random.key(3)))
    check_equal(jax.device_get(old), jax.device_get(new))


def test_layer_ids_with_equal_checksums_get_weights_of_their_own():
    stack = LayerStack({"plumless": plain_stack(1).layers["layer0"], "buckeroo": plain_stack(1).layers["layer0"]})  # equal CRC-32
    first, second = (stack.init_layer(layer_id, jax.random.key(0), jnp.ones((1, 3)))[0] for layer_id in stack.ids)
    assert not jnp.array_equal(first["w"], second["w"])


def test_2bw_writes_the_new_version_into_the_memory_of_the_shadow():
    stack = plain_stack(4)
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "pipedream_2bw", 2), squares, momentum())
    batch = batches_of(1, 4)[0]
    state, addresses = pipe.init(jax.random.key(0), batch), []

    def buffers(state):
        weights = state.workers[1].weights  # the last worker has finished its update when a step returns
        return {v: {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(weights.read(v))} for v in weights.versions}

    for _ in range(5):
        state, _ = pipe.step(state, batch)
        jax.block_until_ready(state)
        addresses.append(buffers(state))
    for before, after in itertools.pairwise(addresses):
        (retired, remaining), (_, new) = sorted(before), sorted(after)
        assert after[new] == before[retired]
        assert after[remaining] == before[remaining]


def test_init_verifies_the_programs(monkeypatch):
    from jpipe.programs import ProgramError
    from jpipe.programs.lowering._listing import Listing

    write = Listing.write

    def forgets_an_update(listing, time, kind, *fields):
        if kind is not Update:
            write(listing, time, kind, *fields)

    monkeypatch.setattr(Listing, "write", forgets_an_update)
    stack = plain_stack(2)
    with pytest.raises(ProgramError, match="rank 0"):
        Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 2), squares, momentum()).init(jax.random.key(0), batches_of(1, 4)[0])
