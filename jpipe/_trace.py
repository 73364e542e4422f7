"""What a pipeline really does: when each computation runs and what each worker holds, measured while it trains."""

import queue
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jpipe._costs import StageCost
from jpipe._errors import InputError
from jpipe._grid import MemorySample, MemoryTimeline, Op, Span, Timeline
from jpipe._plan import Plan
from jpipe._program import Backward, Forward, ForwardBackward, SumSquares, Update
from jpipe._runtime import Event
from jpipe._state import WorkerState

_OPS: dict[type, Op] = {Forward: "F", Backward: "B", ForwardBackward: "FB"}


@dataclass(frozen=True)
class Trace:
    """What was measured.

    Attributes:
        timeline: the spans of each worker, in seconds from the start of the trace.
        memory: the arrays that each worker holds after each of its computations.
    """

    timeline: Timeline
    memory: MemoryTimeline


class Tracer:
    """Measures some steps: give it to `Pipeline.step` (and `drain`) as `observe`, then call `finish`.

    A thread for each worker waits for its computations, one after the other, and notes when each is over. A computation begins
    where its input is there, the one before on its device is over, and it is dispatched. Nothing waits for the measurement, but
    it costs some microseconds a computation: measure a few steps, not the whole run.

    Args:
        plan: what runs.

    Example:
        >>> tracer = Tracer(Plan.even("ab", 2, "gpipe", 1))  # then: state, metrics = pipe.step(state, batch, observe=tracer)
        >>> tracer.finish().timeline
        ((), ())
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._clips = False
        self._began = time.perf_counter()
        self._watchers = [_Watcher(self._began) for _ in range(plan.depth)]
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_interval, 5e-4))  # seconds: a thread that was waited for is to note the time soon

    def __call__(self, event: Event) -> None:
        """Take note of one instruction."""
        self._clips |= isinstance(event.instruction, SumSquares)
        if event.done is not None:
            assert isinstance(event.instruction, Forward | Backward | ForwardBackward | Update)
            self._watchers[event.instruction.worker].watch(event.instruction, event.done, event.state)

    def finish(self) -> Trace:
        """Wait until all that was dispatched is over, and give what was measured.

        Raises:
            RuntimeError: a computation failed (out of memory, say); the error of the device.
        """
        sys.setswitchinterval(self._switch_interval)
        for watcher in self._watchers:
            watcher.stop()
        timeline = _timeline([watcher.computations for watcher in self._watchers], self._plan.microbatches, self._clips)
        return Trace(timeline, tuple(tuple(watcher.samples) for watcher in self._watchers))


_Instruction = Forward | Backward | ForwardBackward | Update


@dataclass(frozen=True)
class _Computation:
    instruction: _Instruction
    device: jax.Device
    dispatched: float
    end: float


class _Watcher:
    """The thread that waits for one worker's computations."""

    def __init__(self, began: float) -> None:
        self.computations: list[_Computation] = []
        self.samples: list[MemorySample] = []
        self._began = began
        self._sizes: dict[Any, int] = {}  # of what does not change in size: each version, optimizer state, sums, layer state
        self._error: Exception | None = None
        self._queue: queue.SimpleQueue[tuple[_Instruction, jax.Array, float, MemorySample] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def watch(self, instruction: _Instruction, done: jax.Array, state: WorkerState) -> None:
        self._queue.put((instruction, done, time.perf_counter() - self._began, self._sample(state)))

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                instruction, done, dispatched, sample = item
                done.block_until_ready()
                end = time.perf_counter() - self._began
                (device,) = done.devices()
                self.computations.append(_Computation(instruction, device, dispatched, end))
                self.samples.append(sample._replace(time=end))
        except Exception as error:  # told by stop(), to whoever asks for the result
            self._error = error

    def _sample(self, state: WorkerState) -> MemorySample:
        sizes = self._sizes
        named = ("optimizer", state.optimizer), ("sums", state.sums), ("state", state.layer_state), *state.versions.items()
        for name, tree in named:
            if name not in sizes:
                sizes[name] = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        counted: set[int] = set()  # an output that is kept for the backward is both a residual and a message
        residuals, other = 0, sizes["state"]
        for (kind, _), tree in sorted(state.buffers.items(), key=lambda item: item[0][0] != "residuals"):
            for leaf in jax.tree.leaves(tree):
                if id(leaf) not in counted:
                    counted.add(id(leaf))
                    residuals, other = (residuals + leaf.nbytes, other) if kind == "residuals" else (residuals, other + leaf.nbytes)
        weights = {version: sizes[version] for version in sorted(state.versions)}
        return MemorySample(0.0, weights, sizes["optimizer"], sizes["sums"], residuals, other)


def _timeline(workers: Sequence[Sequence[_Computation]], microbatches: int, clips: bool) -> Timeline:
    """Spans from the ends of the computations and what each had to wait for; an update that clips waits for stage 0's last backward."""
    ends = {
        (s, _OPS[type(c.instruction)], c.instruction.microbatch): c.end
        for s, computations in enumerate(workers)
        for c in computations
        if not isinstance(c.instruction, Update)
    }
    rows: list[list[Span]] = [[] for _ in workers]
    free: dict[jax.Device, float] = {}  # when the computation before is over
    for s, c in sorted(((s, c) for s, computations in enumerate(workers) for c in computations), key=lambda pair: pair[1].end):
        i, row = c.instruction, rows[s]
        start = min(max(c.dispatched, free.get(c.device, 0.0)), c.end)
        free[c.device] = c.end
        if isinstance(i, Update):
            if row:
                last = (i.batch + 1) * microbatches - 1
                norm = max(ends.get((0, op, last), 0.0) for op in ("B", "FB")) if clips else 0.0
                start = min(max(start, row[-1].end, norm), c.end)
                row[-1] = row[-1]._replace(updates=True, update_time=c.end - start, update_wait=start - row[-1].end)
            continue
        op = _OPS[type(i)]
        if op == "B":
            before = max(ends.get((s + 1, after, i.microbatch), 0.0) for after in ("B", "FB"))
        else:
            before = ends.get((s - 1, "F", i.microbatch), 0.0)
        row.append(Span(op, i.microbatch, i.version, min(max(start, before), c.end), c.end))
    return tuple(tuple(row) for row in rows)


def fit_costs(costs: Sequence[StageCost], timeline: Timeline) -> tuple[StageCost, ...]:
    """The costs with the median times of each stage's forwards, backwards and updates in a measured timeline.

    Where forward and backward are one computation, its time is divided as they are in `costs`; a time that was never measured
    becomes 0.

    Args:
        costs: one for each stage; their bytes are kept.
        timeline: in seconds, a row for each stage.

    Raises:
        InputError: not as many costs as rows.
    """
    if len(costs) != len(timeline):
        raise InputError(f"fit_costs: expected one cost for each of the timeline's {len(timeline)} workers, found {len(costs)}")
    return tuple(_fit(cost, spans) for cost, spans in zip(costs, timeline, strict=True))


def _fit(cost: StageCost, spans: Sequence[Span]) -> StageCost:
    seconds = {op: [span.end - span.start for span in spans if span.op == op] for op in ("F", "B", "FB")}
    update = _median([span.update_time for span in spans if span.updates])
    if seconds["FB"]:
        both, share = _median(seconds["FB"]), cost.forward / (cost.forward + cost.backward)
        return replace(cost, forward=both * share, backward=both * (1 - share), update=update)
    return replace(cost, forward=_median(seconds["F"]), backward=_median(seconds["B"]), update=update)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
