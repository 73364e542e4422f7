"""The contract of every schedule: the numbers of the sequential reference, bit for bit, at every depth and number of microbatches."""

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jpipe import Pipeline, Plan
from tests.jpipe import models, reference
from tests.jpipe.running import check_equal

pytestmark = pytest.mark.usefixtures("compiled_once")

STACK = models.rich_stack()
OPTIMIZER = models.momentum()
BATCHES = 9  # long enough for every schedule to run in its steady state for some batches

CASES = [
    (variant, d, m, 0)
    for variant, fields in models.VARIANTS.items()
    for d in range(1, len(STACK.ids) + 1)
    for m in (1, 2, 3, 4, 6)
    if models.is_legal(layers=STACK.ids, num_stages=d, microbatches=m, **fields)
] + [
    ("pipedream_flush", 3, 6, 1),
    ("pipedream_flush", 4, 3, 2),
    ("pipedream", 4, 1, 1),
    ("pipedream", 3, 3, 2),
    ("pipedream_vertical_sync", 3, 1, 1),
    ("pipedream_vertical_sync", 4, 2, 1),
    ("pipedream_2bw", 3, 4, 1),
    ("pipedream_2bw", 4, 6, 1),
]


def check_against_reference(plan: Plan, drain_after: set[int], stack=STACK) -> None:
    """Train through the pipeline twice, the second time with drains in the middle, and compare both with the reference."""
    pipe = Pipeline(stack, plan, models.masked_squares, OPTIMIZER)
    batches = models.masked_batches(BATCHES, plan.microbatches)
    fresh = pipe.init(jax.random.key(7), batches[0])
    expected = reference.train(pipe._functions(batches[0]), plan, models.on_first_device(fresh.workers), batches)
    for drains in (set(), drain_after):
        state, losses, weights = models.copied(fresh), {}, {}
        for t, batch in enumerate(batches):
            state, metrics = pipe.step(state, batch)
            losses, weights = losses | metrics.losses, weights | metrics.weights
            if t in drains:
                state = pipe.drain(state)
        state = pipe.drain(state)
        check_equal(losses, expected.losses)
        check_equal(weights, expected.weights)
        for s, worker in enumerate(state.workers):
            oldest = reference.version(plan, s, BATCHES * plan.microbatches)
            assert sorted(worker.versions) == list(range(oldest, BATCHES + 1)), f"stage {s} keeps what the next microbatches read, no more"
            check_equal(worker.versions, {v: expected.versions[s][v] for v in worker.versions})
            check_equal(worker.optimizer, expected.optimizer[s])
            check_equal(worker.layer_state, expected.layer_state[s])
            assert not worker.buffers, f"stage {s} is empty after a drain"


@pytest.mark.parametrize(("variant", "d", "m", "extra"), CASES)
def test_equals_the_sequential_reference_bit_for_bit(variant, d, m, extra):
    plan = Plan.even(STACK.ids, d, microbatches=m, extra_in_flight=extra, **models.VARIANTS[variant])
    check_against_reference(plan, drain_after={0, 3, 4})


@pytest.mark.parametrize("recompute", ["full", "dots_saveable"])
@pytest.mark.parametrize("variant", models.VARIANTS)
def test_recomputing_stages_equal_the_sequential_reference_bit_for_bit(variant, recompute):
    check_against_reference(Plan.even(STACK.ids, 3, microbatches=4, recompute=recompute, **models.VARIANTS[variant]), drain_after={2})


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_uneven_cuts_equal_the_sequential_reference_bit_for_bit(data):
    sizes, rest = [], len(STACK.ids)
    while rest:
        sizes.append(data.draw(st.integers(1, rest), label="layers"))
        rest -= sizes[-1]
    fields = models.VARIANTS[data.draw(st.sampled_from(sorted(models.VARIANTS)))]
    least = len(sizes) if fields["schedule"] == "pipedream_2bw" else 1
    m = data.draw(st.integers(least, 6), label="microbatches")
    drain_after = data.draw(st.sets(st.integers(0, BATCHES - 1), max_size=3), label="drain after")
    check_against_reference(models.cut(STACK.ids, sizes, microbatches=m, **fields), drain_after)


@pytest.mark.newest
@pytest.mark.parametrize("variant", models.VARIANTS)
def test_three_stages_equal_the_sequential_reference_bit_for_bit(variant):
    check_against_reference(Plan.even(STACK.ids, 3, microbatches=4, **models.VARIANTS[variant]), drain_after={4})
