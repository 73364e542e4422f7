"""Predict what a verified program does, for given costs: time, memory and bytes moved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jpipe.programs._costs import Network, StageCost
from jpipe.programs._global_norm import last_microbatch
from jpipe.programs._instructions import (
    AddShared,
    AllReduce,
    Backward,
    Forward,
    ForwardBackward,
    Instruction,
    Load,
    Program,
    Receive,
    Release,
    Send,
    SumSquares,
    TakeShared,
    Update,
)
from jpipe.programs._timeline import MemorySample, MemoryTimeline, Op, Span, Timeline, format_grid, to_ticks
from jpipe.programs._traffic import Traffic
from jpipe.programs._verify import versions_before
from jpipe.schedules import SCHEDULES


@dataclass(frozen=True)
class Prediction:
    """What a program will do, for given costs.

    Attributes:
        timeline: the spans of each worker, in seconds.
        memory: what each worker holds, at the beginning and after each of its computations.
        seconds: from the first start to the last end.
        bubble: share of the workers' time, up to the last end, in which they do not compute.
        peak_bytes: for each worker the most bytes of arrays alive after any instruction, waiting inputs included.
        peak_bytes_running: the most bytes while a computation runs: what it reads and what it makes at once, and its temporaries.
        moved_bytes: for each worker the bytes it sends to others.
        versions_alive: for each worker the most weight versions alive at a time.
    """

    timeline: Timeline
    memory: MemoryTimeline
    seconds: float
    bubble: float
    peak_bytes: tuple[int, ...]
    peak_bytes_running: tuple[int, ...]
    moved_bytes: tuple[int, ...]
    versions_alive: tuple[int, ...]

    def grid(self, tick: float | None = None) -> str:
        """The timeline as text; `tick` in seconds, by default the shortest computation."""
        return draw_grid(self.timeline, tick)


def draw_grid(timeline: Timeline, tick: float | None = None, notes: Sequence[tuple[int, str]] = ()) -> str:
    """A timeline in seconds as text, with (worker, note) pairs behind the rows; a tick is by default the shortest computation."""
    shortest = min((span.end - span.start for spans in timeline for span in spans), default=1.0)
    return format_grid(to_ticks(timeline, tick or shortest or 1.0), notes)


class Predictor:
    """Adds up the costs of a program's instructions, one after the other in an executable order.

    Args:
        program: what runs.
        costs: one for each stage.
        network: the link between any two workers.
    """

    def __init__(self, program: Program, costs: Sequence[StageCost], network: Network) -> None:
        self._plan, self._program = program.plan, program
        self._averages_state = program.plan.sync_state and SCHEDULES[program.plan.schedule].flushes
        self._traffic = Traffic(network)
        self._parts: dict[tuple[int, int], list[float]] = {}  # of each sum, by stage and batch: when each replica began it
        self._workers = [
            _Worker(s, costs[s], _Memory(costs[s], versions_before(program.plan, w, program.start)))
            for w, (s, _) in enumerate(program.plan.workers)
        ]

    def add(self, i: Instruction) -> None:
        """Execute the next instruction, which is verified."""
        if type(i) is not Receive:  # its send does the transfer
            _HANDLERS[type(i)](self, self._workers[i.worker], i)

    def timeline(self) -> Timeline:
        """The spans of each worker so far."""
        return tuple(tuple(worker.spans) for worker in self._workers)

    def prediction(self) -> Prediction:
        """The prediction from all instructions so far."""
        workers, memories = self._workers, [worker.memory for worker in self._workers]
        seconds = max(worker.clock for worker in workers)
        busy = sum(worker.busy for worker in workers)
        return Prediction(
            timeline=self.timeline(),
            memory=tuple(tuple(memory.samples) for memory in memories),
            seconds=seconds,
            bubble=1 - busy / (seconds * len(workers)) if seconds else 0.0,
            peak_bytes=tuple(memory.peak for memory in memories),
            peak_bytes_running=tuple(max(memory.peak, memory.peak_running) for memory in memories),
            moved_bytes=tuple(worker.moved for worker in workers),
            versions_alive=tuple(memory.most_versions for memory in memories),
        )

    def _load(self, worker: "_Worker", i: Load) -> None:
        worker.memory.add(worker.cost.inputs if i.data == "inputs" else worker.cost.labels)

    def _forward(self, worker: "_Worker", i: Forward) -> None:
        cost, last = worker.cost, worker.stage == self._plan.depth - 1
        worker.compute("F", i, "activation", cost.forward)
        if not last:
            worker.ready["activation", i.microbatch] = worker.clock
        worker.memory.in_flight += 1
        made = cost.residuals + (cost.message if last else cost.outputs - cost.kept_outputs)
        worker.memory.compute(worker.clock, made, cost.inputs + cost.labels)

    def _backward(self, worker: "_Worker", i: Backward) -> None:
        cost = worker.cost
        worker.compute("B", i, "gradient", cost.backward)
        worker.memory.in_flight -= 1
        worker.memory.compute(worker.clock, cost.gradient, cost.residuals + cost.message)
        self._accumulate(worker, i.microbatch)

    def _forward_backward(self, worker: "_Worker", i: ForwardBackward) -> None:
        cost = worker.cost
        worker.compute("FB", i, "activation", cost.forward + cost.backward)
        worker.memory.compute(worker.clock, cost.gradient, cost.inputs + cost.labels)
        self._accumulate(worker, i.microbatch)

    def _accumulate(self, worker: "_Worker", k: int) -> None:
        """Add the gradients of a microbatch to those of its batch, which may be set aside at its end."""
        if worker.stage > 0:
            worker.ready["gradient", k] = worker.clock
        worker.memory.accumulate()
        replicas = self._plan.replicas[worker.stage]
        if (
            self._program.sets_aside[worker.stage]
            and (k // replicas + 1) % (self._plan.microbatches_per_update(worker.stage) // replicas) == 0
        ):
            worker.memory.accumulates = False

    def _send(self, worker: "_Worker", i: Send) -> None:
        peer, key = self._workers[i.to], (str(i.message), i.microbatch)
        if i.message == "activation":
            size, arrives = worker.cost.outputs, peer.cost.inputs
            worker.memory.add(worker.cost.kept_outputs - size)
        elif i.message == "gradient":
            size, arrives = worker.cost.gradient, peer.cost.message
            worker.memory.add(-size)
        elif i.message == "shared":
            size = arrives = self._shared_bytes(worker.stage, peer.stage)
        else:
            size, arrives = 0, 0
        peer.memory.add(arrives)
        worker.moved += size
        ready = worker.ready[key] if i.message in ("norm", "shared") else worker.ready.pop(key)  # the worker keeps these
        if i.message == "shared":
            key = f"shared of stage {worker.stage}", i.microbatch
        peer.ready[key] = self._traffic.send(i.worker, i.to, ready, size)

    def _all_reduce(self, worker: "_Worker", i: AllReduce) -> None:
        if self._averages_state:
            worker.memory.add(worker.cost.state)  # the mean, until the update replaces the worker's own by it
        parts = self._parts.setdefault((worker.stage, i.batch), [])
        parts.append(worker.clock)
        replicas = self._plan.stage_workers[worker.stage]
        if len(parts) == len(replicas):
            size = 2 * (len(replicas) - 1) / len(replicas) * worker.cost.accumulators
            summed = self._traffic.all_reduce(replicas, max(parts), size)
            for w in replicas:
                self._workers[w].moved += round(size)
                self._workers[w].ready["sum", i.batch] = summed

    def _take_shared(self, worker: "_Worker", i: TakeShared) -> None:
        worker.wait(worker.ready.get(("sum", i.batch), 0.0))
        worker.ready["shared", last_microbatch(self._plan, i.batch)] = worker.clock
        worker.memory.add(sum(worker.cost.shared))

    def _add_shared(self, worker: "_Worker", i: AddShared) -> None:
        for s in self._program.shared[i.group]:
            if s != worker.stage:
                worker.wait(worker.ready[f"shared of stage {s}", last_microbatch(self._plan, i.batch)])

    def _shared_bytes(self, s: int, other: int) -> int:
        """The size of the shared gradients that one stage sends to another."""
        sizes = zip(self._program.shared, self._workers[self._plan.stage_workers[s][0]].cost.shared, strict=False)
        return sum(size for stages, size in sizes if {s, other} <= set(stages))

    def _sum_squares(self, worker: "_Worker", i: SumSquares) -> None:
        k = last_microbatch(self._plan, i.batch)
        worker.wait(worker.ready.get(("sum", i.batch), 0.0))  # the update takes the sum
        worker.wait(worker.ready.pop(("squares", k), 0.0))
        worker.ready["squares" if worker.stage > 0 else "norm", k] = worker.clock

    def _update(self, worker: "_Worker", i: Update) -> None:
        cost, memory = worker.cost, worker.memory
        worker.wait(worker.ready.pop(("sum", i.batch), 0.0))
        if self._averages_state and self._plan.replicas[worker.stage] > 1:
            memory.add(-cost.state)
        if memory.accumulates and self._program.sets_aside[worker.stage]:
            memory.add(-cost.accumulators)
        memory.accumulates = True
        others = {s for stages in self._program.shared if worker.stage in stages for s in stages} - {worker.stage}
        if others:
            k = last_microbatch(self._plan, i.batch)
            memory.add(-sum(cost.shared) - sum(self._shared_bytes(s, worker.stage) for s in others))
            for kind in ("shared", *(f"shared of stage {s}" for s in others)):
                worker.ready.pop((kind, k))
        if self._program.global_norm:
            worker.wait(worker.ready["norm", last_microbatch(self._plan, i.batch)])
        memory.update(i.batch + 1, i.retires)
        worker.clock += cost.update
        worker.busy += cost.update
        last = worker.spans[-1]
        worker.spans[-1] = last._replace(updates=True, update_time=cost.update, update_wait=worker.clock - cost.update - last.end)
        memory.sample(worker.clock)

    def _release(self, worker: "_Worker", i: Release) -> None:
        worker.memory.release(i.version)


class _Worker:
    """The clock of one worker, and what it has done."""

    def __init__(self, stage: int, cost: StageCost, memory: "_Memory") -> None:
        self.stage, self.cost, self.memory = stage, cost, memory
        self.clock, self.busy, self.moved = 0.0, 0.0, 0
        self.ready: dict[tuple[str, int], float] = {}  # when messages were made or arrived, by (message, microbatch), and sums
        self.spans: list[Span] = []

    def wait(self, until: float) -> None:
        self.clock = max(self.clock, until)

    def compute(self, op: Op, i: Forward | Backward | ForwardBackward, needs: str, seconds: float) -> None:
        starts = max(self.clock, self.ready.pop((needs, i.microbatch), 0.0))
        self.clock = starts + seconds
        self.busy += seconds
        self.spans.append(Span(op, i.microbatch, i.version, starts, self.clock))


class _Memory:
    """The bytes of one worker."""

    def __init__(self, cost: StageCost, versions: set[int]) -> None:
        self.cost = cost
        self.weights = dict.fromkeys(sorted(versions), cost.weights)  # by version; replaced and not changed: samples share it
        self.held = len(versions) * cost.weights + cost.optimizer + cost.state + cost.accumulators
        self.peak, self.peak_running, self.most_versions = self.held, 0, len(versions)
        self.in_flight = 0  # microbatches between their forward and their backward
        self.accumulates = True  # whether there is memory for gradients: not between a batch set aside and the next backward
        self.samples: list[MemorySample] = []
        self.sample(0.0)

    def add(self, size: int) -> None:
        self.held += size
        if self.held > self.peak:
            self.peak = self.held

    def accumulate(self) -> None:
        if not self.accumulates:
            self.accumulates = True
            self.add(self.cost.accumulators)

    def update(self, version: int, retired: int | None) -> None:
        """Make weights `version`, in the memory of `retired` if there is one."""
        if retired is None:
            self.add(self.cost.weights)
        self.weights = {v: size for v, size in self.weights.items() if v != retired} | {version: self.cost.weights}
        self.most_versions = max(self.most_versions, len(self.weights))

    def release(self, version: int) -> None:
        self.weights = {v: size for v, size in self.weights.items() if v != version}
        self.add(-self.cost.weights)

    def compute(self, end: float, made: int, used: int) -> None:
        """Hold what a computation makes and what it uses while it runs, then only the former."""
        running = self.held + made + self.cost.temporary
        if running > self.peak_running:
            self.peak_running = running
        self.add(made - used)
        self.sample(end)

    def sample(self, time: float) -> None:
        cost, residuals = self.cost, self.in_flight * self.cost.residuals
        other = self.held - len(self.weights) * cost.weights - cost.optimizer - cost.accumulators - residuals
        self.samples.append(MemorySample(time, self.weights, cost.optimizer, cost.accumulators, residuals, other))


_HANDLERS: dict[type, Callable[[Predictor, _Worker, Any], None]] = {
    Load: Predictor._load,
    Forward: Predictor._forward,
    Backward: Predictor._backward,
    ForwardBackward: Predictor._forward_backward,
    Send: Predictor._send,
    AllReduce: Predictor._all_reduce,
    TakeShared: Predictor._take_shared,
    AddShared: Predictor._add_shared,
    SumSquares: Predictor._sum_squares,
    Update: Predictor._update,
    Release: Predictor._release,
}
