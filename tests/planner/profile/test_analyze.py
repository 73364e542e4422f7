"""Analytic profiles: bytes equal to those of real stages, times by hand, loops counted, nothing allocated."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe import InputError
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_planner.machine.device import Device
from jpipe_planner.profile.analyze import analyze
from jpipe_planner.profile.model import Model
from jpipe_planner.profile.scratch import compile_program

DEVICE = Device(name="toy", flops={"float32": 1e9}, efficiency=0.5, memory_bandwidth=1e8)


def squares(outputs, labels):
    return ((outputs - labels) ** 2).sum(), jnp.asarray(labels.size, jnp.float32)


def nats(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(), jnp.asarray(labels.size, jnp.float32)


def floats(*shape):
    return lambda rows: tuple(jax.ShapeDtypeStruct((rows, *shape), np.float32) for _ in "xy")


class Normed(nn.Module):
    """A layer with state."""

    @nn.compact
    def __call__(self, x, train=True):
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(x.shape[-1])(x))


def linear(n, m):
    return lambda rngs: nnx.Linear(n, m, rngs=rngs)


MODELS = {
    "dense": (
        # tanh keeps its output, which the next layer keeps as its input: once, if they are in one stage.
        {"in": linear(6, 8), "tanh": jnp.tanh, "mid": linear(8, 8), "softmax": nn.softmax, "exp": jnp.exp, "out": linear(8, 6)},
        floats(6),
        squares,
    ),
    "state": ({"scale": lambda x: 2 * x, "norm": Normed(), "relu": nn.relu, "norm2": Normed(), "drop": jnp.sin}, floats(6), squares),
    "gpt": (
        layers(ModelConfig(depth=3, width=16, heads=2, seq_len=8)).layers,
        lambda rows: (jax.ShapeDtypeStruct((rows, 8), np.uint8), jax.ShapeDtypeStruct((rows, 8), np.int32)),
        nats,
    ),
}


@pytest.mark.exhaustive
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["none", "full", "dots_with_no_batch_dims_saveable"])
def test_the_bytes_of_any_stage_are_the_sum_over_its_layers(name, policy):
    layers, batch, loss = MODELS[name]
    stack, optimizer = jpipe.LayerStack(layers), optax.sgd(0.1, momentum=0.9)
    profile = analyze(stack, batch, loss, optimizer, [2], DEVICE, policies=[policy])
    assert profile.ids == stack.ids
    for stages in some_cuts(stack.ids, policy):
        plan = jpipe.Plan(schedule="gpipe", microbatches=1, stages=stages)
        expected = jpipe.Pipeline(stack, plan, loss, optimizer).costs(batch(2))
        for actual, exact in zip(profile.stage_costs(plan, 2), expected, strict=True):
            for part in ("weights", "optimizer", "state", "residuals", "inputs"):
                assert getattr(actual, part) == getattr(exact, part), (stages, part)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("fields", "halved"), [({"params": "bfloat16"}, 2), ({"compute": "bfloat16"}, 1)])
def test_the_bytes_of_a_precision_are_those_of_its_pipeline(fields, halved):
    layers, batch, loss = MODELS["dense"]
    stack, optimizer, precision = jpipe.LayerStack(layers), optax.sgd(0.1, momentum=0.9), jpipe.Precision(**fields)
    device = DEVICE.model_copy(update={"flops": {"bfloat16": 2e9, "float32": 1e3}})  # so slow that none can be meant
    profile = analyze(stack, batch, loss, optimizer, [2], device, policies=["none"], precision=precision)
    plain = analyze(stack, batch, loss, optimizer, [2], DEVICE, policies=["none"])
    for stages in some_cuts(stack.ids, "none"):
        plan = jpipe.Plan(schedule="gpipe", microbatches=1, stages=stages)
        expected = jpipe.Pipeline(stack, plan, loss, optimizer, precision=precision).costs(batch(2))
        for actual, exact in zip(profile.stage_costs(plan, 2), expected, strict=True):
            for part in ("weights", "optimizer", "state", "residuals", "inputs"):
                assert getattr(actual, part) == getattr(exact, part), (stages, part)
            assert exact.accumulators - actual.accumulators in (4, 8)  # the weight of the batch, and in the last stage its loss
    for actual, before in zip(profile.layers, plain.layers, strict=True):
        assert halved * actual.weights == before.weights == actual.accumulators == before.accumulators
        assert actual.optimizer == before.optimizer + (halved - 1) * before.weights
        assert actual.at[0].forward < 1e-4


@pytest.mark.exhaustive
def test_the_bytes_of_frozen_layers_are_those_of_their_pipeline():
    layers = {name: linear(6, 6) for name in ("in", "a", "b")} | {"tanh": jnp.tanh, "c": linear(6, 6), "out": linear(6, 6)}
    stack, batch = jpipe.LayerStack(layers, ties=[jpipe.Tie(("in", "kernel"), ("c", "kernel"))]), floats(6)
    label = {
        "in": "frozen",
        "a": "frozen",
        "b": {"kernel": "frozen", "bias": "trained"},
        "tanh": "trained",
        "c": "frozen",
        "out": "trained",
    }
    optimizer = optax.partition({"trained": optax.adam(1e-3), "frozen": optax.set_to_zero()}, label)
    profile = analyze(stack, batch, squares, optimizer, [2], DEVICE, policies=["none", "full"])
    assert [layer.at[0].backward < 1e-8 for layer in profile.layers] == [True, True, False, False, False, False]
    for stages in [*some_cuts(stack.ids, "none"), *some_cuts(stack.ids, "full")]:
        plan = jpipe.Plan(schedule="pipedream_2bw" if len(stages) > 1 else "gpipe", microbatches=6, stages=stages)
        expected = jpipe.Pipeline(stack, plan, squares, optimizer).costs(batch(12))
        costs = profile.stage_costs(plan, 2)
        assert jpipe.programs.uses_by_costs(costs) == jpipe.programs.uses_by_costs(expected) == {}
        for actual, exact in zip(costs, expected, strict=True):
            for part in ("weights", "frozen", "optimizer", "state", "inputs"):
                assert getattr(actual, part) == getattr(exact, part), (stages, part)
            recomputes = stages[0]["recompute"] == "full"  # then the input is kept for the first layer with a gradient alone
            assert actual.residuals >= exact.residuals if recomputes else actual.residuals == exact.residuals, stages
            assert exact.accumulators - actual.accumulators in (4, 8)  # the weight of the batch, and in the last stage its loss
            assert exact.gradient - actual.gradient in (0, 4)  # its weight
            assert exact.message - actual.message in (4, 8)


def some_cuts(ids, policy):
    """Yield cuts with all layers in one stage, each in its own, and in pairs from two offsets."""
    for size, shift in [(len(ids), 0), (1, 0), (2, 0), (2, 1)]:
        starts = sorted({0, *range(shift, len(ids), size)})
        runs = [ids[a:b] for a, b in itertools.pairwise([*starts, len(ids)])]
        yield [{"layers": run, "recompute": policy} for run in runs]


@pytest.mark.slow
def test_times_of_a_dense_layer_by_hand():
    stack = jpipe.LayerStack({"in": linear(64, 128), "mid": linear(128, 128), "out": linear(128, 64)})
    profile = analyze(stack, floats(64), squares, optax.adam(1e-3), [512, 8], DEVICE, policies=["none"])
    assert (profile.source, profile.device, profile.sizes) == ("analytic", "toy", (8, 512))
    small, large = profile.layers[1].at
    weights = 4 * (128 * 128 + 128)
    # At 512 rows the FLOPs take longest: a product forward, two backward.
    assert large.forward == pytest.approx(2 * 512 * 128 * 128 / 5e8, rel=0.02)
    assert large.backward == pytest.approx(4 * 512 * 128 * 128 / 5e8, rel=0.02)
    assert large.flops == pytest.approx(large.forward * 5e8)
    # At 8 rows the memory does: weights, input and output forward, and for the backward the input is written again.
    moved = weights + 2 * 8 * 128 * 4
    assert small.forward == pytest.approx((moved + 8 * 128 * 4) / 1e8)
    assert profile.layers[1].update == pytest.approx(2 * (weights + profile.layers[1].optimizer + weights + 4) / 1e8)


class Recurrent(nn.Module):
    """An LSTM over 50 positions, or over one."""

    positions: int

    @nn.compact
    def __call__(self, x):
        return x + nn.RNN(nn.LSTMCell(x.shape[-1]))(x[:, : self.positions]).sum(1, keepdims=True)


@pytest.mark.slow
def test_every_turn_of_a_loop_counts():
    stack = jpipe.LayerStack({"in": linear(32, 32), "one": Recurrent(1), "fifty": Recurrent(50), "out": linear(32, 32)})
    profile = analyze(stack, floats(50, 32), squares, optax.sgd(0.1), [4], DEVICE, policies=["none"])
    once, often = (profile.layers[n].at[0] for n in (1, 2))
    product = 2 * 4 * 2 * 32 * 4 * 32  # rows × (input and state) × (four gates)
    assert often.flops - once.flops == pytest.approx(49 * product, rel=0.05)
    assert (often.backward - once.backward) * 5e8 == pytest.approx(49 * 2 * product, rel=0.3)


@pytest.mark.exhaustive
def test_equal_layers_are_profiled_once_and_nothing_is_allocated():
    width = 100_000  # 40 GB of weights a layer
    stack = jpipe.LayerStack(
        {"in": linear(width, width), **{f"h{n}": linear(width, width) for n in range(30)}, "out": linear(width, width)}
    )
    reports = []
    profile = analyze(
        stack, floats(width), squares, optax.adam(1e-3), [1], DEVICE, progress=lambda done, total: reports.append((done, total))
    )
    assert profile.layers[5].weights == 4 * width * (width + 1)
    assert all(layer.at == profile.layers[1].at for layer in profile.layers[1:-2])  # the one before the last has another neighbour
    # Three distinct layers, their bytes and those of the three kinds of neighbours, and the programs that are compiled.
    done, totals = zip(*reports, strict=True)
    assert done == tuple(range(1, totals[-1] + 1))
    assert list(totals) == sorted(totals)
    assert totals[-1] > totals[0] > 9


def test_times_at_sizes_between_are_those_of_a_profile_of_that_size_alone():
    stack = jpipe.LayerStack({"in": linear(8, 8), "out": linear(8, 8)})
    profile = analyze(stack, floats(8), squares, optax.sgd(0.1), [1, 2, 4, 8, 16], DEVICE, policies=["none"])
    for n, rows in enumerate(profile.sizes):
        alone = analyze(stack, floats(8), squares, optax.sgd(0.1), [rows], DEVICE, policies=["none"])
        for layer, expected in zip(profile.layers, alone.layers, strict=True):
            assert layer.at[n].forward == pytest.approx(expected.at[0].forward)
            assert layer.at[n].backward == pytest.approx(expected.at[0].backward)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (Device(name="toy"), "topology: device 'toy' has no flops, which analytic profiles need; add them, such as float32: 14 TFLOP/s"),
        (
            Device(name="toy", flops={"float16": 1e9}),
            "topology: device 'toy' has flops for float16, layer 'in' computes in float32; add them",
        ),
    ],
)
def test_a_device_without_known_figures(device, message):
    stack = jpipe.LayerStack({"in": linear(4, 4), "out": linear(4, 4)})
    with pytest.raises(InputError) as caught:
        analyze(stack, floats(4), squares, optax.sgd(0.1), [1], device)
    assert str(caught.value) == message


@pytest.mark.parametrize("sizes", [[], [0], [4, -1]])
def test_sizes_are_whole_numbers_of_rows(sizes):
    stack = jpipe.LayerStack({"in": linear(4, 4)})
    with pytest.raises(InputError, match="sizes: expected microbatch sizes, whole numbers of rows above 0, found"):
        analyze(stack, floats(4), squares, optax.sgd(0.1), sizes, DEVICE)


def test_an_unknown_policy():
    stack = jpipe.LayerStack({"in": linear(4, 4), "out": linear(4, 4)})
    with pytest.raises(InputError, match="policies: unknown recomputation policy 'ful'; did you mean 'full'"):
        analyze(stack, floats(4), squares, optax.sgd(0.1), [2], DEVICE, policies=["ful"])


def test_a_loss_that_does_not_fit():
    stack = jpipe.LayerStack({"in": linear(4, 4), "out": linear(4, 5)})
    with pytest.raises(InputError, match="loss: the function does not take outputs"):
        analyze(stack, floats(4), squares, optax.sgd(0.1), [2], DEVICE)


@pytest.mark.exhaustive
def test_the_temporaries_of_several_layers_are_about_those_of_the_compiled_stage():
    wide = jpipe.LayerStack({f"dense_{n}": lambda rngs: nnx.Linear(64, 64, rngs=rngs) for n in range(8)})

    def batch(rows):
        return (jax.ShapeDtypeStruct((rows, 64), np.float32),) * 2

    def loss(y, labels):
        return jnp.sum((y - labels) ** 2), jnp.asarray(y.size, jnp.float32)

    wide_profile = analyze(wide, batch, loss, optax.adam(1e-3), [4], Device(flops={"float32": 1e9}))
    plan = jpipe.Plan.even(wide.ids, 2, "gpipe", 2)
    pipe = jpipe.Pipeline(wide, plan, loss, optax.adam(1e-3))
    exact = [cost.temporary for cost in pipe.costs(batch(8), compiled_for=jax.devices()[0])]
    for estimate, true in zip(wide_profile.stage_costs(plan, 4), exact, strict=True):
        assert 0.75 * true < estimate.temporary < 1.25 * true
        assert max(layer.at[0].temporary for layer in wide_profile.layers) < 0.3 * true  # gradients of four layers, not only scratch of one


@pytest.mark.exhaustive
def test_scratch_memory_with_full_recomputation_is_that_of_one_two_and_three_compiled_layers():
    blocks = {
        f"block_{n}": lambda rngs: nnx.Sequential(nnx.Linear(8, 64, rngs=rngs), nn.gelu, nnx.Linear(64, 8, rngs=rngs)) for n in range(6)
    }
    stack, device = jpipe.LayerStack({"first": linear(8, 8)} | blocks | {"last": linear(8, 8)}), jax.devices()[0]
    model = Model(stack, floats(8), squares, optax.adam(1e-3), (2, 16))
    assert model.triples["block_0", "block_0"] == ("block_0", "block_1", "block_2")
    assert ("block_0", "last") not in model.triples
    profile = analyze(stack, floats(8), squares, optax.adam(1e-3), [2, 16], DEVICE)
    for ids in (stack.ids[:1], stack.ids[1:2], stack.ids[:2], stack.ids[3:5], stack.ids[:3], stack.ids[1:4]):
        stages = [{"layers": some, "recompute": "full"} for some in _around(stack.ids, ids)]
        plan = jpipe.Plan(schedule="gpipe", microbatches=2, stages=stages)
        estimates = profile.stage_costs(plan, 16)
        (estimate,) = (cost for stage, cost in zip(plan.stages, estimates, strict=True) if stage.layers == ids)
        assert estimate.temporary == compile_program(model.stage(ids, 16, "full").trace("backward", device).lower(), device)[0]


def _around(ids, some):
    start = ids.index(some[0])
    return [run for run in (ids[:start], some, ids[start + len(some) :]) if run]


def test_a_program_beyond_the_memory_of_a_tpu_has_the_bytes_that_xla_says_it_needs():
    class Lowered(jax.stages.Lowered):
        def __init__(self):
            """Hold no program."""

        def compile(self, *options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: temporaries (32.00G) exceeds available HBM (15.75G)")

    assert compile_program(Lowered(), jax.devices()[0]) == (32 * 2**30, None)
