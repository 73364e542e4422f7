"""Steps that are slower than predicted, and the part that is to blame. All times are made up."""

import dataclasses
import functools
import itertools
import types
from unittest.mock import NonCallableMock

import numpy as np
import pytest

import jpipe
from jpipe_train.data.rows import BatchesOfRows, Rows
from jpipe_train.report.performance import watch as watch_module
from jpipe_train.report.performance.measure import Measure
from jpipe_train.report.performance.watch import Expected, Step, Watch, find_expected, judge, stragglers
from jpipe_train.run import loop
from tests.train.conftest import changed

COSTS = [jpipe.programs.StageCost(forward=0.01, backward=0.02, update=0.003, outputs=1000, gradient=1000) for _ in range(3)]
FAST = jpipe.Link(bandwidth=1e9)


def plan_of(replicas=1, predicted=None):
    plan = jpipe.Plan.even("abc", num_stages=3, schedule="pipedream_2bw", microbatches=3 * replicas, replicas=replicas)
    if predicted is None:
        return plan
    sizes = {"peak_bytes": [1, 1, 1], "stage_seconds": [0.03, 0.03, 0.03]}
    return plan.model_copy(update={"predicted": jpipe.plan.Predicted(batch_seconds=predicted, bubble=0.0, **sizes)})


def window_of(plan, slow=None, link=FAST):
    """Return a window of a simulated run in which the computations of some ranks take longer."""
    slow = slow or {}
    run = jpipe.simulate(jpipe.lower(plan, batches=6), COSTS, link, "transfers and sums")
    window = jpipe.programs.extract_window(run.timeline, run.memory, plan.microbatches, 2, 3, run.transfers)
    rows = [
        tuple(span._replace(end=span.start + slow.get(rank, 1.0) * (span.end - span.start)) for span in row)
        for rank, row in enumerate(window.timeline)
    ]
    return dataclasses.replace(window, timeline=tuple(rows))


def steps_of(seconds, data=0.0, late=0.0):
    return [Step(seconds, data, late)] * 40


@pytest.mark.parametrize("planned", [False, True])
def test_the_stage_whose_computations_take_longer_is_the_cause(planned):
    plan = plan_of(predicted=0.1 if planned else None)
    first = window_of(plan)
    expected = find_expected(plan, first)
    assert expected.planned == planned
    verdict = judge(plan, expected, steps_of(1.6 * expected.seconds), window_of(plan, {1: 1.6, 2: 1.1}), [0, 1, 2])
    assert verdict.part == "stage 1 on rank 1 (process 1)"
    than = "planned" if planned else "at first"
    assert f"its computations take 48 ms a microbatch, 30 ms {than}; straggler: rank 1 (process 1) (1.60 times as long)" in verdict.words


def test_a_replica_that_is_slow_is_named_without_a_time_for_its_stage():
    plan = plan_of(replicas=2)
    expected = Expected(True, window_of(plan).step_seconds)
    verdict = judge(plan, expected, steps_of(1.5 * expected.seconds), window_of(plan, {3: 2.0}))
    stage = plan.workers[plan.rank_workers[3][0]][0]
    assert verdict.part == f"stage {stage} on rank 3"
    assert "60 ms a microbatch, 30 ms on its other ranks; straggler: rank 3 (2.00 times" in verdict.words


def test_stragglers_take_a_quarter_longer_than_the_median_of_the_replicas_or_than_expected():
    plan = plan_of(replicas=3)
    assert stragglers(plan, Expected(True, 1.0), window_of(plan, {4: 1.3, 8: 1.2})) == pytest.approx({4: 1.3})
    plan = plan_of()
    assert stragglers(plan, find_expected(plan, window_of(plan)), window_of(plan, {0: 1.2, 2: 1.4})) == pytest.approx({2: 1.4})
    assert stragglers(plan, Expected(True, 1.0), window_of(plan, {2: 1.4})) == {}  # nothing says how long it should take


def test_a_link_for_which_ranks_wait_is_the_cause():
    plan = plan_of()
    expected = find_expected(plan, window_of(plan))

    def link(one, other):
        return jpipe.Link(bandwidth=1000 / 0.3) if {one, other} == {1, 2} else FAST

    slow = window_of(plan, link=link)
    verdict = judge(plan, expected, steps_of(slow.step_seconds), slow)
    assert verdict.part in ("messages from rank 1 to rank 2", "messages from rank 2 to rank 1")
    assert "a rank waits" in verdict.words
    assert "straggler" not in verdict.words


def test_sums_for_which_ranks_wait_are_the_cause():
    plan = jpipe.Plan.even("a", num_stages=1, schedule="pipedream_flush", microbatches=2, replicas=2)
    costs = [jpipe.programs.StageCost(forward=0.01, backward=0.02, update=0.003, accumulators=1000)]
    window, slow = (
        jpipe.programs.extract_window(run.timeline, run.memory, 2, 2, 3, run.transfers)
        for run in (jpipe.simulate(jpipe.lower(plan, batches=6), costs, jpipe.Link(bandwidth)) for bandwidth in (1e9, 1000 / 0.1))
    )
    verdict = judge(plan, find_expected(plan, window), steps_of(2 * window.step_seconds), slow)
    assert verdict.part == "sums over rank 0, rank 1"


def test_data_that_takes_longer_than_a_step_is_the_cause():
    plan = plan_of()
    window = window_of(plan)
    expected = find_expected(plan, window)
    late = steps_of(2.0 * expected.seconds, 1.9 * expected.seconds, 0.9 * expected.seconds)
    assert judge(plan, expected, late, window).part == "the data"
    assert judge(plan, expected, late, None).part == "the data"
    rare = [Step(expected.seconds)] * 36 + [Step(11 * expected.seconds, 11 * expected.seconds, 10 * expected.seconds)] * 5
    assert judge(plan, expected, rare, window).part == "the data"
    slow_stage = judge(plan, expected, steps_of(1.6 * expected.seconds, 0.9 * expected.seconds), window_of(plan, {0: 1.6}))
    assert slow_stage.part == "stage 0 on rank 0"  # loading goes on beside the computations


def test_data_of_another_process_that_takes_longer_than_a_step_is_the_cause():
    plan = plan_of()
    window = window_of(plan)
    expected = find_expected(plan, window)
    waits = [0.1 * expected.seconds, 1.8 * expected.seconds, 0.0]
    verdict = judge(plan, expected, steps_of(1.9 * expected.seconds), window, [0, 1, 2], data_waits=waits)
    assert verdict.part == "the data in process 1"
    late = steps_of(2.0 * expected.seconds, 1.9 * expected.seconds, 0.9 * expected.seconds)
    assert judge(plan, expected, late, window, [0, 1, 2], data_waits=[1.9 * expected.seconds, 0.0, 0.0]).part == "the data in process 0"
    hidden = [0.0, 0.9 * expected.seconds, 0.0]  # behind the step before
    assert judge(plan, expected, steps_of(1.6 * expected.seconds), window, [0, 1, 2], data_waits=hidden).part == "the host"


def test_a_process_that_does_not_judge_counts_its_data_during_traces():
    rows, read = Rows((4,), np.dtype("int32"), lambda start, stop: np.arange(start, stop)), []
    run = Run(plan_of())
    watch = Watch(run.pipe, run.measure, None, 0, can_trace=True, clock=itertools.count().__next__)
    for tracing in (False, True):
        run.measure.is_tracing = tracing
        read.append(watch.load([rows], 0)[:2])
        watch.finished(0, paused=False)
    assert [call.args for call in run.measure.waited.call_args_list] == [(1,), (2,)]  # the rows are read, too
    assert [list(part) for part in read] == [[0, 1], [0, 1]]


def test_the_host_is_the_cause_when_nothing_else_explains_slow_steps():
    plan = plan_of()
    window = window_of(plan)
    expected = find_expected(plan, window)
    verdict = judge(plan, expected, steps_of(1.5 * expected.seconds), window)
    assert verdict.part == "the host"
    assert judge(plan, expected, steps_of(1.5 * expected.seconds), None).part == "an unknown part"


def test_noise_around_the_prediction_and_one_long_pause_are_not_slowness():
    plan = plan_of()
    window = window_of(plan, {1: 1.6})
    expected = Expected(True, 1.0)
    assert judge(plan, expected, [Step(1.0 + 0.2 * (-1) ** n) for n in range(60)], window) is None
    assert judge(plan, expected, steps_of(1.2), window) is None
    assert judge(plan, expected, [*[Step(1.0)] * 40, Step(1000.0)], window) is None


class Run:
    """A run with a clock of its own, of steps as long as a test says."""

    def __init__(self, plan, can_trace=True):
        self.now, self.step, self.lines, self.plan, self.tracing = 0.0, 0, [], plan, 0
        self.traced: list[int] = []
        self.measure = NonCallableMock(spec=Measure, measured=None, is_tracing=False, data_waits=())
        places = [types.SimpleNamespace(process_index=0, devices=(n,)) for n in range(len(plan.rank_workers))]
        self.pipe = NonCallableMock(spec=jpipe.Pipeline, plan=plan, places=[places[plan.rank_of[w]] for w in range(len(plan.workers))])
        self.watch = Watch(self.pipe, self.measure, self.lines.append, 0, can_trace, lambda: self.now)

    def __len__(self):
        return 10**6

    def __getitem__(self, step):
        self.now += self.data
        return step

    def go(self, steps, seconds, data=0.0, paused=False, window=None):
        """Run steps; a requested window takes three of them."""
        for _ in range(steps):
            if self.tracing == 0 and self.watch.wants_trace():
                self.tracing = 4
                self.traced.append(self.now)
            self.tracing = max(self.tracing - 1, 0)
            if self.measure.is_tracing and not self.tracing:
                self.measure.measured = dataclasses.replace(window)
            self.measure.is_tracing = self.tracing > 0
            self.data = data
            assert self.watch.load(self, self.step) == self.step
            self.now += seconds - data
            self.watch.finished(self.step, paused=paused)
            self.step += 1


def test_a_slow_minute_is_traced_and_reported_once():
    plan = plan_of(predicted=1.0)
    run = Run(plan)
    run.go(100, 1.1)
    assert (run.traced, run.lines) == ([], [])
    run.go(20, 2.0)
    assert (run.traced, run.lines) == ([], [])  # not a minute yet
    run.go(30, 2.0, window=window_of(plan, {1: 9.0}))
    assert len(run.traced) == len(run.lines) == 1
    assert "slow for a minute: " in run.lines[0]
    assert "the cause is stage 1 on rank 1" in run.lines[0]
    run.go(1000, 2.0, window=window_of(plan, {1: 9.0}))
    assert len(run.lines) == 1  # the same part
    assert len(run.traced) <= 1 + 2000 // 600
    run.go(700, 2.0, window=window_of(plan, {2: 9.0}))
    assert len(run.lines) == 2
    assert "stage 2 on rank 2" in run.lines[1]
    assert run.watch.remarks == {"slow steps": "; ".join(run.lines)}


@pytest.mark.parametrize("seconds", [0.01, 1.0, 20.0])
def test_a_run_that_is_slow_from_its_start_is_reported_after_a_minute(seconds):
    run = Run(plan_of(predicted=seconds / 1.4), can_trace=False)
    while not run.watch._steps:
        run.go(1, seconds)
    began = run.now - seconds
    while not run.lines and run.now < began + 200:
        run.go(1, seconds)
    assert 59.9 <= run.now - began <= 75


@pytest.mark.parametrize("before", [0, 20])
def test_a_short_slowness_is_not_reported(before):
    run = Run(plan_of(predicted=1.0))
    run.go(6, 1.0, paused=True)
    run.go(before, 1.0)
    run.go(6, 3.0)
    assert run.watch._exceeds
    run.go(200, 1.0)
    assert (run.traced, run.lines) == ([], [])


def test_one_or_two_steps_of_a_minute_are_too_few_to_judge():
    run = Run(plan_of(predicted=1.0), can_trace=False)
    run.go(6, 1.0, paused=True)
    run.go(3, 61.0)  # the first does not count, because it follows a pause
    assert (len(run.watch._steps), run.lines) == (2, [])
    run.go(1, 61.0)
    assert len(run.lines) == 1


@pytest.mark.slow
def test_a_minute_of_many_short_steps_is_few_entries_with_the_same_verdict():
    run = Run(plan_of(predicted=0.0005), can_trace=False)
    run.go(130_000, 0.001)  # over two minutes, of which one is kept
    assert len(run.lines) == 1
    assert "1 ms a step, 500 µs planned" in run.lines[0]
    entries = run.watch._steps
    assert len(entries) < 1000
    assert sum(step.number for step in entries) == pytest.approx(60_000, rel=0.01)
    run.go(300, 0.25)
    assert [step.number for step in entries] == [1] * len(entries)  # longer ones stay alone
    assert run.watch._seconds == pytest.approx(sum(step.seconds for step in entries))
    assert run.watch._count == len(entries) == pytest.approx(60 / 0.25, abs=1)


def test_steps_before_anything_is_expected_are_not_kept():
    run = Run(plan_of())
    run.go(100, 0.001)
    assert not run.watch._steps
    run.measure.measured = window_of(run.plan)
    run.go(100, 0.25)
    assert 90 < len(run.watch._steps) <= 100


@pytest.mark.slow
def test_rare_late_batches_of_short_steps_are_the_cause():
    run = Run(plan_of(predicted=0.001), can_trace=False)
    for _ in range(8000):
        run.go(9, 0.001)
        run.go(1, 0.011, data=0.011)
    assert "the cause is the data" in run.lines[0]


def test_parts_that_change_are_reported_every_ten_minutes_at_most():
    run = Run(plan_of(predicted=1.0))
    windows, times = [window_of(run.plan, {n: 9.0}) for n in range(3)], []
    for n in range(600):
        run.go(5, 2.0, window=windows[n % 3])
        times += [run.now] * (len(run.lines) - len(times))
    assert len(times) > 2
    assert all(after - before >= watch_module.PAUSE for before, after in itertools.pairwise(times))


def test_a_window_that_does_not_come_is_asked_for_once_a_minute():
    run = Run(plan_of(predicted=1.0))
    asked = []
    for _ in range(200):
        if run.watch.wants_trace():
            asked.append(run.now)
            run.measure.is_tracing = True  # a trace that is dropped again
        run.now += 2.0
        run.watch.finished(run.step, paused=False)
        run.measure.is_tracing = False
        run.step += 1
    assert asked
    assert all(after - before >= watch_module.MINUTE for before, after in itertools.pairwise(asked))
    assert run.lines == []


def test_first_steps_and_pauses_do_not_count():
    run = Run(plan_of(predicted=1.0))
    run.go(4, 100.0)  # they compile
    for _ in range(100):
        run.go(3, 1.0)
        run.go(1, 20.0, paused=True)  # an evaluation or a snapshot
        run.go(1, 20.0)  # which this step waits for
    assert (run.traced, run.lines) == ([], [])


def test_without_a_plan_steps_are_compared_with_the_first_window_and_without_traces_with_nothing():
    run = Run(plan_of())
    run.go(20, 0.1)
    assert run.traced == []
    run.measure.measured = window_of(run.plan)  # a step of some 0.2 s
    run.go(60, 3.0, data=2.9, window=window_of(run.plan))
    assert len(run.traced) == 1
    assert "at first; the cause is the data" in run.lines[0]
    assert Run(plan_of(), can_trace=False).go(200, 3.0) is None
    untraced = Run(plan_of(predicted=1.0), can_trace=False)
    untraced.go(80, 2.0)
    assert untraced.traced == []
    assert "the cause is an unknown part" in untraced.lines[0]


@pytest.mark.parametrize("name", ["__getitem__", "_element"])  # a batch that is slow to make, and one whose rows are slow to read
def test_a_run_with_slow_data_says_so(name, tiny, monkeypatch, capsys):
    clock, remarks = [0.0], []
    read = getattr(BatchesOfRows, name)
    rows = 1 if name == "__getitem__" else tiny["train"]["batch_size"]

    def slow(self, index):
        clock[0] += 25.0 / rows if index > 6 * rows else 0.001
        return read(self, index)

    monkeypatch.setattr(BatchesOfRows, name, slow)
    monkeypatch.setattr(loop, "Watch", functools.partial(Watch, clock=lambda: clock[0]))
    monkeypatch.setattr(loop, "write_report", lambda *arguments: remarks.append(arguments[-1]))
    summary = loop.main(changed(tiny, train={"steps": 24, "eval_every": 50}))
    line = next(line for line in capsys.readouterr().out.splitlines() if "slow for a minute" in line)
    assert "the cause is the data: the loop waits 25 s a step for the next batch" in line
    assert remarks == [summary.remarks] == [{"slow steps": line}]
