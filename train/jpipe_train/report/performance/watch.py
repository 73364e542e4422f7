"""Watch the speed of a run. If its steps are slower than predicted, report which part of the system slows them down."""

import functools
import itertools
import operator
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax

import jpipe
from jpipe_train.data.data import Batches
from jpipe_train.data.rows import Rows
from jpipe_train.report.performance.comparison import time_text
from jpipe_train.report.performance.measure import Measure
from jpipe_train.report.performance.stage_times import SHORT, microbatch_seconds

SLOW = 1.25
"""The smallest ratio of measured to expected seconds at which steps or computations count as slow."""

MINUTE = 60.0
"""Steps must be slow for this many seconds before a report. Two traces to find the cause are at least this many seconds apart."""
PAUSE = 600.0
"""The least number of seconds between two reports."""
_FEWEST = 3  # at least this many steps are judged, however long they are
_JOINED = 0.1  # short steps are joined into entries of at most this many seconds; a minute has at most about 1,200 entries


class Step(NamedTuple):
    """The seconds of a step, or of several short consecutive steps."""

    seconds: float  # the total seconds of these steps
    data: float = 0.0  # the seconds that the loop waited for their batches
    late: float = 0.0  # the part of `data` that exceeds the seconds that a whole step should take
    number: int = 1  # the number of steps

    def joined(self, other: "Step") -> "Step":
        """Return this entry and `other` as one entry."""
        return Step(self.seconds + other.seconds, self.data + other.data, self.late + other.late, self.number + other.number)


@dataclass(frozen=True)
class Expected:
    """The times with which the steps of a run are compared."""

    planned: bool  # whether the times are the plan's prediction; otherwise they are from the first window that the run measured
    seconds: float  # the seconds of a step
    # for each stage, the seconds that it computes for a microbatch, as far as they are known
    stages: Mapping[int, float] = field(default_factory=dict)
    links: Mapping["Link", float] = field(default_factory=dict)  # for each link, the seconds per step that a rank waits for it
    idle: float = 0.0  # the predicted seconds per step in which a rank is idle for any reason, including waits for links

    @property
    def words(self) -> str:
        return "planned" if self.planned else "at first"


class Link(NamedTuple):
    """A connection: messages from one rank to another, sums over ranks, or moves between a rank and the memory of its host."""

    kind: str
    ranks: tuple[int, ...]


class Verdict(NamedTuple):
    """The part that slows steps down, such as "stage 2 on rank 2", and a description of the slowdown."""

    part: str
    words: str


class _Blame(NamedTuple):
    """A part, the seconds by which it makes a step longer, and a description."""

    part: str
    excess: float
    words: str


def find_expected(plan: jpipe.Plan, first: jpipe.programs.Window | None) -> Expected | None:
    """Return the times with which the steps of a run are compared: the plan's prediction, or the times of the first window, if any."""
    if (predicted := plan.predicted) is not None:
        known = {s: seconds for s, seconds in enumerate(predicted.stage_seconds) if seconds}
        return Expected(True, predicted.batch_seconds, known, idle=predicted.bubble * predicted.batch_seconds)
    if first is None:
        return None
    return Expected(False, first.step_seconds, _usual(microbatch_seconds(plan, first)), waits(first))


def judge(
    plan: jpipe.Plan,
    expected: Expected,
    steps: Sequence[Step],
    window: jpipe.programs.Window | None,
    processes: Sequence[int] = (),
    shared: bool = False,
    data_waits: Sequence[float] = (),
) -> Verdict | None:
    """Return which part makes steps slower than expected; None if steps are not slower.

    The longest of the recent steps, at least two, is ignored, because a single pause does not mean that steps are slow. The part that
    lengthens a step most is named. Data count with the seconds that a process waits for its rows, beyond the expected seconds of a whole
    step. A stage counts with the seconds by which its computations exceed the expected time, and a link with the seconds by which a rank's
    wait for it does. If no part explains half of the excess, the host is named.

    `window` is the last measured one, or None. If ranks share devices, and so wait for each other, no straggler is named. `data_waits` has
    for each of several processes the seconds per step that it waited for data while the window was measured. The entry of process 0 is not
    used, because `steps` has its waits.
    """
    usual = functools.reduce(Step.joined, sorted(steps)[:-1])
    seconds, waited, late = (total / usual.number for total in usual[:3])
    if seconds <= SLOW * expected.seconds:
        return None
    data = "the data in process 0" if data_waits else "the data"
    blames = [_Blame(data, late, f"the loop waits {time_text(waited)} a step for the next batch")]
    if window is not None:
        for k, wait in enumerate(data_waits[1:], 1):
            words = f"its loop waits {time_text(wait)} a step for its rows"
            blames.append(_Blame(f"the data in process {k}", wait - expected.seconds, words))
        blames += _stages(plan, expected, window, processes) + _links(expected, window, processes)
    most = max(blames, key=lambda blame: blame.excess)
    if most.excess < (seconds - expected.seconds) / 2:
        most = _Blame(
            "the host",
            0.0,
            "no computation, message or batch explains it, so the remaining cause is Python's dispatch between instructions",
        )
        if window is None:
            most = _Blame("an unknown part", 0.0, "no step was traced (train.trace_batches is 0, or train.eval_every below 3)")
    words = f"{time_text(seconds)} a step, {time_text(expected.seconds)} {expected.words}; the cause is {most.part}: {most.words}"
    if window is not None and not shared and (slow := stragglers(plan, expected, window)):
        named = ", ".join(f"{_rank(rank, processes)} ({ratio:.2f} times as long)" for rank, ratio in slow.items())
        words += f"; straggler{'s' if len(slow) > 1 else ''}: {named}"
    return Verdict(most.part, words)


def stragglers(plan: jpipe.Plan, expected: Expected, window: jpipe.programs.Window) -> dict[int, float]:
    """Return the ranks that compute at least a quarter longer than they should, each with the factor by which they take longer.

    A replica of a stage should take as long as the median of the replicas. A stage without replicas should take as long as expected.
    """
    rows = microbatch_seconds(plan, window)
    usual = _replicas(rows)
    should = [[usual.get(s) or expected.stages.get(s, 0.0) for s in row] for row in rows]
    ratios = {rank: sum(row.values()) / sum(of_rank) for rank, (row, of_rank) in enumerate(zip(rows, should, strict=True)) if all(of_rank)}
    return {rank: ratio for rank, ratio in ratios.items() if ratio >= SLOW and sum(rows[rank].values()) >= SHORT}


def waits(window: jpipe.programs.Window) -> dict[Link, float]:
    """Return for each link the seconds per batch in which a rank is idle while the link is busy; the rank that waits longest counts."""
    gaps = [_gaps(row) for row in window.timeline]
    found: dict[tuple[Link, int], list[tuple[float, float]]] = {}
    for transfer in window.transfers:
        kind = "moves" if transfer.is_move else "sums" if transfer.is_sum else "messages"
        receivers = transfer.ranks[1:] if kind == "messages" else [rank for rank in transfer.ranks if rank >= 0]
        link = Link(kind, tuple(receivers) if kind == "moves" else transfer.ranks)
        for rank in receivers:
            if transfer.arrival > transfer.start:  # false also for unknown times
                found.setdefault((link, rank), []).append((transfer.start, transfer.arrival))
    seconds: dict[Link, float] = {}
    for (link, rank), busy in found.items():
        overlap = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in _union(busy) for begin, stop in gaps[rank])
        seconds[link] = max(seconds.get(link, 0.0), overlap / window.batches)
    return seconds


def _gaps(row: Sequence[jpipe.programs.Span]) -> list[tuple[float, float]]:
    """Return the (start, end) of the times in which a rank is idle between computations and updates."""
    busy = [(span.start, span.end) for span in row] + [(span.update_start, span.update_end) for span in row if span.updates]
    return [(end, start) for (_, end), (start, _) in itertools.pairwise(_union(busy))]


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of the intervals as intervals that do not overlap."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _stages(plan: jpipe.Plan, expected: Expected, window: jpipe.programs.Window, processes: Sequence[int]) -> list[_Blame]:
    """For each measured stage and rank, return how much it lengthens a step by being slower than expected or than its replicas."""
    rows, blames = microbatch_seconds(plan, window), []
    others = _replicas(rows)
    for rank, (workers, row) in enumerate(zip(plan.rank_workers, rows, strict=True)):
        for chunk, w in enumerate(workers):
            s, than = plan.workers[w][0], expected.words
            usual, seconds = expected.stages.get(s, 0.0), row[plan.workers[w][0]]
            if s in others and (not usual or others[s] < seconds / SLOW):
                usual, than = others[s], "on its other ranks"
            if not usual or seconds < SHORT:
                continue
            begun = sum(jpipe.ops.OPS[span.op].begins for span in window.timeline[rank] if span.chunk == chunk)
            words = f"its computations take {time_text(seconds)} a microbatch, {time_text(usual)} {than}"
            blames.append(_Blame(f"stage {s} on {_rank(rank, processes)}", (seconds - usual) * begun / window.batches, words))
    return blames


def _links(expected: Expected, window: jpipe.programs.Window, processes: Sequence[int]) -> list[_Blame]:
    """Return for each link how much longer a step takes because a rank waits for the link longer than expected."""
    blames = []
    for link, seconds in waits(window).items():
        names = [_rank(rank, processes) for rank in link.ranks]
        part = f"messages from {names[0]} to {names[-1]}" if link.kind == "messages" else f"sums over {', '.join(names)}"
        part = f"moves between {names[0]} and the memory of its host" if link.kind == "moves" else part
        excess = seconds - (expected.idle if expected.planned else expected.links.get(link, 0.0))
        blames.append(_Blame(part, excess, f"a rank waits {time_text(seconds)} a step for them"))
    return blames


def _usual(rows: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return for each measured stage the median over its ranks of the seconds for a microbatch."""
    stages = sorted({s for row in rows for s in row})
    of_stages = {s: [row[s] for row in rows if row.get(s)] for s in stages}
    return {s: statistics.median_low(seconds) for s, seconds in of_stages.items() if seconds}


def _replicas(rows: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return for each stage on several ranks the median over these ranks of the seconds for a microbatch."""
    return {s: seconds for s, seconds in _usual(rows).items() if sum(s in row for row in rows) > 1}


def _rank(rank: int, processes: Sequence[int]) -> str:
    return f"rank {rank} (process {processes[rank]})" if len(set(processes)) > 1 else f"rank {rank}"


class Watch:
    """Times the steps of a run, and reports once if they are slower than expected for a minute.

    A further report follows only about another part, and at most every ten minutes. The first steps do not count, and neither do steps
    during and after evaluations, snapshots and traces. Only process 0 judges. It uses the times of its own loop, and the traces and data
    waits of all processes.

    Args:
        pipe: the pipeline of the run.
        measure: traces windows. If no window is recent, `wants_trace` asks for a new one.
        say: prints a line. It is None in processes that do not judge, and if batches differ in shape, so that no time is expected.
        first: the first step of the run.
        can_trace: whether windows can be traced in this run.
        clock: returns the time in seconds.

    Attributes:
        can_trace: whether windows can be traced in this run.
        remarks: the reported lines, for the report of the run.
    """

    def __init__(
        self,
        pipe: jpipe.Pipeline,
        measure: Measure,
        say: Callable[[str], None] | None,
        first: int,
        can_trace: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._plan, self._measure, self._say, self.can_trace, self._clock = pipe.plan, measure, say, can_trace, clock
        self._begins = first + jpipe.programs.batches_until_full(pipe.plan) + 2
        places = [pipe.places[workers[0]] for workers in pipe.plan.rank_workers]
        self._processes = [place.process_index for place in places]
        self._shared = len({tuple(place.devices) for place in places}) < len(places)
        self._expected = find_expected(pipe.plan, None)
        self._steps = deque[Step]()  # the steps of the last minute
        self._seconds, self._count = 0.0, 0  # the total seconds and the number of the steps of the last minute
        self._exceeds = False  # whether these steps were slow, or too few to tell, when the last entry began
        self._slow = 0.0  # seconds for which the steps have been slow
        self._window: jpipe.programs.Window | None = None  # the last window
        self._first: jpipe.programs.Window | None = None  # the window with which the steps are compared
        self._last: float | None = None  # the time when the last step was finished
        self._data = 0.0  # seconds that the loop waited for the batch of this step
        self._paused = True  # whether the last step does not count
        self._traced = self._measured = self._judged = -PAUSE  # times of the last traced step, finished window, and verdict
        self._part = ""
        self.remarks: dict[str, str] = {}

    def load(self, batches: Batches, step: int) -> Any:
        """Return the batch of a step. Record how long this takes and, later, how long it takes to read the rows of its slices."""
        self._data = 0.0
        batch = self._timed(functools.partial(operator.getitem, batches), step)
        counts = self._say is not None or self._measure.is_tracing
        return jax.tree.map(self._with_time, batch) if counts else batch

    def _with_time(self, leaf: Any) -> Any:
        return replace(leaf, read=functools.partial(self._timed, leaf.read)) if isinstance(leaf, Rows) else leaf

    def _timed(self, read: Callable[..., Any], *arguments: int) -> Any:
        """Call `read`, and add its seconds to the time of this step's data."""
        began = self._clock()
        result = read(*arguments)
        self._data += self._clock() - began
        return result

    def finished(self, step: int, *, paused: bool) -> None:
        """Record that the loop has finished a step, and report if the recent steps are slow.

        If the run did other work during the step, neither this step nor the next one counts.
        """
        self._measure.waited(self._data)
        if self._say is None:
            return
        now, window = self._clock(), self._measure.measured
        if self._measure.is_tracing:
            paused, self._traced = True, now
        if window is not self._window:
            self._window, self._measured, paused = window, now, True
            if self._expected is None:
                self._first, self._expected = window, find_expected(self._plan, window)
        if self._expected is not None and not (paused or self._paused or self._last is None or step < self._begins):
            self._add(Step(now - self._last, self._data, max(0.0, self._data - self._expected.seconds)), SLOW * self._expected.seconds)
        self._last, self._paused = now, paused
        if self._is_slow and (self._has_window or not self.can_trace):
            self._judge(step, now)

    def wants_trace(self) -> bool:
        """Return whether to trace a window at the next step, to find the part that slows steps down."""
        return self.can_trace and self._is_slow and not self._has_window and self._clock() - self._traced >= MINUTE

    def _judge(self, step: int, now: float) -> None:
        assert self._expected is not None
        assert self._say is not None
        verdict = judge(self._plan, self._expected, self._steps, self._window, self._processes, self._shared, self._measure.data_waits)
        self._judged = now
        if verdict is not None and verdict.part != self._part:
            self._part = verdict.part
            line = f"step {step}: slow for a minute: {verdict.words}"
            self._say(line)
            self.remarks["slow steps"] = "; ".join([*self.remarks.values(), line])

    @property
    def _has_window(self) -> bool:
        return self._window is not None and self._window is not self._first and self._clock() - self._measured < MINUTE

    @property
    def _is_slow(self) -> bool:
        """Whether steps have been slow for a minute, and a report may follow."""
        return self._slow >= MINUTE and len(self._steps) >= _FEWEST and self._clock() - self._judged >= PAUSE

    def _add(self, step: Step, limit: float) -> None:
        """Add a step to the steps of the last minute, and count the seconds for which their mean has been above `limit`.

        The first minute of a run counts as well, so a run that is slow from its start is reported after one minute. A minute may have very
        many short steps, so they share entries, and all entries are read only when a new one begins.
        """
        steps = self._steps
        self._seconds, self._count = self._seconds + step.seconds, self._count + step.number
        if steps and steps[-1].seconds + step.seconds <= _JOINED:
            steps[-1] = steps[-1].joined(step)
        else:
            steps.append(step)
            while len(steps) > _FEWEST and self._seconds - steps[0].seconds >= MINUTE:
                oldest = steps.popleft()
                self._seconds, self._count = self._seconds - oldest.seconds, self._count - oldest.number
            self._exceeds = len(steps) < _FEWEST or self._seconds > limit * (self._count - 1)
            if self._exceeds and len(steps) >= _FEWEST:
                longest = max(steps)
                self._exceeds = self._seconds - longest.seconds > limit * (self._count - longest.number)
        self._slow = self._slow + step.seconds if self._exceeds else 0.0
