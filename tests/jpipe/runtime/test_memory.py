"""The bytes of live arrays on each device after every instruction equal what `simulate` predicts from shapes."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jpipe import LayerStack, Pipeline, Plan, Precision, Tie, lower, simulate
from jpipe.programs import uses_by_costs
from tests.jpipe.models import VARIANTS

ROWS, WIDTH, MICROBATCHES = 32, 24, 4
MOMENTUM = optax.sgd(1e-2, momentum=0.9)  # one object, so that tests share what is compiled with it
DEFAULT, MASTERS = Precision(), Precision(params="bfloat16")


class Block(nnx.Module):
    """A block with all that takes memory: weights, activations, dropout and batch statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(jnp.tanh(self.up(self.norm(x)))))


STACK = LayerStack({"in": lambda rngs: nnx.Linear(5, WIDTH, rngs=rngs)} | {f"block{i}": Block for i in range(5)})

LINEAR = LayerStack(
    {"in": lambda rngs: nnx.Linear(5, WIDTH, rngs=rngs)} | dict.fromkeys("abc", lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))
)


def squares(y, labels):
    return ((y - labels) ** 2).sum(), y.size


def alive(device: jax.Device) -> int:
    """Return the bytes of all arrays on a device that are not deleted."""
    arrays = [a for a in jax.live_arrays() if a.devices() == {device} and not a.is_deleted() and a.sharding.memory_kind != "pinned_host"]
    return sum(a.nbytes for a in arrays if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key))


def measured_and_predicted(plan, stack=STACK, optimizer=None, **options) -> tuple[list[int], list[int]]:
    """Return the measured and the predicted peak bytes of each rank over five steps and a drain."""
    devices = jax.devices()[: len(plan.rank_workers)]
    pipe = Pipeline(stack, plan, squares, optimizer or MOMENTUM, devices, **options)
    rng = np.random.default_rng(0)
    rows = ROWS * plan.microbatches
    return peaks_of(pipe, (rng.normal(size=(rows, 5)).astype(np.float32), rng.normal(size=(rows, WIDTH)).astype(np.float32)), devices)


def peaks_of(pipe, batch, devices) -> tuple[list[int], list[int]]:
    """Return the measured and the predicted peak bytes of each device, one for each rank, over five steps and a drain."""
    plan = pipe.plan
    gc.collect()
    before = [alive(device) for device in devices]
    state = pipe.init(jax.random.key(0), batch)
    peak = [alive(device) for device in devices]

    def observe(event):
        rank = plan.rank_of[event.instruction.worker]
        peak[rank] = max(peak[rank], alive(devices[rank]))

    for _ in range(5):
        state, _ = pipe.step(state, batch, observe=observe)
    state = pipe.drain(state, observe=observe)
    costs = pipe.costs(batch)
    program = lower(plan, 5, global_norm=pipe.uses_global_norm, **uses_by_costs(costs))
    predicted = simulate(program, costs).held_bytes
    return [after - base for after, base in zip(peak, before, strict=True)], list(predicted)


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize("recompute", ["none", "full", "dots_saveable"])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_measured_peak_is_predicted(variant, recompute):
    measured, predicted = measured_and_predicted(
        Plan.even(STACK.ids, 4, microbatches=MICROBATCHES, recompute=recompute, **VARIANTS[variant])
    )
    np.testing.assert_allclose(measured, predicted, rtol=0.05)
    np.testing.assert_allclose(measured, predicted, atol=64)  # nearer still: but for a few scalars it is exact


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize("schedule", ["pipedream_2bw", "zb_h1", "gpipe"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_measured_peak_with_compressed_messages_is_predicted(schedule, recompute):
    links = {"activations": "int8", "gradients": "bfloat16", "rounding": "stochastic"}
    measured, predicted = measured_and_predicted(Plan.even(STACK.ids, 3, schedule, MICROBATCHES, recompute=recompute, links=links))
    np.testing.assert_allclose(measured, predicted, atol=64)


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": "pipedream", "microbatches": 1},
        {"schedule": "pipedream_2bw"},
        {"schedule": "zb_h1"},
        {"schedule": "gpipe", "recompute": "full", "offload": {"optimizer": "all", "residuals": (0, 2)}},  # as a planner chooses
    ],
    ids=lambda fields: fields["schedule"],
)
def test_measured_peak_with_host_memory_is_predicted(fields):
    whole = dict.fromkeys(("optimizer", "versions", "residuals", "stash"), "all")
    plan = Plan.even(STACK.ids, 4, **{"microbatches": MICROBATCHES, "offload": whole, **fields})
    measured, predicted = measured_and_predicted(plan)
    np.testing.assert_allclose(measured, predicted, atol=64)


def labels(params):
    """Label the parameters of the first layers and a part of a later one "frozen", and all others "trained"."""
    frozen = ("in", "block0", "block1", "block3/up")
    return jax.tree.map_with_path(
        lambda path, _: "frozen" if jax.tree_util.keystr(path, simple=True, separator="/").startswith(frozen) else "trained", params
    )


@pytest.mark.thinned(most=0, most_slow=0)
@pytest.mark.parametrize("options", [{}, {"precision": MASTERS}, {"ema_decay": 0.9}], ids=["", "masters", "average"])
@pytest.mark.parametrize("fields", [*VARIANTS.values(), {"schedule": "zb_h1", "recompute": "full"}], ids=lambda fields: fields["schedule"])
def test_measured_peak_with_frozen_parameters_is_predicted(fields, options):
    optimizer = optax.partition({"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels)
    plan = Plan.even(STACK.ids, 4, microbatches=MICROBATCHES, **fields)
    with jax.numpy_dtype_promotion("standard"):  # Flax's BatchNorm joins bfloat16 inputs to float32 statistics
        measured, predicted = measured_and_predicted(plan, optimizer=optimizer, **options)
    np.testing.assert_allclose(measured, predicted, atol=64)


RANKS = [
    pytest.param({"schedule": "interleaved_zero_bubble", "num_stages": 6, "chunks_per_rank": 6}, id="one rank, split"),
    pytest.param({"schedule": "zb_v", "num_stages": 4}, id="zb_v"),
    pytest.param({"schedule": "dualpipe_v", "num_stages": 4}, id="dualpipe_v"),
    pytest.param({"schedule": "pipedream_2bw", "num_stages": 3, "split_backward": "early"}, id="2bw early"),
]


@pytest.mark.exhaustive
@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize("fields", RANKS)
def test_measured_peak_of_ranks_and_split_backwards_is_predicted(fields):
    recompute = "full" if fields["schedule"] == "interleaved_zero_bubble" else "none"
    measured, predicted = measured_and_predicted(Plan.even(STACK.ids, microbatches=6, recompute=recompute, **fields))
    np.testing.assert_allclose(measured, predicted, atol=64)


@pytest.mark.thinned(most=0, most_slow=0)
@pytest.mark.parametrize("schedule", ["pipedream_2bw", "pipedream"])
def test_measured_peak_of_chunks_without_a_flush_is_predicted(schedule):
    measured, predicted = measured_and_predicted(Plan.even(STACK.ids, 4, schedule, 6, chunks_per_rank=2))
    np.testing.assert_allclose(measured, predicted, atol=64)


REPLICAS = [
    pytest.param({"num_stages": 3, "schedule": "pipedream_flush", "replicas": (2, 2, 1)}, id="flush", marks=pytest.mark.exhaustive),
    pytest.param({"num_stages": 3, "schedule": "pipedream", "replicas": (2, 1, 1)}, id="round robin", marks=pytest.mark.slow),
    pytest.param({"num_stages": 2, "schedule": "pipedream_2bw", "replicas": 2, "agree": {"every": 2}}, id="agree", marks=pytest.mark.slow),
    pytest.param({"num_stages": 2, "replicas": 2, "agree": {"every": 3, "delay": 2}}, id="agree late", marks=pytest.mark.slow),
    pytest.param({"num_stages": 2, "replicas": 2, "agree": {"every": 2, "bits": 4}}, id="agree in few bits", marks=pytest.mark.slow),
    pytest.param({"num_stages": 2, "replicas": 2, "links": {"sums": "int8"}}, id="compressed sums", marks=pytest.mark.slow),
    pytest.param(
        {"num_stages": 2, "schedule": "pipedream", "replicas": (3, 1), "microbatches": 6, "links": {"sums": "fp8"}, "sum_parts": 2},
        id="compressed sums in parts",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("fields", REPLICAS)
def test_measured_peak_of_replicas_is_predicted(fields):
    measured, predicted = measured_and_predicted(Plan.even(STACK.ids, **{"microbatches": MICROBATCHES, **fields}))
    np.testing.assert_allclose(measured, predicted, atol=64)


@pytest.mark.exhaustive
def test_measured_peak_of_replicas_that_share_the_optimizer_state_is_predicted():
    """The prediction is for the replica with the largest share; the other replicas hold less."""
    plan = Plan.even(STACK.ids, 2, "pipedream_flush", MICROBATCHES, replicas=(2, 1), shard_optimizer=True)
    measured, predicted = measured_and_predicted(plan)
    assert max(measured[:2]) == pytest.approx(predicted[0], abs=64)
    assert measured[2] == pytest.approx(predicted[2], abs=64)
    whole, _ = measured_and_predicted(plan.model_copy(update={"shard_optimizer": False}))
    assert max(measured[:2]) < whole[0]


@pytest.mark.thinned(most=0, most_slow=0)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("variant", ["gpipe", "pipedream", "pipedream_2bw"])
def test_measured_peak_with_masters_is_predicted(variant, replicas):
    plan = Plan.even(STACK.ids, 3, microbatches=6, replicas=replicas, **VARIANTS[variant])
    with jax.numpy_dtype_promotion("standard"):  # Flax's BatchNorm joins bfloat16 inputs to float32 statistics
        measured, predicted = measured_and_predicted(plan, precision=MASTERS)
    np.testing.assert_allclose(measured, predicted, atol=64)


@pytest.mark.thinned(most=0)
@pytest.mark.parametrize(
    ("fields", "replicas"),
    [
        ({"schedule": "pipedream_2bw"}, 1),
        ({"schedule": "gpipe"}, 1),
        ({"schedule": "pipedream", "vertical_sync": True}, 1),
        ({"schedule": "gpipe"}, 2),
    ],
)
def test_measured_peak_with_shared_parameters_is_predicted(fields, replicas):
    """The dense layers have two shared parameters: one inside a stage, and one in two stages."""
    layers = {"in": lambda rngs: nnx.Linear(5, WIDTH, rngs=rngs)} | dict.fromkeys("abcd", lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))
    ties = [Tie(("a", "kernel"), ("c", "kernel")), Tie(("a", "kernel"), ("d", "kernel")), Tie(("in", "bias"), ("b", "bias"))]
    stack = LayerStack(layers, ties=ties)
    plan = Plan.even(stack.ids, 3, microbatches=MICROBATCHES, replicas=replicas, **fields)
    measured, predicted = measured_and_predicted(plan, stack=stack)
    np.testing.assert_allclose(measured, predicted, atol=64)


@pytest.mark.exhaustive
def test_measured_peak_of_skipping_batches_is_predicted():
    """The last stage works on the next batch while it waits for the norm; its second accumulators replace the older version."""
    measured, predicted = measured_and_predicted(Plan.even(LINEAR.ids, 3, "pipedream_2bw", MICROBATCHES), LINEAR, skip_nonfinite=True)
    np.testing.assert_allclose(measured, predicted, atol=64)


@pytest.mark.thinned(most=0, most_slow=0)
@pytest.mark.parametrize(
    ("schedule", "fields"),
    [("pipedream_2bw", {}), ("pipedream_2bw", {"replicas": 2}), ("interleaved_1f1b", {"chunks_per_rank": 2}), ("zb_h1", {})],
    ids=["2bw", "replicas", "chunks", "flush"],
)
def test_measured_peak_of_clipping_many_layers_is_predicted(schedule, fields):
    """The sums of squares are two numbers for each layer, sent from the last stage to the first."""
    layers = {"in": lambda rngs: nnx.Linear(5, WIDTH, rngs=rngs)} | {f"dense{n}": LINEAR.layers["a"] for n in range(31)}
    plan, stack = Plan.even(list(layers), 4, schedule, 2 * MICROBATCHES, **fields), LayerStack(layers)
    measured, predicted = measured_and_predicted(plan, stack, clip_global_norm=1.0)
    np.testing.assert_allclose(measured, predicted, atol=64)


@pytest.mark.exhaustive
def test_measured_peak_of_clipping_with_masters_is_predicted():
    """The last stage's second accumulators, in float32, are larger than its older version, in bfloat16, and cause its peak."""
    plan, options = Plan.even(LINEAR.ids, 3, "pipedream_2bw", MICROBATCHES), {"precision": MASTERS}
    measured, predicted = measured_and_predicted(plan, LINEAR, clip_global_norm=1.0, **options)
    np.testing.assert_allclose(measured, predicted, atol=64)
    batch = np.ones((ROWS * MICROBATCHES, 5), np.float32), np.ones((ROWS * MICROBATCHES, WIDTH), np.float32)
    costs = Pipeline(LINEAR, plan, squares, MOMENTUM, **options).costs(batch)
    without = simulate(lower(plan, 5), costs).held_bytes
    assert predicted[-1] - without[-1] == costs[-1].accumulators - costs[-1].weights > 0


@pytest.mark.slow
def test_the_stash_with_masters_takes_half():
    """The bytes are those of the weight versions on each device at their peak; the simulator predicts the same."""
    batch, stash_bytes = (np.ones((ROWS, 5), np.float32), np.ones((ROWS, WIDTH), np.float32)), {}
    plan = Plan.even(LINEAR.ids, 3, "pipedream", 1)
    for precision in (DEFAULT, MASTERS):
        pipe = Pipeline(LINEAR, plan, squares, optax.sgd(1e-2), jax.devices()[:3], precision=precision)
        most = [0, 0, 0]

        def observe(event, most=most):
            worker, versions = event.instruction.worker, jax.tree.leaves(event.state.weights)
            most[worker] = max(most[worker], sum(leaf.nbytes for leaf in versions))

        state = pipe.init(jax.random.key(0), batch)
        for _ in range(3):
            state, _ = pipe.step(state, batch, observe=observe)
        pipe.drain(state, observe=observe)
        predicted = simulate(lower(plan, 3), pipe.costs(batch))
        assert most == [alive * cost.weights for alive, cost in zip(predicted.versions_alive, pipe.costs(batch), strict=True)]
        stash_bytes[precision] = most
    assert [2 * size for size in stash_bytes[MASTERS]] == stash_bytes[DEFAULT]
