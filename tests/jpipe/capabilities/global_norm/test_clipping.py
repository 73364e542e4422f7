"""Clipping by the global norm is exact for every cut and schedule, and refused where the norm comes too late."""

import dataclasses
import functools
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe import InputError, Layer, LayerStack, Link, Pipeline, Plan, lower, simulate
from jpipe.capabilities.global_norm.program import SumSquares
from jpipe.programs import ProgramError, StageCost, predict_window
from jpipe.programs._instructions import Update
from tests.jpipe import models
from tests.jpipe.running import check_against_reference, check_close, check_equal, train, train_as_one_function

STACK = models.rich_stack()
M = 3
FLUSHING = ["naive", "gpipe", "pipedream_flush"]
CLIPPING = [*FLUSHING, "pipedream_2bw", "pipedream_vertical_sync"]
NORM = 3.0  # clips some batches of this model, not all


def pipeline(sizes, schedule, optimizer):
    plan = models.cut(STACK.ids, sizes, microbatches=M, **models.VARIANTS[schedule])
    return Pipeline(STACK, plan, models.masked_squares, optimizer, clip_global_norm=NORM)


def norms_of(pipe, batches):
    state, norms = pipe.init(jax.random.key(11), batches[0]), {}
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        norms |= metrics.norms
    return norms | pipe.drain(state, with_metrics=True)[1].norms


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.oldest
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("schedule", CLIPPING)
@pytest.mark.parametrize(
    "inner", [functools.cache(lambda: optax.sgd(0.3, momentum=0.9)), functools.cache(lambda: optax.adam(0.05))], ids=["momentum", "adam"]
)
def test_equals_optax_on_the_whole_tree(schedule, inner):
    batches = models.masked_batches(6, M, dtype=np.float64)
    norms = norms_of(pipeline((1, 2, 1), schedule, inner()), batches)
    assert sorted(norms) == list(range(6))
    assert min(norms.values()) < NORM < max(norms.values())  # else this would test half of it
    pipe = pipeline((1, 2, 1), schedule, inner())
    check_close(train(pipe, batches), train_as_one_function(pipe, batches))


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("drain_after", [set(), {2, 5}], ids=["", "drained"])
@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        ((1, 2, 1), {"schedule": "gpipe", "microbatches": 3}),
        ((2, 2), {"schedule": "pipedream_2bw", "microbatches": 2}),
        ((1, 2, 1), {"schedule": "pipedream_2bw", "microbatches": 3}),
        ((1, 1, 1, 1), {"schedule": "pipedream_2bw", "microbatches": 5}),
        ((2, 1, 1), {"schedule": "pipedream_2bw", "microbatches": 6, "extra_in_flight": 1}),
        ((1, 3), {"schedule": "pipedream_2bw", "microbatches": 4, "replicas": (2, 1)}),
        ((3, 1), {"schedule": "pipedream_2bw", "microbatches": 4, "replicas": (1, 2)}),
        ((2, 2), {"schedule": "pipedream_2bw", "microbatches": 8, "replicas": (2, 2)}),
        ((1, 1, 2), {"schedule": "pipedream", "vertical_sync": True, "microbatches": 1}),
        ((1, 1, 1, 1), {"schedule": "pipedream", "vertical_sync": True, "microbatches": 3}),
        ((1, 2, 1), {"schedule": "pipedream", "vertical_sync": True, "microbatches": 5}),
        ((2, 2), {"schedule": "pipedream", "vertical_sync": True, "microbatches": 4, "replicas": (2, 2)}),
        ((2, 2), {"schedule": "pipedream", "vertical_sync": True, "microbatches": 2, "replicas": (1, 2)}),
        ((2, 2), {"schedule": "pipedream", "vertical_sync": True, "microbatches": 2, "replicas": (2, 1)}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_equals_the_sequential_reference_bit_for_bit(sizes, fields, drain_after):
    replicas = fields.get("replicas", (1,) * len(sizes))
    ends = itertools.accumulate(sizes)
    stages = [{"layers": STACK.ids[end - size : end], "replicas": count} for size, end, count in zip(sizes, ends, replicas, strict=True)]
    plan = Plan(stages=stages, **{name: value for name, value in fields.items() if name != "replicas"})
    check_against_reference(STACK, plan, drain_after, clip_global_norm=NORM)


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("schedule", CLIPPING)
@pytest.mark.parametrize("sizes", [(1, 3), (2, 2), (1, 2, 1)])
def test_the_cut_changes_no_bit_of_the_norm(sizes, schedule):
    """The norm of the first batch is compared; later ones depend on the rounding of each stage's program."""
    batches = models.masked_batches(1, M)
    expected = norms_of(pipeline((4,), "pipedream_flush", models.momentum()), batches)
    check_equal(norms_of(pipeline(sizes, schedule, models.momentum()), batches), expected)


def nan_gradient() -> Layer:
    """Return an identity layer with a parameter that does not change its output and whose gradient is NaN: that of 0·√p at 0."""
    return Layer(
        lambda key, x: ({"p": jnp.zeros((), x.dtype)}, {}), lambda params, state, x, key, train: (x + 0 * jnp.sqrt(params["p"]), state)
    )


@pytest.mark.parametrize("clip", [None, NORM])
def test_a_nan_norm_reaches_every_layer(clip):
    """As in optax, one layer's NaN reaches all layers through the norm."""
    stack = LayerStack({"first": models.dense(), "bad": nan_gradient(), "last": models.dense()})
    batch = models.batches_of(1, 2 * M)[0]
    pipe = Pipeline(
        stack, models.cut(stack.ids, (1, 1, 1), microbatches=M, schedule="gpipe"), models.squares, optax.sgd(0.1), clip_global_norm=clip
    )
    state, metrics = pipe.step(pipe.init(jax.random.key(0), batch), batch)
    are_nan = {layer_id: {bool(jnp.isnan(leaf).all()) for leaf in jax.tree.leaves(tree)} for layer_id, tree in pipe.params(state).items()}
    assert are_nan == {"first": {clip is not None}, "bad": {True}, "last": {clip is not None}}
    assert np.isfinite(metrics.losses[0])
    assert [np.isnan(norm) for norm in metrics.norms.values()] == [True] * (clip is not None)


@pytest.mark.thinned
@pytest.mark.parametrize("size", [3e2, 1e-4], ids=["squares_too_large_for_float16", "squares_too_small_for_float16"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_squares_of_short_floats_are_summed_in_float32(dtype, size):
    """The gradient of x·w is x, which NumPy squares in float64; neither short dtype holds these squares."""

    def scale() -> Layer:
        return Layer(
            lambda key, x: ({"w": jnp.ones(x.shape[-1:], dtype)}, {}),
            lambda params, state, x, key, train: (x * params["w"][None, :], state),
        )

    def plain_sum(y, labels):
        return y.astype(jnp.float32).sum(), jnp.float32(1.0)

    stack = LayerStack({"first": scale(), "second": scale()})
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 1), plain_sum, optax.sgd(1.0), clip_global_norm=size)
    x = (size * np.random.default_rng(0).uniform(0.5, 1.5, size=(1, 50))).astype(dtype)
    _, metrics = pipe.step(pipe.init(jax.random.key(0), (x, x)), (x, x))
    np.testing.assert_allclose(metrics.norms[0], np.sqrt(2 * np.square(x.astype(np.float64)).sum()), rtol=1e-6)


@pytest.mark.parametrize("schedule", FLUSHING)
def test_no_stage_updates_before_the_norm_arrives(schedule):
    plan = Plan.even("abcd", 4, schedule, M)
    prediction = simulate(lower(plan, 3, global_norm=True), [StageCost(update=1.0)] * 4)
    for batch in range(3):
        first = [span for span in prediction.timeline[0] if span.updates][batch]
        for spans in prediction.timeline:
            assert [span for span in spans if span.updates][batch].update_start >= first.end


def damaged(spoil):
    program = lower(Plan.even("abc", 3, "gpipe", 2), 2, global_norm=True)
    instructions = list(program.instructions)
    spoil(instructions)
    return dataclasses.replace(program, instructions=tuple(instructions))


def first(instructions, kind, worker):
    return next(i for i, x in enumerate(instructions) if isinstance(x, kind) and x.worker == worker)


@pytest.mark.parametrize("worker", [0, 1, 2])
@pytest.mark.parametrize("kind", [SumSquares, Update])
def test_a_program_without_its_sums_or_updates_is_refused(kind, worker):
    with pytest.raises(ProgramError):
        simulate(damaged(lambda instructions: instructions.pop(first(instructions, kind, worker))))


def test_a_program_that_updates_too_early_is_refused():
    def spoil(instructions):
        update = instructions.pop(first(instructions, Update, 2))
        instructions.insert(first(instructions, SumSquares, 2) + 1, update)

    with pytest.raises(ProgramError, match="norm of microbatch 1 used before it arrived"):
        simulate(damaged(spoil))


@st.composite
def plans_without_a_flush(draw) -> dict:
    """Draw the fields of a plan without replicas whose schedule does not flush and has the norm in time for the update."""
    depth, extra, more = draw(st.integers(1, 6)), draw(st.integers(0, 2)), draw(st.integers(0, 6))
    schedule = draw(st.sampled_from(["pipedream_2bw", "pipedream_vertical_sync"]))
    least = max(depth, (1 + extra) * (depth - 1)) if schedule == "pipedream_2bw" else 1
    return {"num_stages": depth, "microbatches": least + more, "extra_in_flight": extra, **models.VARIANTS[schedule]}


@settings(deadline=None, max_examples=30)
@given(fields=plans_without_a_flush(), batches=st.integers(1, 5), latency=st.sampled_from([0.0, 0.4]), seed=st.integers(0, 9))
@pytest.mark.slow
def test_no_worker_waits_for_the_norm_under_any_costs(fields, batches, latency, seed):
    """All computations read the same versions and start at the same times as without clipping."""
    plan, rng = Plan.even("abcdef", **fields), random.Random(seed)
    costs = [StageCost(forward=rng.uniform(0.1, 2), backward=rng.uniform(0.1, 4), outputs=3, gradient=3) for _ in plan.stages]
    rows = []
    for global_norm in (False, True):
        timeline = simulate(lower(plan, batches, global_norm=global_norm), costs, Link(5.0, latency)).timeline
        rows.append([[span[:5] for span in spans] for spans in timeline])
    assert rows[0] == rows[1]


@pytest.mark.parametrize("bandwidth", [4.0, 0.25])
@pytest.mark.parametrize("replicas", [(2, 2), (3, 3, 3), (2, 1), (1, 2, 1)])
def test_no_worker_waits_for_the_norm_behind_a_sum_over_replicas(replicas, bandwidth):
    """This holds in steady state, even if sums take longer than a forward and a backward."""
    plan = Plan.even("abc", len(replicas), "pipedream_2bw", 18, replicas=replicas)
    costs = [StageCost(accumulators=1)] * plan.depth
    seconds = [predict_window(plan, costs, 6, 3, global_norm=norm, link=Link(bandwidth=bandwidth)).seconds for norm in (False, True)]
    assert seconds[0] == pytest.approx(seconds[1])


@st.composite
def plans_with_replicas(draw) -> dict:
    """Draw plans like `plans_without_a_flush` but with replicas; with vertical sync, any allowed number of microbatches."""
    replicas = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4)))
    fields = draw(st.sampled_from([models.VARIANTS[name] for name in ("pipedream_2bw", "pipedream_vertical_sync")]))
    fields = fields | {"num_stages": len(replicas), "replicas": replicas, "extra_in_flight": draw(st.integers(0, 1))}
    least = 1 if fields["schedule"] == "pipedream" else 4 * len(replicas)
    return fields | {"microbatches": math.lcm(*replicas) * draw(st.integers(least, least + 3))}


@pytest.mark.slow
@settings(deadline=None, max_examples=5)
@given(fields=plans_with_replicas(), seed=st.integers(0, 9))
def test_replicas_start_as_without_the_norm_under_any_costs(fields, seed):
    """This holds in steady state if sums and messages take no time."""
    plan, rng = Plan.even("abcd", **fields), random.Random(seed)
    costs = [StageCost(forward=rng.uniform(0.1, 2), backward=rng.uniform(0.1, 4)) for _ in plan.stages]
    seconds = [predict_window(plan, costs, 8, 3, global_norm=norm).seconds for norm in (False, True)]
    assert seconds[0] == pytest.approx(seconds[1])


def test_the_norm_is_predicted_to_wait_for_the_sums_of_all_stages():
    """Only the last stage has replicas, whose sum takes long; the first stage's gradients are complete earlier."""
    plan = Plan.even("ab", 2, "gpipe", 2, replicas=(1, 2))
    costs = [StageCost(), StageCost(accumulators=100)]
    timeline = simulate(lower(plan, 1, global_norm=True), costs, Link(bandwidth=1.0)).timeline
    (update,) = [span for span in timeline[0] if span.updates]
    assert update.end < 10
    assert update.update_start > 100


@pytest.mark.parametrize("microbatches", [4, 5, 11])
def test_gradients_of_two_batches_are_held_never_of_three(microbatches):
    """The simulator counts them; the second accumulators replace the older version, which is released early."""
    plan = Plan.even("abcd", 4, "pipedream_2bw", microbatches)
    cost = StageCost(weights=1000, accumulators=1)
    plain, clipped = (simulate(lower(plan, 6, global_norm=norm), [cost] * 4) for norm in (False, True))
    assert set(plain.held_bytes) == {2001}
    assert set(clipped.held_bytes) == {2001}  # either two versions and one set, or one version and two sets
    aside = [sample.other for samples in clipped.memory for sample in samples]
    assert max(aside) == 1


STASHING = {"schedule": "pipedream", "microbatches": 2}


@pytest.mark.parametrize("option", [{"clip_global_norm": 1.0}, {"skip_nonfinite": True}])
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            STASHING,
            "expected no early updates .*under the schedule 'pipedream': .* before .*; use vertical_sync, 'pipedream_2bw' or a",
        ),
        (
            STASHING | {"vertical_sync": True, "replicas": (1, 1), "update_every": "replicas"},
            "expected plan.update_every 'batch'.*, found 'replicas'",
        ),
    ],
)
def test_weight_stashing_reports_why_it_has_no_norm(fields, why, option):
    with pytest.raises(InputError, match=f"{next(iter(option))}: {why}"):
        Pipeline(STACK, Plan.even(STACK.ids, 2, **fields), models.masked_squares, optax.sgd(0.1), **option)
    with pytest.raises(InputError, match=f"lower: global_norm: {why}"):
        lower(Plan.even(STACK.ids, 2, **fields), 2, global_norm=True)


@pytest.mark.parametrize("value", [True, False])
def test_what_no_capability_does_beside_a_plan_is_an_error(value):
    with pytest.raises(InputError, match="lower: global_nrom: unknown; did you mean 'global_norm'"):
        lower(Plan.even(STACK.ids, 2, "gpipe", 2), 2, global_nrom=value)


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), float("inf"), True])
def test_a_norm_to_clip_to_is_a_number_above_zero(norm):
    with pytest.raises(InputError, match="clip_global_norm: expected a finite number above 0, found"):
        Pipeline(STACK, Plan.even(STACK.ids, 2, "gpipe", 2), models.masked_squares, optax.sgd(0.1), clip_global_norm=norm)
