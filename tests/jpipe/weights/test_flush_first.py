"""A warm-up without staleness: the first batches are flushed, then the schedule runs as from fresh weights."""

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe import InputError, Pipeline, Plan, lower, simulate
from jpipe.capabilities.registry import uses_of
from jpipe.plan import excluded
from jpipe.programs._instructions import shifted
from jpipe.programs._steps import Steps
from jpipe.schedules import SCHEDULES
from tests.jpipe import models
from tests.jpipe.running import check_against_reference, check_equal, fresh, train

STACK = models.rich_stack()
FREE = {name: fields for name, fields in models.VARIANTS.items() if not SCHEDULES[fields["schedule"]].flushes}


@st.composite
def plans(draw) -> dict:
    """Draw the fields of a plan whose schedule does not flush, with or without replicas, and its `flush_first`."""
    fields = dict(FREE[draw(st.sampled_from(sorted(FREE)))])
    depth, r = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2]))
    replicas = draw(st.lists(st.sampled_from([1, r]), min_size=depth, max_size=depth))
    m = r * draw(st.integers(depth + 1, 2 * depth + 1))
    fields |= {"layers": "abcd", "num_stages": depth, "replicas": tuple(replicas), "microbatches": m}
    return fields | {"flush_first": draw(st.integers(0, 3))}


@settings(deadline=None, max_examples=12)
@given(fields=plans(), start=st.integers(0, 4), batches=st.integers(1, 5), norm=st.booleans())
def test_programs_are_verified_and_those_of_the_steps_are_the_same_run(fields, start, batches, norm):
    plan, end = Plan.even(**fields), start + batches
    norm = norm and not excluded(plan, skip_nonfinite=True)
    whole = lower(plan, end, begin=start, start=start, global_norm=norm)
    for span in (span for spans in simulate(whole).timeline for span in spans):
        batch = span.microbatch // plan.microbatches
        assert batch >= plan.flush_first or span.version == batch
    steps, joined, empty = Steps(plan, uses_of(global_norm=norm)), [], start
    for batch in range(start, end + 1):
        program, shift = steps.program(batch - empty, batch, drain=batch == end)
        joined += [shifted(i, plan, shift) for i in program.instructions]
        empty = batch + 1 if batch < plan.flush_first else empty
    assert tuple(joined) == whole.instructions
    assert all(simulate(program) for program in steps.verified_runs)


@settings(deadline=None, max_examples=10)
@given(fields=plans(), batches=st.integers(1, 5), norm=st.booleans())
def test_the_program_after_the_warm_up_equals_the_start_of_a_run(fields, batches, norm):
    """The instructions after the warm-up are those of a run without one, shifted by the batches of the warm-up."""
    plan = Plan.even(**fields)
    norm, first = norm and not excluded(plan, skip_nonfinite=True), plan.flush_first
    without = lower(plan.model_copy(update={"flush_first": 0}), batches, global_norm=norm)
    remaining = lower(plan, first + batches, begin=first, start=0, global_norm=norm)
    assert [i for i in remaining.instructions if i.worker == 0] == [shifted(i, plan, first) for i in without.instructions if i.worker == 0]
    alone = lower(plan, first + batches, begin=first, start=first, global_norm=norm)
    assert list(alone.instructions) == [shifted(i, plan, first) for i in without.instructions]


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("clip", [None, 3.0])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1)])
@pytest.mark.parametrize("variant", FREE)
@pytest.mark.parametrize("first", [1, 4])
def test_equals_the_sequential_reference_bit_for_bit(variant, first, replicas, clip):
    plan = Plan.even(STACK.ids, len(replicas), microbatches=4, replicas=replicas, flush_first=first, **FREE[variant])
    options = {} if clip is None or excluded(plan, skip_nonfinite=True) else {"clip_global_norm": clip}
    check_against_reference(STACK, plan, {0, 5}, **options)


def test_the_warm_up_is_training_with_a_flush():
    plan = Plan.even(STACK.ids, 3, "pipedream_2bw", 3, flush_first=4)
    batches = models.masked_batches(4, 3)
    results = [train(Pipeline(STACK, p, models.masked_squares, models.momentum()), batches) for p in (plan, flushing(plan))]
    check_equal(results[0], results[1])


def flushing(plan: Plan) -> Plan:
    return Plan(schedule="pipedream_flush", microbatches=plan.microbatches, stages=plan.stages)


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("variant", ["pipedream_2bw", "pipedream_vertical_sync"])
def test_an_evaluation_reads_the_version_of_a_run_without_a_warm_up(variant, norm):
    """The versions are compared for each batch, above all the first ones after the warm-up."""
    fields, first = FREE[variant], 3
    m = 4 if variant == "pipedream_2bw" else 1
    batches, versions = models.masked_batches(8, m), {}
    for warm in (0, first):
        plan = Plan.even(STACK.ids, 4, microbatches=m, flush_first=warm, **fields)
        pipe = Pipeline(STACK, plan, models.masked_squares, models.momentum(), skip_nonfinite=norm)
        state = fresh(pipe, batches)
        for t, batch in enumerate(batches):
            state, _ = pipe.step(state, batch)
            versions[warm, t] = pipe.evaluate(state, batch).version
    assert [versions[first, t] for t in range(first)] == [1, 2, 3]
    assert [versions[first, t] - first for t in range(first, 8)] == [versions[0, t] for t in range(8 - first)]


@pytest.mark.parametrize("cut", [1, 3])
def test_a_run_restored_during_or_after_the_warm_up_has_equal_results(cut):
    plan = Plan.even(STACK.ids, 2, "pipedream_2bw", 2, flush_first=2)
    pipe, batches = Pipeline(STACK, plan, models.masked_squares, models.momentum()), models.masked_batches(6, 2)
    state, snapshot = fresh(pipe, batches), None
    for t, batch in enumerate(batches):
        snapshot = pipe.snapshot(cut) if t == cut - 1 else snapshot
        state, _ = pipe.step(state, batch, observe=snapshot)
    state, expected = pipe.drain(state), snapshot
    restored = pipe.restore(jax.random.key(11), batches[0], expected.layers(), cut)
    actual = train(pipe, batches[cut:], restored)
    check_equal(actual.params, pipe.params(state))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "gpipe", "flush_first": 1}, "flush_first: this is an option of the schedules 'pipedream', 'pipedream_2bw', found"),
        ({"schedule": "pipedream_2bw", "flush_first": -1}, "plan: flush_first: expected 0 or more|greater than or equal to 0"),
        (
            {"schedule": "pipedream", "flush_first": 1, "update_every": "replicas", "replicas": 2},
            "flush_first: expected update_every 'batch', found 'replicas': a flush ends a batch .*; change one of them",
        ),
    ],
)
def test_an_impossible_warm_up_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        Plan.even("ab", 2, microbatches=4, **fields)
