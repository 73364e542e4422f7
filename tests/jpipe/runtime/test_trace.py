"""The measurements of the tracer in a running pipeline."""

import gc
import itertools
import sys
import threading
from dataclasses import replace
from unittest.mock import NonCallableMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe import InputError, Pipeline, Plan, Tracer, lower, simulate
from jpipe.capabilities.global_norm.runtime import waits_for
from jpipe.ops import OPS
from jpipe.plan import Agreement
from jpipe.programs import StageCost, Window, extract_window
from jpipe.programs._instructions import Compute, Update
from jpipe.runtime import Event, fit_costs
from jpipe.runtime._trace import _Computation, _inputs, _waits_for
from tests.jpipe import models
from tests.jpipe.running import check_equal

M = 4
STACK = models.rich_stack()


def traced(variant, steps, devices=None, clip=None):
    """Run `steps` steps and return (plan, pipeline, batch, trace, final state)."""
    plan = Plan.even(STACK.ids, 3, microbatches=M, **models.VARIANTS[variant])
    pipe = Pipeline(STACK, plan, models.masked_squares, models.momentum(), devices, clip_global_norm=clip)
    batches = models.masked_batches(steps, M)
    state, tracer = pipe.init(jax.random.key(0), batches[0]), Tracer(plan)
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=tracer)
    state = pipe.drain(state, observe=tracer)
    return plan, pipe, batches[0], tracer.finish(), state


@pytest.mark.thinned(most=2)
@pytest.mark.oldest
@pytest.mark.parametrize("variant", models.VARIANTS)
def test_a_trace_has_the_order_of_the_schedule(variant):
    plan, pipe, batch, trace, _ = traced(variant, 5)
    prediction = simulate(lower(plan, 5), pipe.costs(batch))
    for actual, expected in zip(trace.timeline, prediction.timeline, strict=True):
        assert [(*span[:3], span.updates) for span in actual] == [(*span[:3], span.updates) for span in expected]
        ends = [time for span in actual for time in (span.start, span.end, span.update_start, span.update_end)]
        assert all(after - before > -1e-12 for before, after in itertools.pairwise(ends))  # nothing overlaps; those of updates are sums
    starts = {(s, *span[:2]): span.start for s, spans in enumerate(trace.timeline) for span in spans}
    ends = {(s, *span[:2]): span.end for s, spans in enumerate(trace.timeline) for span in spans}
    for (s, op, k), start in starts.items():
        if op == "B":
            before = max(ends.get((s + 1, after, k), 0.0) for after in ("B", "FB"))
        else:
            before = ends[s - 1, "F", k] if s > 0 else 0.0
        assert start >= before


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("variant", models.VARIANTS)
def test_measured_memory_is_the_predicted_one(variant):
    """Each kind of memory is compared after each computation of each worker; the order between workers does not matter."""
    plan, pipe, batch, trace, _ = traced(variant, 5)
    prediction = simulate(lower(plan, 5), pipe.costs(batch))
    for actual, expected in zip(trace.memory, prediction.memory, strict=True):
        for a, b in zip(actual, expected[1:], strict=True):  # but for the beginning, which a trace does not know
            assert (a.weights, a.optimizer, a.gradients) == (b.weights, b.optimizer, b.gradients)
            assert abs(a.residuals - b.residuals) <= 64
        assert [s.time for s in actual] == sorted(s.time for s in actual)


def test_memory_has_the_times_of_the_timeline_where_a_rank_is_recorded_late():
    plan = Plan.even(STACK.ids, 3, "gpipe", M)
    pipe = Pipeline(STACK, plan, models.masked_squares, models.momentum())
    (batch,) = models.masked_batches(1, M)
    may_go_on, tracer = threading.Event(), Tracer(plan)

    def late(event):
        done = NonCallableMock(devices=event.done.devices) if event.done is not None else None
        if done is not None:
            done.__class__ = type(event.done)
            done.block_until_ready.side_effect = lambda: may_go_on.wait() and event.done.block_until_ready()
        return event._replace(done=done)

    pipe.step(pipe.init(jax.random.key(0), batch), batch, observe=lambda e: tracer(late(e) if e.instruction.worker == 0 else e))
    for watcher in tracer._watchers[1:]:
        watcher.ends.stop()
    may_go_on.set()
    trace = tracer.finish()
    for spans, samples in zip(trace.timeline, trace.memory, strict=True):
        times = [time for span in spans for time in ([span.end, span.update_end] if span.updates else [span.end])]
        assert [sample.time for sample in samples] == pytest.approx(times, abs=1e-12)


@pytest.mark.slow
def test_tracing_changes_no_numbers():
    _, pipe, _, _, state = traced("pipedream_2bw", 4)
    traced_state = pipe.init(jax.random.key(0), models.masked_batches(4, M)[0])
    for batch in models.masked_batches(4, M):
        traced_state, _ = pipe.step(traced_state, batch)
    check_equal(pipe.params(pipe.drain(traced_state)), pipe.params(state))


@pytest.mark.slow
def test_nothing_is_counted_twice():
    """The memory that a trace reports for the workers is at most that of all live arrays."""
    plan, alive = Plan.even(STACK.ids, 3, "gpipe", M), []
    pipe = Pipeline(STACK, plan, models.masked_squares, models.momentum())
    batches = models.masked_batches(3, M)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    state, tracer = pipe.init(jax.random.key(0), batches[0]), Tracer(plan)

    def observe(event):
        tracer(event)
        if event.done is not None and event.instruction.worker == 0:
            alive.append(sum(array.nbytes for array in jax.live_arrays()) - before)

    for batch in batches:
        state, _ = pipe.step(state, batch, observe=observe)
    samples = tracer.finish().memory[0]
    assert len(samples) == len(alive)
    assert all(sample.total <= bytes_of_all for sample, bytes_of_all in zip(samples, alive, strict=True))


@pytest.mark.slow
def test_a_tracer_leaves_nothing_behind():
    before, threads = sys.getswitchinterval(), threading.active_count()
    plan = Plan.even("ab", 2, "gpipe", 1)
    first, second = Tracer(plan), Tracer(plan)
    assert sys.getswitchinterval() < before
    first.finish()
    second.finish()
    with pytest.raises(KeyError), Tracer(plan):
        raise KeyError
    assert (sys.getswitchinterval(), threading.active_count()) == (before, threads)


@pytest.mark.slow
def test_stages_that_share_a_device_take_turns():
    device = jax.devices()[0]
    _, _, _, trace, _ = traced("gpipe", 3, [device, device, jax.devices()[1]])
    spans = sorted((span.end, span.start) for spans in trace.timeline[:2] for span in spans)
    assert all(before[0] <= after[1] for before, after in itertools.pairwise(spans))


@pytest.mark.exhaustive
def test_an_update_that_clips_waits_for_the_first_stage():
    _, _, _, trace, _ = traced("gpipe", 3, clip=1.0)
    for batch in range(3):
        norm = [span for span in trace.timeline[0] if span.updates][batch].end
        assert all([span for span in spans if span.updates][batch].update_start >= norm for spans in trace.timeline)


@pytest.mark.slow
def test_finish_reports_a_computation_that_fails():
    plan, _, _, _, state = traced("gpipe", 1)
    tracer, failed = Tracer(plan), jnp.zeros(())
    failed.delete()  # waiting for it raises, as waiting for a computation does that ran out of memory
    tracer(Event(Compute("F", 0, 0, 0), failed, state.workers[0]))
    with pytest.raises(RuntimeError, match="deleted"):
        tracer.finish()


# Windows and costs ------------------------------------------------------------------------------------------------------


def run_of(schedule, costs, batches=8, **options):
    plan = Plan.even("abcd", 4, schedule, M)
    return simulate(lower(plan, batches, **options), costs)


def test_a_window_of_a_full_pipeline_has_no_bubble():
    prediction = run_of("pipedream_2bw", [StageCost(update=0.5)] * 4)
    window = extract_window(prediction.timeline, prediction.memory, M, 3, 2)
    assert (window.step_seconds, window.batches) == (M * 3 + 0.5, 2)
    assert abs(window.bubble) < 1e-12


def test_a_window_of_gpipe_has_the_bubble_of_the_paper():
    """Section 2.3 of GPipe: (d - 1) / (m + d - 1)."""
    prediction = run_of("gpipe", None)
    window = extract_window(prediction.timeline, prediction.memory, M, 2, 3)
    assert np.isclose(window.bubble, 3 / (M + 3))
    assert window.step_seconds == 3 * (M + 3)


def test_a_window_includes_memory_held_before_it():
    prediction = run_of("gpipe", [StageCost(weights=10, optimizer=20, accumulators=10, residuals=3, inputs=1)] * 4)
    window = extract_window(prediction.timeline, prediction.memory, M, 2, 2)
    assert all(samples[0].time == 0 and samples[0].optimizer == 20 for samples in window.memory)
    assert isinstance(window, Window)
    assert window.held_bytes[1] == 40 + 3 * M + 0  # all forwards done, no inputs waiting


def test_a_window_outside_of_the_run_is_refused():
    prediction = run_of("gpipe", None, batches=3)
    with pytest.raises(InputError, match="extract_window: expected a run that holds the batches 1 to 3, found no microbatch 12"):
        extract_window(prediction.timeline, prediction.memory, M, 1, 2)


def test_costs_fitted_to_a_timeline_give_that_timeline():
    costs = [StageCost(forward=1.0 + s, backward=2.5 + s, update=0.25 * s) for s in range(4)]
    guess = [StageCost(forward=4.0, backward=8.0, weights=7)] * 3 + [StageCost(forward=4.0, backward=22.0 / 4 * 4.0 / 4 * 1.0)]
    for schedule in ("gpipe", "pipedream_2bw"):
        prediction = run_of(schedule, costs)
        fitted = fit_costs(guess, prediction.timeline)
        unknown = [replace(cost, forward=0.0, backward=0.0) for cost in guess]  # in an earlier window each took less than the clock shows
        last = fit_costs(unknown, prediction.timeline)[-1]
        assert last.forward + last.backward == pytest.approx(costs[-1].forward + costs[-1].backward)
        assert [cost.weights for cost in fitted] == [7, 7, 7, 0]
        repeated = run_of(schedule, fitted)
        check_equal(
            jax.tree.map(jnp.float32, [s.end for s in repeated.timeline[0]]),
            jax.tree.map(jnp.float32, [s.end for s in prediction.timeline[0]]),
        )


def test_pipelines_that_agree_wait_for_each_other_only_to_read_what_they_have_agreed_on():
    plan = Plan.even("ab", 2, "gpipe", 4, replicas=2, agree={"every": 2})
    assert [_inputs((w, "U", 0, 0), plan) for w in range(4)] == [finish(w, 2 + w % 2) for w in range(4)]
    of_norm = waits_for(plan, [Update(3, 0, 0)])
    assert of_norm == {(3, "U", 0, 0): finish(1, 3)}, "the norm ends at the pipeline's first stage"
    program = [i for i in lower(plan, 3).instructions if isinstance(i, (Compute, Update))]
    ranks = [[_Computation(i, jax.devices()[0], 0.0, 0.0) for i in program if i.worker == w] for w in range(4)]
    updates = {key: [k for k in before if k[1] == "U"] for key, before in _waits_for(ranks, plan, ()).items()}
    for w in range(4):
        both = plan.stage_workers[w // 2]
        assert {(other, "U", 1, 0) for other in both} <= set(updates[w, "F", 8 + w % 2, 0])
        assert (both[1 - w % 2], "U", 0, 0) not in updates[w, "F", 4 + w % 2, 0], "no agreement yet"
    late = plan.model_copy(update={"agree": Agreement(every=2, delay=1)})
    program = [i for i in lower(late, 4).instructions if isinstance(i, (Compute, Update))]
    ranks = [[_Computation(i, jax.devices()[0], 0.0, 0.0) for i in program if i.worker == w] for w in range(4)]
    for (w, op, k, _), before in _waits_for(ranks, late, ()).items():
        others = {update for other, name, update, _ in before if name == "U" and other != w}
        assert others == ({1} if op == "F" and k // 4 == 3 and k % 4 < 2 else set()), "the first forward that reads version 3"


def finish(worker, microbatch):
    return [(worker, name, microbatch, 0) for name, op in OPS.items() if op.finishes]
