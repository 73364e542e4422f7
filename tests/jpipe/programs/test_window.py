"""A predicted window equals that of a run from its beginning; busy times in it are checked by hand."""

import pytest

from jpipe import Plan, lower, simulate
from jpipe.programs import Span, StageCost, batches_until_full, extract_window, predict_window
from tests.jpipe import models

M = 4
FIRST, BATCHES = 20, 3
# Whole and half numbers, so that times may be compared exactly. Stage 1 has the most work. Messages weigh nothing: the phase of the
# program decides whether one that arrives between two computations is counted with the first of them or the second.
UNBALANCED = [
    StageCost(forward=2.0, backward=3.0, update=1.0, residuals=3, weights=10, optimizer=20, accumulators=10),
    StageCost(forward=4.0, backward=7.0, update=2.0, residuals=5, weights=10, optimizer=20, accumulators=10),
    StageCost(forward=1.5, backward=3.0, update=3.0, residuals=2, weights=10, optimizer=20, accumulators=10),
]


def window_of(plan, costs, start, global_norm=False):
    """Extract the window from a simulated run whose pipeline is empty before the batch `start`."""
    run = simulate(lower(plan, FIRST + BATCHES + 1, begin=start, start=start, global_norm=global_norm), costs)
    return extract_window(run.timeline, run.memory, plan.microbatches, FIRST, BATCHES)


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_a_predicted_window_is_that_of_a_run_from_the_first_batch(variant):
    plan = Plan.even("abc", 3, microbatches=M, **models.VARIANTS[variant])
    assert predict_window(plan, UNBALANCED, FIRST, BATCHES) == window_of(plan, UNBALANCED, 0)


@pytest.mark.parametrize("variant", ["pipedream", "pipedream_vertical_sync", "pipedream_2bw"])
def test_a_window_at_the_start_of_a_run_differs_from_a_full_one(variant):
    """Otherwise the previous test could not distinguish them."""
    plan = Plan.even("abc", 3, microbatches=M, **models.VARIANTS[variant])
    assert batches_until_full(plan) > 1
    assert window_of(plan, UNBALANCED, FIRST).step_seconds < predict_window(plan, UNBALANCED, FIRST, BATCHES).step_seconds


def test_a_window_at_the_beginning_of_a_run_begins_with_an_empty_pipeline():
    plan = Plan.even("abc", 3, "pipedream_2bw", M)
    run = simulate(lower(plan, 3), UNBALANCED)
    assert predict_window(plan, UNBALANCED, 0, 2) == extract_window(run.timeline, run.memory, M, 0, 2)


def test_clipping_moves_the_updates_of_a_predicted_window():
    plan = Plan.even("abc", 3, "gpipe", M)
    clipped = predict_window(plan, UNBALANCED, FIRST, BATCHES, global_norm=True)
    assert clipped == window_of(plan, UNBALANCED, 0, global_norm=True)
    plain = predict_window(plan, UNBALANCED, FIRST, BATCHES)
    waits = [max(span.update_wait for span in window.timeline[2]) for window in (clipped, plain)]
    assert waits[0] > waits[1] == 0


@pytest.mark.parametrize("update", [0.0, 1.0, 6.0])
def test_updates_count_as_busy(update):
    """A batch of two equal stages under gpipe takes m + 1 forwards of 1, m + 1 backwards of 2 and an update; each stage idles for 3."""
    window = predict_window(Plan.even("ab", 2, "gpipe", M), [StageCost(update=update)] * 2, FIRST, BATCHES)
    assert window.step_seconds == 3 * (M + 1) + update
    assert window.bubble == pytest.approx(3 / window.step_seconds, abs=1e-12)


def test_an_update_that_a_window_cuts_counts_with_what_is_inside():
    """Worker 1 updates from 1 to 5; the windows begin at 0, 2 or 4 and end at 4 or 10."""
    worker_0 = tuple(Span("F", k, 0, start, start + 1.0) for k, start in enumerate((0.0, 2.0, 4.0, 10.0)))
    worker_1 = (Span("B", 0, 0, 0.0, 1.0, updates=True, update_time=4.0),)
    windows = {
        (first, batches): extract_window((worker_0, worker_1), ((), ()), 1, first, batches)
        for first, batches in ((0, 2), (1, 1), (1, 2), (2, 1))
    }
    busy = {at: (1 - window.bubble) * 2 * window.seconds for at, window in windows.items()}
    assert busy == pytest.approx({(0, 2): 2 + 4, (1, 1): 1 + 2, (1, 2): 2 + 3, (2, 1): 1 + 1})


def test_computations_whose_ends_a_busy_machine_recorded_together_are_cut_by_their_order():
    """The last backward, its update and the next forward have no length; rounding moves the end of the update past 0.3."""
    before = Span("B", 0, 0, 0.3, 0.3, updates=True, update_time=1e-16)
    late = Span("B", 0, 0, 0.1, 0.2, updates=True, update_time=0.2, update_wait=0.5, chunk=1)
    enters = (Span("F", 1, 1, 0.3, 0.3), Span("F", 2, 1, 0.4, 0.5), Span("F", 3, 1, 2.3, 2.4))
    window = extract_window(((late, before, *enters),), ((),), 1, 1, 2)
    assert [span[:3] for span in window.timeline[0]] == [("B", 0, 0), ("F", 1, 1), ("F", 2, 1)]
    assert [span.chunk for span in window.timeline[0]] == [1, 0, 0]  # its update is still to come
    assert window.bubble == pytest.approx(1 - (0.2 + 0.1) / 2)
