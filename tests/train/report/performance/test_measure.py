"""The steps of a run that are measured."""

import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import NonCallableMock

import jax
import jax.numpy as jnp
import optax
import pytest

import jpipe
from jpipe_train.assemble import build
from jpipe_train.console.progress import Reporter
from jpipe_train.launch import gather
from jpipe_train.launch.team import Team
from jpipe_train.report.performance.measure import Measure
from jpipe_train.run import loop
from tests.train.conftest import changed


class NullTracer(jpipe.Tracer):
    """A tracer that measures nothing."""

    def __init__(self, plan):
        pass


def windows(monkeypatch, tiny, steps, every, batches, schedule="pipedream_2bw", requested=()):
    """Return (traced steps, first batch and number of batches) of each window."""
    pipe, _ = build.build(changed(tiny, plan={"schedule": schedule}), Reporter(1, 1, "tokens"))
    measure, result = Measure(pipe, (), steps, every, batches), []

    def finish():
        if measure._tracer is not None:
            result[-1] += ((measure._first, measure._batches),)
            measure._tracer, measure._window = None, (measure._first, measure._batches)

    monkeypatch.setattr(jpipe, "Tracer", NullTracer)
    monkeypatch.setattr(measure, "finish", finish)
    last = None
    for step in range(steps):
        if step in requested:
            measure.request(step)
        tracer = measure.observer(step)
        if tracer is not None and tracer is not last:
            result.append(([],))
        if tracer is not None:
            result[-1][0].append(step)
        last = tracer
    finish()
    return result


def test_windows_come_when_the_pipeline_is_full_and_after_evaluations(monkeypatch, tiny):
    assert windows(monkeypatch, tiny, steps=30, every=10, batches=3) == [
        ([2, 3, 4, 5, 6], (3, 3)),
        ([10, 11, 12, 13, 14], (11, 3)),
        ([20, 21, 22, 23, 24], (21, 3)),
    ]


def test_short_runs_have_short_windows(monkeypatch, tiny):
    assert windows(monkeypatch, tiny, steps=5, every=50, batches=3) == [([2, 3, 4], (3, 1))]
    assert windows(monkeypatch, tiny, steps=4, every=50, batches=3) == []


def test_no_evaluation_falls_into_a_window(monkeypatch, tiny):
    assert windows(monkeypatch, tiny, steps=14, every=6, batches=3) == [([2, 3, 4, 5], (3, 2)), ([6, 7, 8, 9, 10], (7, 3))]
    assert windows(monkeypatch, tiny, steps=20, every=3, batches=3)[0] == ([3, 4, 5], (4, 1))
    assert windows(monkeypatch, tiny, steps=20, every=2, batches=3) == []


def test_a_requested_window_has_no_evaluation(monkeypatch, tiny):
    regular = [([2, 3, 4, 5, 6], (3, 3)), ([20, 21, 22, 23, 24], (21, 3))]
    assert windows(monkeypatch, tiny, steps=30, every=20, batches=3, requested=[4, 9, 16, 18]) == [
        regular[0],
        ([9, 10, 11, 12, 13], (10, 3)),
        ([16, 17, 18, 19], (17, 2)),
        regular[1],
    ]


def test_a_prediction_that_would_take_minutes_is_left_out(tiny, monkeypatch):
    monkeypatch.setattr("jpipe_train.report.performance.measure.MOST_FORWARDS", 10)
    summary = loop.main(changed(tiny, train={"eval_every": 50}))
    assert summary.measured is not None
    assert summary.predicted is None


@pytest.mark.slow
def test_a_run_that_stops_leaves_no_tracer_open(tiny, monkeypatch):
    threads, interval = threading.active_count(), sys.getswitchinterval()

    def poisoned(self, step, name, value):
        if step == 3:
            raise loop.NonFiniteLoss("step 3: the loss is nan")
        return value

    monkeypatch.setattr(loop.MetricsLog, "_finite", poisoned)
    with pytest.raises(loop.NonFiniteLoss):
        loop.main(changed(tiny, train={"steps": 9, "eval_every": 50}))
    assert (threading.active_count(), sys.getswitchinterval()) == (threads, interval)


def test_nothing_is_measured_where_nothing_is_wanted(monkeypatch, tiny):
    assert windows(monkeypatch, tiny, steps=30, every=10, batches=0) == []


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.oldest
@pytest.mark.parametrize("schedule", sorted({*jpipe.schedules.SCHEDULES} - {"auto_zero_bubble"}))
def test_the_measured_window_is_the_predicted_one(tiny, schedule):
    summary = loop.main(changed(tiny, train={"steps": 9, "eval_every": 50}, plan={"schedule": schedule}))
    predicted, measured = summary.predicted, summary.measured
    assert predicted.batches == measured.batches == 3
    assert abs(predicted.bubble - measured.bubble) < 1  # both are shares; the devices of a busy machine may do anything
    assert predicted.timeline[0][0][:3] == measured.timeline[0][0][:3]  # the same computation enters
    for a, b in zip(predicted.memory, measured.memory, strict=True):
        assert {sample.optimizer for sample in a} == {sample.optimizer for sample in b}
        most = [max(sample.residuals for sample in samples) for samples in (a, b)]
        assert abs(most[0] - most[1]) <= 64


def test_traces_are_sent_bit_for_bit():
    spans = (
        jpipe.programs.Span("FB", 3, 2, 0.1, 0.25, True, 1e-9, 0.5),
        jpipe.programs.Span("F", 2**40, 0, -1.0, 1 / 3),
        jpipe.programs.Span("B", 0, 1, 3.0, 4.0, chunk=1, part=0),
        *(jpipe.programs.Span(op, 1, 0, 4.0, 5.0, chunk=2) for op in ("I", "W", "FI")),
    )
    samples = jpipe.programs.MemorySample(0.1, {3: 2**40, 4: 0}, 1, 2, 3, 4), jpipe.programs.MemorySample(0.2, {}, 5, 6, 7, 8)
    sent = jpipe.programs.Transfer("activation", (0, 3), 2**40, 0.1, 0.25, 0.5, 1e9)
    summed = jpipe.programs.Transfer("sum", (0, 1, 2), 0, -1.0, math.inf, math.inf, 0.0)
    trace = jpipe.runtime.Trace((spans, ()), ((), samples), (sent, summed))
    assert gather.decoded(gather.encoded(trace)) == trace
    unknown = jpipe.programs.Transfer("sum", (0,), 3, math.nan, 0.5, 1.0, 0.0)
    (received,) = gather.decoded(gather.encoded(jpipe.runtime.Trace((), (), (unknown,)))).transfers
    assert math.isnan(received.start)


class ThreadProcesses(jpipe.processes.Processes):
    """One of several processes that are threads; a message is stored until it is received."""

    def __init__(self, index, everyone):
        self.index, self.count, self.everyone, self.kept, self.changed = index, 3, everyone, {}, threading.Condition()
        everyone.append(self)

    def broadcast(self, name, data):
        for other in self.everyone:
            with other.changed:
                other.kept[name] = data
                other.changed.notify()

    def receive(self, name, on=None, what=None):
        with self.changed:
            assert self.changed.wait_for(lambda: name in self.kept, timeout=30)
            return self.kept.pop(name)


def test_process_0_gathers_all_traces_and_no_process_keeps_them():
    homes = (0, 2, 1)
    plan = jpipe.Plan.even("abcdef", 6, "zb_v", 6)
    stack = jpipe.LayerStack(dict.fromkeys(plan.layers, jnp.tanh))
    pipe = jpipe.Pipeline(stack, plan, lambda outputs, labels: (outputs.sum(), 1), optax.sgd(0.1))
    devices = [NonCallableMock(spec=jax.Device, process_index=homes[rank]) for rank in plan.rank_of]
    vars(pipe)["places"] = tuple(jpipe.meshes.Place((device,)) for device in devices)
    spans = [(jpipe.programs.Span("F", w, 0, 0.5, 1.0),) * w for w in range(3)]
    samples = [(jpipe.programs.MemorySample(0.25, {w: 8}, 1, 2, 3, w),) * 2 for w in range(3)]
    everyone: list[ThreadProcesses] = []
    processes = [ThreadProcesses(index, everyone) for index in range(3)]

    def of_process(rows, index):
        return tuple(row if home == index else () for row, home in zip(rows, homes, strict=True))

    def transfer(start, end):
        return jpipe.programs.Transfer("activation", (0, 1), 3, start, end, end, 8.0)

    def gathered(process):
        i, halves = process.index, ((), (transfer(math.nan, 2.0),), (transfer(1.0, math.nan),))
        return gather.gather(process, pipe, "a trace", jpipe.runtime.Trace(of_process(spans, i), of_process(samples, i), halves[i]))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(gathered, processes)) == [jpipe.runtime.Trace(tuple(spans), tuple(samples), (transfer(1.0, 2.0),)), None, None]
    assert [process.kept for process in processes] == [{}, {}, {}]


def test_each_process_gets_the_largest_number_of_all():
    everyone: list[ThreadProcesses] = []
    processes = [ThreadProcesses(index, everyone) for index in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda process: Team(process).largest("wait", 0.5 * process.index), processes)) == [1.0] * 3
    assert [process.kept for process in processes] == [{}, {}, {}]


def test_with_a_window_processes_share_how_long_they_waited_for_its_data(monkeypatch):
    shared = []

    def gather(name, data):
        shared.append((name, float(data)))
        return [b"0.0", data]

    monkeypatch.setattr(jpipe, "Tracer", NullTracer)
    monkeypatch.setattr(NullTracer, "finish", lambda tracer: None)
    monkeypatch.setattr("jpipe_train.report.performance.measure.gather", lambda *_: None)
    plan = jpipe.Plan.even("ab", 2, "gpipe", 2)
    processes = NonCallableMock(spec=jpipe.processes.Processes, gather=gather)
    measure = Measure(NonCallableMock(spec=jpipe.Pipeline, plan=plan), (), 30, 10, 3, processes)
    for step in range(10):
        measure.observer(step)
        measure.waited(float(step))
    first = jpipe.programs.batches_until_full(plan)
    assert shared == [(f"wait for the data from batch {first + 1}", first + 2.0)]  # the mean of five steps
    assert measure.data_waits == [0.0, first + 2.0]
