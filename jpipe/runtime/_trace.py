"""Traces of a pipeline: when each computation runs and what each worker holds, measured during training."""

import itertools
import queue
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jpipe.errors import InputError
from jpipe.plan import Plan
from jpipe.programs._costs import StageCost
from jpipe.programs._global_norm import route_of
from jpipe.programs._instructions import Backward, Forward, ForwardBackward, SumSquares, Update
from jpipe.programs._timeline import MemorySample, MemoryTimeline, Op, Span, Timeline
from jpipe.runtime._interpreter import Event
from jpipe.runtime._state import WorkerState
from jpipe.schedules import SCHEDULES

_OPS: dict[type, Op] = {Forward: "F", Backward: "B", ForwardBackward: "FB"}


@dataclass(frozen=True)
class Trace:
    """A measurement.

    Attributes:
        timeline: the spans of each worker, in seconds from the start of the trace.
        memory: the bytes that each worker holds after each of its computations.
    """

    timeline: Timeline
    memory: MemoryTimeline


class Tracer:
    """Measures some steps: pass it to `Pipeline.step` (and `drain`) as `observe`, then call `finish`.

    A thread for each worker waits for its computations, one after the other, and records when each ends. A computation is taken to begin
    when it is dispatched, its input has arrived, and the computation before it on its device has ended. The run does not wait for the
    measurement, but it costs tens to hundreds of microseconds per computation: measure a few steps, not the whole run. A `with`
    statement closes an unfinished tracer.

    Args:
        plan: the plan of the run.

    Example:
        >>> tracer = Tracer(Plan.even("ab", 2, "gpipe", 1))  # then: state, metrics = pipe.step(state, batch, observe=tracer)
        >>> tracer.finish().timeline
        ((), ())
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._global_norm = False
        self._began = time.perf_counter()
        self._open = True
        _switch_often(True)
        self._watchers = [_Watcher(self._began) for _ in plan.workers]

    def __call__(self, event: Event) -> None:
        """Observe one instruction."""
        self._global_norm |= isinstance(event.instruction, SumSquares)
        if event.done is not None:
            assert isinstance(event.instruction, Forward | Backward | ForwardBackward | Update)
            self._watchers[event.instruction.worker].watch(event.instruction, event.done, event.state)

    def finish(self) -> Trace:
        """Wait until all dispatched computations have ended, and return the measurement.

        Raises:
            RuntimeError: a computation failed, for example out of memory; the error of the device.
        """
        self.close()
        for watcher in self._watchers:
            if watcher.error is not None:
                raise watcher.error
        timeline = _timeline([watcher.computations for watcher in self._watchers], self._plan, self._global_norm)
        return Trace(timeline, tuple(tuple(watcher.samples) for watcher in self._watchers))

    def close(self) -> None:
        """Stop measuring when all dispatched computations have ended."""
        if self._open:
            self._open = False
            for watcher in self._watchers:
                watcher.stop()
            _switch_often(False)

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_tracers = 0
_usual_interval = sys.getswitchinterval()


def _switch_often(begin: bool) -> None:
    """While any tracer is open, let threads switch more often, so that they record the end of a computation without delay."""
    global _tracers, _usual_interval
    if begin and _tracers == 0:
        _usual_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(_usual_interval, 5e-4))  # seconds
    _tracers += 1 if begin else -1
    if _tracers == 0:
        sys.setswitchinterval(_usual_interval)


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
        self.error: Exception | None = None
        self._began = began
        self._sizes: dict[Any, int] = {}  # of parts of constant size: each version, optimizer state, accumulators, layer state
        self._buffers: dict[tuple[str, int], int] = {}  # sizes of the current buffers
        self._queue: queue.SimpleQueue[tuple[_Instruction, jax.Array, float, MemorySample] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def watch(self, instruction: _Instruction, done: jax.Array, state: WorkerState) -> None:
        self._queue.put((instruction, done, time.perf_counter() - self._began, self._sample(state)))

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _wait(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                instruction, done, dispatched, sample = item
                done.block_until_ready()
                end = time.perf_counter() - self._began
                (device,) = done.devices()
                self.computations.append(_Computation(instruction, device, dispatched, end))
                self.samples.append(sample._replace(time=end))
        except Exception as error:  # `finish` raises it
            self.error = error

    def _sample(self, state: WorkerState) -> MemorySample:
        """What the worker holds; looks only at new buffers, because there may be hundreds of microbatches."""
        sizes, held = self._sizes, self._buffers
        named = ("optimizer", state.optimizer), ("accumulators", state.accumulators), ("state", state.layer_state), *state.versions.items()
        for name, tree in named:
            if sizes.get(name, 0) == 0:  # accumulators may be missing at first
                sizes[name] = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        for name in held.keys() - state.buffers.keys():
            del held[name]
        for kind, k in state.buffers.keys() - held.keys():
            # An output that is kept for the backward counts as a residual, not also as a message.
            kept = {id(leaf) for leaf in jax.tree.leaves(state.buffers.get(("residuals", k)))} if kind == "output" else set()
            held[kind, k] = sum(leaf.nbytes for leaf in jax.tree.leaves(state.buffers[kind, k]) if id(leaf) not in kept)
        residuals = sum(size for (kind, _), size in held.items() if kind == "residuals")
        other = sizes["state"] + sum(held.values()) - residuals
        weights = {version: sizes[version] for version in sorted(state.versions)}
        return MemorySample(
            0.0, weights, sizes["optimizer"], sizes["accumulators"] if state.accumulators is not None else 0, residuals, other
        )


_Key = tuple[int, str, int]  # worker, F, B, FB or U, microbatch (of an update: batch)


def _timeline(workers: Sequence[Sequence[_Computation]], plan: Plan, global_norm: bool) -> Timeline:
    """Spans from the ends of the computations and from what each had to wait for."""
    computations = {_key(s, c.instruction): c for s, row in enumerate(workers) for c in row}
    waits_for = {key: [k for k in _inputs(key, plan, global_norm) if k in computations] for key in computations}
    for s, own in enumerate(workers):
        for before, after in itertools.pairwise(own):
            waits_for[_key(s, after.instruction)].append(_key(s, before.instruction))
    ends = _consistent({key: c.end for key, c in computations.items()}, waits_for)
    rows: list[list[Span]] = [[] for _ in workers]
    free: dict[jax.Device, float] = {}  # when the previous computation ended
    for key in sorted(computations, key=ends.__getitem__):  # stable: equal times stay in a worker's order
        c, row, end = computations[key], rows[key[0]], ends[key]
        start = min(max([c.dispatched, free.get(c.device, 0.0), *(ends[k] for k in waits_for[key])]), end)
        free[c.device] = end
        if not isinstance(c.instruction, Update):
            row.append(Span(_OPS[type(c.instruction)], c.instruction.microbatch, c.instruction.version, start, end))
        elif row:
            row[-1] = row[-1]._replace(updates=True, update_time=end - start, update_wait=start - row[-1].end)
    return tuple(tuple(row) for row in rows)


def _key(worker: int, instruction: _Instruction) -> _Key:
    if isinstance(instruction, Update):
        return worker, "U", instruction.batch
    return worker, _OPS[type(instruction)], instruction.microbatch


def _inputs(key: _Key, plan: Plan, global_norm: bool) -> list[_Key]:
    """What may give a computation its input: its neighbour; for an update all replicas, with the global norm those of the first stage."""
    worker, op, k = key
    s = plan.workers[worker][0]
    match op:
        case "F" | "FB":
            return [(plan.worker(s - 1, k), "F", k)] if s > 0 else []
        case "B":
            return [(plan.worker(s + 1, k), after, k) for after in ("B", "FB")] if s + 1 < plan.depth else []
        case _:
            end = (k + 1) * plan.microbatches_per_update(s)
            summed = 0 if global_norm else s  # the first stage's gradients are the last
            is_alone = not global_norm or SCHEDULES[plan.schedule].flushes_after(plan, k)
            last = [] if is_alone else [end - 1 + route_of(plan).delay]
            microbatches = [*range(end - plan.replicas[summed], end), *last]
            return [(plan.worker(summed, j), op, j) for j in microbatches for op in ("B", "FB")]


def _consistent(ends: dict[_Key, float], waits_for: dict[_Key, list[_Key]]) -> dict[_Key, float]:
    """The ends made consistent: a thread may record an end late, but a computation never ends before one that it waits for."""
    changed = True
    while changed:
        changed = False
        for key in sorted(ends, key=ends.__getitem__, reverse=True):
            for before in waits_for[key]:
                if ends[before] > ends[key]:
                    ends[before] = ends[key]
                    changed = True
    return ends


def fit_costs(costs: Sequence[StageCost], timeline: Timeline, replicas: Sequence[int] | None = None) -> tuple[StageCost, ...]:
    """The costs with the median times of each stage's forwards, backwards and updates in a measured timeline, over its replicas.

    If forward and backward are one computation, its time is divided in the ratio of `costs`. Times without a measurement become 0.

    Args:
        costs: one for each stage; their bytes are kept.
        timeline: in seconds, a row for each worker.
        replicas: replicas of each stage; one each by default.

    Raises:
        InputError: the number of costs differs from that of the stages in the timeline.
    """
    replicas = (1,) * len(costs) if replicas is None else replicas
    if len(costs) != len(replicas) or sum(replicas) != len(timeline):
        raise InputError(f"fit_costs: expected one cost for each of the timeline's {len(timeline)} workers, found {len(costs)}")
    rows = iter(timeline)
    return tuple(_fit(cost, [span for _ in range(count) for span in next(rows)]) for cost, count in zip(costs, replicas, strict=True))


def _fit(cost: StageCost, spans: Sequence[Span]) -> StageCost:
    seconds = {op: [span.end - span.start for span in spans if span.op == op] for op in ("F", "B", "FB")}
    update = _median([span.update_time for span in spans if span.updates])
    if seconds["FB"]:
        both, share = _median(seconds["FB"]), cost.forward / (cost.forward + cost.backward)
        return replace(cost, forward=both * share, backward=both * (1 - share), update=update)
    return replace(cost, forward=_median(seconds["F"]), backward=_median(seconds["B"]), update=update)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
