"""Run programs without devices: verify order, versions, absence of deadlock and of leaks; predict time, bubble, memory and bytes moved."""

import math
from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

from jpipe.errors import InputError, short
from jpipe.programs._costs import Link, Network, StageCost, unit_costs
from jpipe.programs._instructions import (
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
    Update,
)
from jpipe.programs._timeline import MemorySample, MemoryTimeline, Op, Span, Timeline, format_grid, to_ticks
from jpipe.schedules import SCHEDULES, Compute


class ProgramError(ValueError):
    """A program that would not run as its schedule says; the message ends with the grid up to the place."""


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
        shortest = min((span.end - span.start for spans in self.timeline for span in spans), default=1.0)
        return format_grid(to_ticks(self.timeline, tick or shortest or 1.0))


def simulate(program: Program, costs: Sequence[StageCost] | None = None, link: Link | Network | None = None) -> Prediction:
    """Verify a program of whole batches (from an empty to an empty pipeline) and predict what it will do.

    Every worker runs its own part, a transfer waits until both sides have come to it, an update until all replicas have begun to
    sum their gradients and the sum has gone round (2 (r - 1) / r of them leave each worker). Verified, independently of `lower`:
    each worker computes in the order of the schedule and reads the versions of its formula; every version read is alive,
    and no more are than the schedule allows; each update sees exactly its batch; every buffer is made before it is used
    and used once; nothing is left behind; the workers do not wait for each other forever; the total order extends data
    and program order.

    Args:
        program: from `lower`, with `drain` and `begin` equal to `start`.
        costs: one for each stage; by default a forward takes 1, a backward 2 (3 where it recomputes) and nothing has a size.
        link: between any two workers, or a function that gives it for each two; by default transfers and sums are free. A sum goes
            round at the pace of the slowest link between neighbouring replicas, and occupies the ports of all of these links.

    Returns:
        Timeline, memory and what follows from them, in the units of the costs.

    Raises:
        ProgramError: the verification fails; says where, with the grid.
        InputError: a program of a part of a run, or not one cost for each stage.
    """
    if not isinstance(program, Program):
        raise InputError(f"simulate: expected a program, found {type(program).__name__}; give jpipe.lower(plan, batches)")
    if not program.drained or program.begin != program.start:
        raise InputError("simulate: expected the program of a whole run, found a part of one; lower it with begin = start and drain=True")
    costs = unit_costs(program.plan) if costs is None else costs
    if not isinstance(costs, Sequence) or not all(isinstance(cost, StageCost) for cost in costs):
        raise InputError(f"simulate: expected a list of jpipe.programs.StageCost as costs, found {short(costs)}")
    if not (link is None or isinstance(link, Link) or callable(link)):
        raise InputError(f"simulate: expected a jpipe.Link, or a function of two workers that gives one, found {short(link)}")
    if len(costs) != program.plan.depth:
        raise InputError(f"simulate: expected {program.plan.depth} costs, one for each stage, found {len(costs)}")
    link = link or Link()
    return _Simulation(program, costs, (lambda source, target: link) if isinstance(link, Link) else link).run()


@dataclass
class _Worker:
    """One worker's side of the simulation."""

    stage: int
    replica: int
    queue: list[Instruction]
    places: list[int]  # of the queue's instructions in the total order
    memory: int
    versions: set[int]
    expected: Sequence[Compute]
    position: int = 0
    computed: int = 0
    clock: float = 0.0
    busy: float = 0.0
    peak: int = 0
    peak_running: int = 0
    moved: int = 0
    most_versions: int = 1
    pending: int = 0  # backwards of the batch that is being accumulated
    has_sums: bool = True  # whether there is memory to accumulate in: not between a batch set aside and the next backward
    residuals: int = 0  # microbatches between their forward and their backward
    buffers: dict[tuple[str, int], float] = field(default_factory=dict)  # when each is ready
    spans: list[Span] = field(default_factory=list)
    samples: list[tuple[float, tuple[int, ...], int, int]] = field(default_factory=list)  # time, versions, residuals, memory

    def sample(self) -> None:
        self.samples.append((self.clock, tuple(self.versions), self.residuals, self.memory))

    def __post_init__(self) -> None:
        self.peak, self.most_versions = self.memory, len(self.versions)
        self.sample()


_Port = list[tuple[float, float]]
"""From when to when it is busy, in order."""


def _occupy(ports: Sequence[_Port], ready: float, seconds: float) -> float:
    """Send as soon after `ready` as all ports are free for so long; returns the end. Messages do not come in the order of time."""
    if seconds == 0:
        return ready
    start, found = ready, False
    while not found:
        found = True
        for port in ports:
            place = max(bisect_right(port, (start, math.inf)) - 1, 0)
            while place < len(port) and port[place][0] < start + seconds:
                if port[place][1] > start:
                    start, found = port[place][1], False
                place += 1
    for port in ports:
        insort(port, (start, start + seconds))
    return start + seconds


class _Simulation:
    def __init__(self, program: Program, costs: Sequence[StageCost], network: Network) -> None:
        self.program, self.plan, self.costs = program, program.plan, costs
        self.network = cache(network)
        self.schedule = SCHEDULES[self.plan.schedule]
        numbers = range(len(self.plan.workers))
        queues: list[list[Instruction]] = [[] for _ in numbers]
        places: list[list[int]] = [[] for _ in numbers]
        for place, instruction in enumerate(program.instructions):
            queues[instruction.worker].append(instruction)
            places[instruction.worker].append(place)
        self.workers = [self._worker(w, queues[w], places[w]) for w in numbers]
        self.ports: defaultdict[Hashable, _Port] = defaultdict(_Port)
        self.sums: dict[tuple[int, int], list[tuple[float, int]]] = {}  # by stage and batch, when and where each replica came to it

    def run(self) -> Prediction:
        waiting = deque(range(len(self.workers)))
        while waiting:
            w = waiting.popleft()
            worker = self.workers[w]
            queue = worker.queue
            while worker.position < len(queue):
                instruction = queue[worker.position]
                if isinstance(instruction, Send):
                    if not self._transfer(w, instruction):
                        break
                    waiting.append(instruction.to)
                elif isinstance(instruction, Receive):
                    peer = self.workers[instruction.source]
                    head = peer.queue[peer.position] if peer.position < len(peer.queue) else None
                    if isinstance(head, Send) and head.to == w:
                        waiting.append(instruction.source)
                    break  # the sender does the transfer, moves both on and wakes this worker
                elif isinstance(instruction, Update | SumSquares) and self._is_being_summed(worker, instruction.batch):
                    break  # the last of the replicas wakes this worker
                else:
                    _HANDLERS[type(instruction)](self, w, worker, instruction)
                    worker.position += 1
                    if isinstance(instruction, AllReduce) and not self._is_being_summed(worker, instruction.batch):
                        waiting.extend(self.plan.stage_workers[worker.stage])
                if worker.memory > worker.peak:
                    worker.peak = worker.memory
        self._check_end()
        return self._prediction()

    # Instructions ------------------------------------------------------------------------------------------------------

    def _transfer(self, w: int, send: Send) -> bool:
        """Do a transfer if the receiver has come to it."""
        worker, peer = self.workers[w], self.workers[send.to]
        if peer.position >= len(peer.queue):
            self._fail(w, f"{send} has no receiver")
        receive = peer.queue[peer.position]
        expected = send.microbatch, send.message, w
        if type(receive) is not Receive or (receive.microbatch, receive.message, receive.source) != expected:
            return False
        if peer.places[peer.position] < worker.places[worker.position]:
            self._fail(w, f"{receive} stands before its {send} in the total order")
        k, cost = send.microbatch, self.costs[worker.stage]
        if send.message == "activation":
            ready, size = self._take(w, "output", k), cost.outputs
            worker.memory -= cost.outputs - cost.kept_outputs
            peer.memory += self.costs[peer.stage].inputs
        elif send.message == "gradient":
            ready, size = self._take(w, "gradient", k), cost.gradient
            worker.memory -= cost.gradient
            peer.memory += self.costs[peer.stage].message
        else:
            ready, size = self._norm(w, k) if send.message == "norm" else self._take(w, "squares", k), 0
        link = self.network(w, send.to)
        ports = link.ports or ((w, send.to),)
        sent = _occupy([self.ports[port] for port in ports], ready, size / link.bandwidth)
        worker.moved += size
        arrives = {"activation": "inputs", "gradient": "message", "squares": "later squares", "norm": "norm"}[send.message]
        self._put(send.to, arrives, k, sent + link.latency)
        if peer.memory > peer.peak:
            peer.peak = peer.memory
        worker.position += 1
        peer.position += 1
        return True

    def _load(self, w: int, worker: _Worker, i: Load) -> None:
        self._put(w, i.data, i.microbatch, 0.0)
        cost = self.costs[worker.stage]
        worker.memory += cost.inputs if i.data == "inputs" else cost.labels

    def _forward(self, w: int, worker: _Worker, i: Forward) -> None:
        cost, last = self.costs[worker.stage], worker.stage == self.plan.depth - 1
        self._compute(w, worker, "F", i, [self._take(w, "inputs", i.microbatch), self._take_labels(w, i.microbatch)], cost.forward)
        self._put(w, "residuals", i.microbatch, worker.clock)
        self._put(w, "message" if last else "output", i.microbatch, worker.clock)
        worker.residuals += 1
        made = cost.residuals + (cost.message if last else cost.outputs - cost.kept_outputs)
        self._exchange(w, worker, made, cost.inputs + cost.labels)

    def _backward(self, w: int, worker: _Worker, i: Backward) -> None:
        cost = self.costs[worker.stage]
        ready = [self._take(w, "residuals", i.microbatch), self._take(w, "message", i.microbatch)]
        self._compute(w, worker, "B", i, ready, cost.backward)
        worker.residuals -= 1
        self._exchange(w, worker, cost.gradient, cost.residuals + cost.message)
        self._after_backward(w, worker, i)

    def _forward_backward(self, w: int, worker: _Worker, i: ForwardBackward) -> None:
        cost = self.costs[worker.stage]
        ready = [self._take(w, "inputs", i.microbatch), self._take_labels(w, i.microbatch)]
        self._compute(w, worker, "FB", i, ready, cost.forward + cost.backward)
        self._exchange(w, worker, cost.gradient, cost.inputs + cost.labels)
        self._after_backward(w, worker, i)

    def _all_reduce(self, w: int, worker: _Worker, i: AllReduce) -> None:
        ready = self._take(w, "sums", i.batch)
        worker.memory += self._averaged_state(worker)  # the mean, which takes the place of the own one with the update
        arrived = self.sums.setdefault((worker.stage, i.batch), [])
        arrived.append((max(worker.clock, ready), worker.places[worker.position]))
        replicas = self.plan.stage_workers[worker.stage]
        if len(arrived) < len(replicas):
            return
        share = 2 * (len(replicas) - 1) / len(replicas) * self.costs[worker.stage].sums
        ring = [self.network(replica, replicas[n - 1]) for n, replica in enumerate(replicas)]
        ports = list(dict.fromkeys(port for link in ring for port in link.ports))  # shared with other sums and with messages
        begin, seconds = max(time for time, _ in arrived), share / min(link.bandwidth for link in ring)
        sent = _occupy([self.ports[port] for port in ports], begin, seconds) if ports else begin + seconds
        summed = sent + 2 * (len(replicas) - 1) * max(link.latency for link in ring)
        for replica in replicas:
            self.workers[replica].moved += round(share)
            self._put(replica, "summed", i.batch, summed)

    def _averaged_state(self, worker: _Worker) -> int:
        """Bytes of layer state, where replicas average it with each update."""
        return self.costs[worker.stage].state if self.plan.sync_state and self.schedule.flushes else 0

    def _is_being_summed(self, worker: _Worker, batch: int) -> bool:
        """Whether other replicas have not come to the sum that this worker waits for."""
        return 0 < len(self.sums.get((worker.stage, batch), ())) < self.plan.replicas[worker.stage]

    def _sum(self, w: int, worker: _Worker, batch: int) -> float:
        """When the gradients of the batch, over all replicas, are there."""
        if self.plan.replicas[worker.stage] == 1:
            if worker.pending != self._backwards_per_update(worker.stage):
                self._fail(w, f"update {batch} after {worker.pending} backwards, expected {self._backwards_per_update(worker.stage)}")
            return worker.clock
        ready = self._take(w, "summed", batch)
        if max(place for _, place in self.sums[worker.stage, batch]) > worker.places[worker.position]:
            self._fail(w, f"{worker.queue[worker.position]} stands before the sum of {batch} in the total order")
        return ready

    def _sum_squares(self, w: int, worker: _Worker, i: SumSquares) -> None:
        ready = self._sum(w, worker, i.batch)
        worker.clock = max(worker.clock, ready)
        if self.plan.replicas[worker.stage] > 1:
            self._put(w, "summed", i.batch, ready)  # the update takes it
        k = (i.batch + 1) * self.plan.microbatches - 1
        if worker.stage < self.plan.depth - 1:
            worker.clock = max(worker.clock, self._take(w, "later squares", k))
        self._put(w, "squares" if worker.stage > 0 else "norm", k, worker.clock)

    def _norm(self, w: int, k: int) -> float:
        """When the norm is there, to be sent on; the update takes it away."""
        ready = self._take(w, "norm", k)
        self._put(w, "norm", k, ready)
        return ready

    def _update(self, w: int, worker: _Worker, i: Update) -> None:
        latest, cost = max(worker.versions, default=None), self.costs[worker.stage]
        if i.batch != latest:
            self._fail(w, f"{i} at version {latest}, expected version {i.batch}")
        worker.clock = max(worker.clock, self._sum(w, worker, i.batch))
        if self.plan.replicas[worker.stage] == 1:
            worker.pending = 0
        else:
            worker.memory -= self._averaged_state(worker) + (cost.sums if worker.has_sums else 0)
        worker.has_sums = True
        if self.program.clips:
            k = (i.batch + 1) * self.plan.microbatches - 1
            worker.clock = max(worker.clock, self._take(w, "norm", k))
        if i.retires is None:
            worker.memory += cost.weights
        else:
            self._drop_version(w, i.retires, i)
        worker.versions.add(i.batch + 1)
        worker.most_versions = max(worker.most_versions, len(worker.versions))
        most = self.schedule.versions_alive(self.plan, worker.stage)
        if len(worker.versions) > most:
            self._fail(w, f"{i} leaves versions {sorted(worker.versions)} alive, expected at most {most}")
        worker.clock += cost.update
        worker.busy += cost.update
        worker.spans[-1] = worker.spans[-1]._replace(
            updates=True, update_time=cost.update, update_wait=worker.clock - cost.update - worker.spans[-1].end
        )
        worker.sample()

    def _release(self, w: int, worker: _Worker, i: Release) -> None:
        self._drop_version(w, i.version, i)
        worker.memory -= self.costs[worker.stage].weights

    # Proofs ------------------------------------------------------------------------------------------------------------

    def _worker(self, w: int, queue: list[Instruction], places: list[int]) -> _Worker:
        (s, replica), start = self.plan.workers[w], self.program.start
        cost = self.costs[s]
        versions = self._versions_between(s, replica, start)
        memory = len(versions) * cost.weights + cost.optimizer + cost.state + cost.sums
        order = list(self.schedule.computations(self.plan, s, replica, start, self.program.end))
        return _Worker(s, replica, queue, places, memory, versions, order)

    def _versions_between(self, s: int, replica: int, batch: int) -> set[int]:
        """Where the pipeline is empty before `batch`: from the version that the next microbatch reads to the newest."""
        oldest = self.schedule.version(self.plan, s, batch * self.plan.microbatches + replica)
        return set(range(oldest, batch * self.plan.updates_per_batch(s) + 1))

    def _backwards_per_update(self, s: int) -> int:
        return self.plan.microbatches_per_update(s) // self.plan.replicas[s]

    def _compute(self, w: int, worker: _Worker, op: Op, i: Any, ready: list[float], seconds: float) -> None:
        k = i.microbatch
        expected = worker.expected[worker.computed] if worker.computed < len(worker.expected) else None
        if expected != Compute(op, worker.stage, k):
            self._fail(w, f"{i}: the schedule's next computation is {expected}")
        version = self.schedule.version(self.plan, worker.stage, k)
        if i.version != version:
            self._fail(w, f"{i} reads version {i.version}, the formula says {version}")
        if version not in worker.versions:
            self._fail(w, f"{i} reads version {version}, alive are {sorted(worker.versions)}")
        worker.computed += 1
        starts = max(worker.clock, *ready)
        worker.clock = starts + seconds
        worker.busy += seconds
        worker.spans.append(Span(op, k, version, starts, worker.clock))

    def _exchange(self, w: int, worker: _Worker, made: int, used: int) -> None:
        """Count the memory of a computation: what it makes is there before what it uses is gone."""
        worker.peak_running = max(worker.peak_running, worker.memory + made + self.costs[worker.stage].temporary)
        worker.memory += made - used
        worker.sample()

    def _after_backward(self, w: int, worker: _Worker, i: Backward | ForwardBackward) -> None:
        if worker.stage > 0:
            self._put(w, "gradient", i.microbatch, worker.clock)
        if not worker.has_sums:
            worker.has_sums = True
            worker.memory += self.costs[worker.stage].sums
        worker.pending += 1
        replicas, every = self.plan.replicas[worker.stage], self.plan.microbatches_per_update(worker.stage)
        if replicas > 1 and (i.microbatch // replicas + 1) % (every // replicas) == 0:
            if worker.pending != every // replicas:
                self._fail(w, f"{i} ends a batch after {worker.pending} backwards, expected {every // replicas}")
            worker.pending, worker.has_sums = 0, False
            self._put(w, "sums", i.microbatch // every, worker.clock)

    def _take_labels(self, w: int, k: int) -> float:
        return self._take(w, "labels", k) if self.workers[w].stage == self.plan.depth - 1 else 0.0

    def _take(self, w: int, kind: str, k: int) -> float:
        ready = self.workers[w].buffers.pop((kind, k), None)
        if ready is None:
            self._fail(w, f"{kind} of microbatch {k} used before it was there, or twice")
        return ready

    def _put(self, w: int, kind: str, k: int, ready: float) -> None:
        if (kind, k) in self.workers[w].buffers:
            self._fail(w, f"{kind} of microbatch {k} made twice")
        self.workers[w].buffers[kind, k] = ready

    def _drop_version(self, w: int, version: int, i: Instruction) -> None:
        if version not in self.workers[w].versions:
            self._fail(w, f"{i} frees version {version}, alive are {sorted(self.workers[w].versions)}")
        self.workers[w].versions.remove(version)

    def _check_end(self) -> None:
        stuck = [w for w, worker in enumerate(self.workers) if worker.position < len(worker.queue)]
        if stuck:
            notes = [(w, f"waits at {self.workers[w].queue[self.workers[w].position]}") for w in stuck]
            raise ProgramError(f"{self.plan.schedule}: deadlock, workers {stuck} wait for each other\n{self._grid(notes)}")
        for w, worker in enumerate(self.workers):
            if worker.computed != len(worker.expected):
                self._fail(w, f"the program ends before {worker.expected[worker.computed]}")
            if worker.buffers:
                self._fail(w, f"left behind: {sorted(worker.buffers)}")
            needed = self._versions_between(worker.stage, worker.replica, self.program.end)
            if worker.versions != needed:
                self._fail(w, f"versions {sorted(worker.versions)} are left, expected {sorted(needed)}")

    def _fail(self, w: int, what: str) -> NoReturn:
        raise ProgramError(f"{self.plan.schedule}, worker {w}: {what}\n{self._grid([(w, what)])}")

    def _grid(self, notes: list[tuple[int, str]]) -> str:
        timeline = tuple(tuple(worker.spans) for worker in self.workers)
        shortest = min((span.end - span.start for spans in timeline for span in spans), default=1.0)
        return format_grid(to_ticks(timeline, shortest or 1.0), notes)

    # Prediction --------------------------------------------------------------------------------------------------------

    def _prediction(self) -> Prediction:
        seconds = max(worker.clock for worker in self.workers)
        busy = sum(worker.busy for worker in self.workers)
        return Prediction(
            timeline=tuple(tuple(worker.spans) for worker in self.workers),
            memory=tuple(_memory(worker, self.costs[worker.stage]) for worker in self.workers),
            seconds=seconds,
            bubble=1 - busy / (seconds * len(self.workers)) if seconds else 0.0,
            peak_bytes=tuple(worker.peak for worker in self.workers),
            peak_bytes_running=tuple(max(worker.peak, worker.peak_running) for worker in self.workers),
            moved_bytes=tuple(worker.moved for worker in self.workers),
            versions_alive=tuple(worker.most_versions for worker in self.workers),
        )


def _memory(worker: _Worker, cost: StageCost) -> tuple[MemorySample, ...]:
    samples = []
    for time, versions, in_flight, total in worker.samples:
        weights = dict.fromkeys(sorted(versions), cost.weights)
        residuals = in_flight * cost.residuals
        other = total - len(versions) * cost.weights - cost.optimizer - cost.sums - residuals
        samples.append(MemorySample(time, weights, cost.optimizer, cost.sums, residuals, other))
    return tuple(samples)


_HANDLERS: dict[type, Callable[[_Simulation, int, _Worker, Any], None]] = {
    Load: _Simulation._load,
    Forward: _Simulation._forward,
    Backward: _Simulation._backward,
    ForwardBackward: _Simulation._forward_backward,
    AllReduce: _Simulation._all_reduce,
    SumSquares: _Simulation._sum_squares,
    Update: _Simulation._update,
    Release: _Simulation._release,
}
