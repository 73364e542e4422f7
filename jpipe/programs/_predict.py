"""Predict what a verified program does, for given costs: time, memory and bytes moved."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import Any, NamedTuple

from jpipe.ops import OPS, Op
from jpipe.plan import Kept, Plan
from jpipe.programs._costs import HostLink, Network, Overlap, Passed, StageCost
from jpipe.programs._execution_order import ProgramError
from jpipe.programs._global_norm import last_microbatch
from jpipe.programs._instructions import (
    AddShared,
    Agree,
    AllReduce,
    Compute,
    Fetch,
    Instruction,
    Load,
    Message,
    Offload,
    Program,
    Receive,
    Release,
    Send,
    SumChanges,
    SumSquares,
    TakeShared,
    Update,
    ends_update,
    op_of,
)
from jpipe.programs._timeline import MemorySample, MemoryTimeline, Span, Timeline, format_grid, to_ticks
from jpipe.programs._traffic import Traffic
from jpipe.programs._transfers import HOST, Transfer, transfer_rows
from jpipe.programs._verify import versions_before
from jpipe.schedules import SCHEDULES


@dataclass(frozen=True)
class Prediction:
    """The predicted time, memory and bytes moved of a program.

    Attributes:
        timeline: the spans of each rank, in seconds.
        transfers: the messages between ranks, the sums over replicas and the moves to host memory and back.
        memory: the bytes of each rank, at the beginning and after each of its computations.
        seconds: from the first start to the last end.
        bubble: share of the ranks' time, up to the last end, in which they do not compute.
        held_bytes: for each rank the most bytes of arrays alive after any instruction: weights, optimizer state, accumulators, residuals,
            messages and waiting inputs.
        peak_bytes: the peak memory: the most bytes at any time, with those that exist only while a computation runs.
        moved_bytes: for each rank the bytes it sends to others.
        versions_alive: for each worker the most weight versions alive at a time.
        host_bytes: for each rank the most bytes that it has in host memory (`Plan.offload`).
        host_moved_bytes: for each rank the bytes that it moves to host memory and back.
    """

    timeline: Timeline
    transfers: tuple[Transfer, ...]
    memory: MemoryTimeline
    seconds: float
    bubble: float
    held_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    moved_bytes: tuple[int, ...]
    versions_alive: tuple[int, ...]
    host_bytes: tuple[int, ...]
    host_moved_bytes: tuple[int, ...]

    @property
    def temporary_bytes(self) -> tuple[int, ...]:
        """The part of each rank's peak memory that exists only while a computation runs, `peak_bytes` minus `held_bytes`.

        That is the scratch memory of its programs (`StageCost.temporary`), and results that exist before their inputs are freed.
        """
        return tuple(peak - persistent for peak, persistent in zip(self.peak_bytes, self.held_bytes, strict=True))

    def grid(self, tick: float | None = None, transfers: bool = False) -> str:
        """Return the timeline as text.

        Args:
            tick: in seconds, by default the shortest computation.
            transfers: whether rows for the directions between ranks, to and from host memory, and for the replicas that sum, follow those
                of the ranks: `a3` is the activation of microbatch 3, `g3` its gradient, and `s0` the sum of batch 0 (all letters:
                `Transfer.label`). What takes no time is left out, and so is latency. Each row is rounded to ticks for itself.
        """
        return draw_grid(self.timeline, tick, transfers=self.transfers if transfers else ())


def draw_grid(
    timeline: Timeline, tick: float | None = None, notes: Sequence[tuple[int, str]] = (), transfers: Sequence[Transfer] = ()
) -> str:
    """Return a timeline in seconds as text, with (rank, note) pairs behind the rows; a tick is by default the shortest computation."""
    shortest = min((span.end - span.start for spans in timeline for span in spans), default=1.0)
    tick = tick or shortest or 1.0
    return format_grid(to_ticks(timeline, tick), notes, transfer_rows(transfers, tick))


class _Rank:
    """The clock, the spans and the bytes of one rank."""

    def __init__(self, number: int, has_samples: bool) -> None:
        self.number, self.has_samples = number, has_samples
        self.clock, self.busy, self.moved = 0.0, 0.0, 0
        self.spans: list[Span] = []
        self.workers: list[_Worker] = []
        self.live = self.most_live = self.peak = 0
        self.in_host = self.most_in_host = self.moved_to_host = 0
        self.host_free = {Offload: 0.0, Fetch: 0.0}  # when the link to the host is free, in each direction
        self.samples: list[MemorySample] = []

    def begin(self) -> None:
        """Add up the bytes of all its workers at the beginning."""
        self.live = self.most_live = sum(worker.memory.at_first for worker in self.workers)
        self.in_host = self.most_in_host = sum(worker.memory.cost.optimizer for worker in self.workers if worker.memory.away)
        self.sample()

    def wait(self, until: float) -> None:
        self.clock = max(self.clock, until)

    def add(self, size: int) -> None:
        self.live += size
        if self.live > self.most_live:
            self.most_live = self.live

    def add_in_host(self, size: int) -> None:
        self.in_host += size
        self.most_in_host = max(self.most_in_host, self.in_host)

    def update(self, chunk: int, seconds: float) -> None:
        """Note an update of one of its stages, on the span of the stage's last computation."""
        self.clock += seconds
        self.busy += seconds
        place = next(n for n in range(len(self.spans) - 1, -1, -1) if self.spans[n].chunk == chunk)
        last = self.spans[place]
        self.spans[place] = last._replace(updates=True, update_time=seconds, update_wait=self.clock - seconds - last.end)
        self.sample()

    def sample(self) -> None:
        if not self.has_samples:
            return
        first, *further = (worker.memory for worker in self.workers)
        weights, (optimizer, accumulators, residuals) = first.by_version(), first.parts()
        for memory in further:
            more = memory.by_version()
            weights = {version: weights.get(version, 0) + more.get(version, 0) for version in sorted({*weights, *more})}
            more_optimizer, more_accumulators, more_residuals = memory.parts()
            optimizer, accumulators, residuals = optimizer + more_optimizer, accumulators + more_accumulators, residuals + more_residuals
        other = self.live - sum(weights.values()) - optimizer - accumulators - residuals
        self.samples.append(MemorySample(self.clock, weights, optimizer, accumulators, residuals, other))


class _Memory:
    """The bytes of one worker, which are added to those of its rank."""

    def __init__(self, cost: StageCost, versions: set[int], rank: _Rank, optimizer_in_host: bool) -> None:
        self.cost, self.rank = cost, rank
        self.away: set[tuple[Kept, int]] = {("optimizer", 0)} if optimizer_in_host else set()  # what is in host memory
        self.weights = dict.fromkeys(sorted(versions), cost.trained)  # by version; replaced and not changed: samples share it
        constant = cost.frozen + cost.state + cost.accumulators + cost.sum_error + cost.remembered
        self.at_first = len(versions) * cost.trained + self.optimizer + constant
        self.most_versions = len(versions)
        self.waiting = {"residuals": 0, "stash": 0}  # how many microbatches have left each of these for a later op
        self.accumulates = True  # whether there is memory for gradients: not between a batch set aside and the next backward

    @property
    def optimizer(self) -> int:
        """The bytes of the optimizer state on the device."""
        return 0 if ("optimizer", 0) in self.away else self.cost.optimizer

    def add(self, size: int) -> None:
        self.rank.add(size)

    def move(self, i: Offload | Fetch) -> int:
        """Count something in host memory and not on the device, or the reverse; return its bytes."""
        cost = self.cost
        size = {"optimizer": cost.optimizer, "versions": cost.trained, "residuals": cost.residuals, "stash": cost.stash}[i.what]
        to_host = isinstance(i, Offload)
        (self.away.add if to_host else self.away.remove)((i.what, i.number))
        self.add(-size if to_host else size)
        self.rank.add_in_host(size if to_host else -size)
        self.rank.moved_to_host += size
        return size

    def accumulate(self) -> None:
        if not self.accumulates:
            self.accumulates = True
            self.add(self.cost.accumulators)

    def update(self, version: int, retired: int | None) -> None:
        """Make weights `version`, in the memory of `retired` if there is one."""
        if retired is None:
            self.add(self.cost.trained)
        self.weights = {v: size for v, size in self.weights.items() if v != retired} | {version: self.cost.trained}
        self.most_versions = max(self.most_versions, len(self.weights))

    def by_version(self) -> dict[int, int]:
        """Return the bytes of each version on the device; what all of them share counts with the oldest one."""
        weights = {v: size for v, size in self.weights.items() if ("versions", v) not in self.away} if self.away else self.weights
        if not self.cost.frozen or not weights:
            return weights
        oldest = min(weights)
        return weights | {oldest: weights[oldest] + self.cost.frozen}

    def complete(self, version: int, size: int) -> None:
        """Add bytes to a version; negative ones are still to arrive."""
        self.weights = self.weights | {version: self.weights[version] + size}
        self.add(size)

    def release(self, version: int) -> None:
        self.weights = {v: size for v, size in self.weights.items() if v != version}
        if ("versions", version) in self.away:
            self.away.remove(("versions", version))
            self.rank.add_in_host(-self.cost.trained)
        else:
            self.add(-self.cost.trained)

    def compute(self, outputs: int, inputs: int) -> None:
        """Hold the bytes of outputs and inputs while a computation runs, then only the outputs."""
        self.run(outputs, inputs)
        if self.rank.has_samples:
            self.rank.sample()

    def run(self, outputs: int, inputs: int) -> None:
        """Do the same for a program that is no computation of the timeline."""
        rank = self.rank
        running = rank.live + outputs + self.cost.temporary
        if running > rank.peak:
            rank.peak = running
        self.add(outputs - inputs)

    def parts(self) -> tuple[int, int, int]:
        """Return the bytes of optimizer state, of accumulators, and of residuals and stashes.

        What compressed sums have lost, and what is remembered of rows, is with the optimizer state.
        """
        cost = self.cost
        waiting = dict(self.waiting)
        for what, _ in self.away:
            if what in waiting:
                waiting[what] -= 1
        return (
            self.optimizer + cost.sum_error + cost.remembered,
            cost.accumulators,
            waiting["residuals"] * cost.residuals + waiting["stash"] * cost.stash,
        )


class _Effect(NamedTuple):
    """What an op does at a stage.

    Attributes:
        op: the op.
        needs: the message that it waits for; "": none.
        seconds: how long it takes.
        allocated: the bytes that it makes.
        freed: the bytes that it frees at its end.
        waiting: how many residuals and stashes more there are then.
        makes_output: whether it makes an output for the next stage.
        makes_gradient: whether it makes a gradient for the stage before.
    """

    op: Op
    needs: str
    seconds: float
    allocated: int
    freed: int
    waiting: tuple[tuple[str, int], ...]
    makes_output: bool
    makes_gradient: bool


def _effect(op: Op, cost: StageCost, s: int, depth: int) -> _Effect:
    """Return what an op does at stage s."""
    is_last, left = s == depth - 1, {"residuals": cost.residuals, "stash": cost.stash}
    waiting: dict[str, int] = {kind: 1 for kind in left if kind in op.leaves}
    allocated = sum(left[kind] for kind in waiting) + (cost.gradient if op.gives_gradient else 0)
    if "output" in op.leaves:
        allocated += cost.message if is_last else cost.outputs - cost.kept_outputs
    freed = cost.inputs + cost.labels
    if not op.begins:
        freed = left[op.reads] + (cost.message if op.reads == "residuals" else 0)
        waiting[op.reads] = waiting.get(op.reads, 0) - 1
    return _Effect(
        op=op,
        needs=_MESSAGES[op.reads],
        seconds=cost.seconds(op.name),
        allocated=allocated,
        freed=freed,
        waiting=tuple(waiting.items()),
        makes_output="output" in op.leaves and not is_last,
        makes_gradient=op.gives_gradient and s > 0,
    )


_Key = tuple[str, int]
"""What a worker waits for, or has made: a message and its microbatch, a sum and its batch, or a part of a version and its number."""

_NOT_YET = math.inf
"""The time of what is not known to come yet."""


class _Worker:
    """The messages that one worker waits for, and its memory."""

    def __init__(self, plan: Plan, number: int, cost: StageCost, effects: dict[str, _Effect], rank: _Rank, versions: set[int]) -> None:
        self.number, (self.stage, self.replica) = number, plan.workers[number]
        self.chunk, self.cost, self.rank = plan.rank_workers[plan.rank_of[number]].index(number), cost, rank
        self.memory = _Memory(cost, versions, rank, plan.offloads("optimizer", self.stage))
        self.moved: dict[tuple[str, int], float] = {}  # when what is moved to or from host memory is there
        self.effects = effects  # by op
        self.ready: dict[_Key, float] = {}  # when messages were made or arrived, and sums
        self.updated = 0.0  # when its last update was over
        self.passed: dict[int, list[Passed]] = {}  # by microbatch, what the stage before on the same rank keeps, too
        parts, others = plan.stages[self.stage].sum_parts, plan.stage_workers[self.stage] if plan.shard_optimizer else ()
        self.sums = [_sum_name(part) for part in (range(len(parts)) if parts else (None,))]
        self.shares = [_share_name(other) for other in others if other != number]  # of each version, which other replicas update
        rank.workers.append(self)

    def wait(self, until: float) -> None:
        self.rank.wait(until)

    def compute(self, i: Compute, op: Op, seconds: float) -> None:
        rank = self.rank
        self.ready.pop((self.effects[i.op].needs, i.microbatch), None)
        if self.moved:
            rank.wait(max(self.moved.get(("versions", i.version), 0.0), self.moved.pop((op.reads, i.microbatch), 0.0)))
        starts, rank.clock = rank.clock, rank.clock + seconds
        rank.busy += seconds
        rank.spans.append(Span(op.name, i.microbatch, i.version, starts, rank.clock, False, 0.0, 0.0, self.chunk, i.part))

    def forget(self, version: int) -> None:
        """Remove the times of a version that is no longer alive."""
        self.moved.pop(("versions", version), None)
        for share in self.shares:
            self.ready.pop((share, version), None)


def _sum_name(part: int | None) -> str:
    return "sum" if part is None else f"sum of part {part}"


def _share_name(worker: int) -> str:
    return f"weights of {worker}"


class Predictor:
    """A simulation that adds up the costs of a program's instructions.

    Each rank runs its own instructions in order, up to one that needs a message or a sum of which the time is not known. Messages and sums
    take their ports in the order of the times from which they can begin, so what a rank does does not depend on how its instructions are
    interleaved with those of others.

    Args:
        program: what runs.
        costs: one for each stage.
        network: the link between any two ranks.
        host: that of a rank to its host.
        overlap: what goes on beside the computations of a rank.
        brief: whether to leave out memory over time and transfers.
    """

    def __init__(
        self,
        program: Program,
        costs: Sequence[StageCost],
        network: Network,
        host: HostLink,
        overlap: Overlap = "transfers and sums",
        brief: bool = False,
    ) -> None:
        self._host = host
        self._transfers_block, self._sums_block = overlap == "none", overlap != "transfers and sums"
        self._plan, self._program, self._costs = program.plan, program, costs
        self._averages_state = program.plan.sync_state and SCHEDULES[program.plan.schedule].flushes and program.plan.agree is None
        self._traffic = Traffic(network)
        self._transfers: list[Transfer] = []
        self._is_brief, self._passes = brief, any(cost.passed for cost in costs)
        self._needs = {kind: needs for kind, needs in _NEEDS.items() if kind is not Send or program.global_norm}
        self._bytes = cache(self._find_bytes)
        self._sums_begun: dict[tuple[int, str, int], list[float]] = {}  # by stage, name and batch, when each replica began the sum
        self._met: set[tuple[int, int, str, int]] = set()  # transfers that block, to which one of their ranks has come
        self._now, self._requests = 0.0, list[tuple[Any, ...]]()  # see `_request`
        plan = program.plan
        written = range(len(plan.workers)) if program.workers is None else sorted(program.workers)
        running = {plan.rank_of[w] for w in written}
        self._ranks = [_Rank(rank, not brief and rank in running) for rank in range(len(plan.rank_workers))]
        effects = [{name: _effect(op, cost, s, plan.depth) for name, op in OPS.items() if op.trains} for s, cost in enumerate(costs)]
        self._workers: dict[int, _Worker] = {}
        for w in written:
            s, rank = plan.workers[w][0], self._ranks[plan.rank_of[w]]
            self._workers[w] = _Worker(plan, w, costs[s], effects[s], rank, versions_before(plan, w, program.start))
        self._summing = [[w for w in workers if w in self._workers] for workers in plan.stage_workers]  # by stage, those that begin a sum
        self._num_active = len(running)
        for rank in self._ranks:
            rank.begin()

    def run(self, instructions: Iterable[Instruction]) -> None:
        """Execute instructions, in which those of each rank are in order.

        Raises:
            ProgramError: the ranks deadlock, which verified instructions do not.
        """
        queues: list[list[Instruction]] = [[] for _ in self._ranks]
        for i in instructions:
            queues[self._plan.rank_of[i.worker]].append(i)
        running = [self._execute(rank, queue) for rank, queue in zip(self._ranks, queues, strict=True)]
        for instructions_of_rank in running:
            next(instructions_of_rank, None)
        while self._requests:
            self._now, _, begin, *arguments = heappop(self._requests)
            for rank in begin(*arguments):
                next(running[rank.number], None)
        stuck = [rank for rank, instructions_of_rank in enumerate(running) if next(instructions_of_rank, "done") != "done"]
        if stuck:
            grid = draw_grid(self.timeline(), notes=[(rank, "waits") for rank in stuck])
            raise ProgramError(f"{self._plan.schedule}: deadlock, ranks {stuck} wait for each other\n{grid}")

    def _execute(self, rank: _Rank, instructions: Iterable[Instruction]) -> Iterator[None]:
        """Execute the instructions of a rank, and pause while the time of something that it needs is not known."""
        for i in instructions:
            worker, kind = self._workers[i.worker], type(i)
            needs = self._needs.get(kind)
            for key in needs(self, worker, i) if needs else ():
                while (time := worker.ready.get(key, 0.0)) == _NOT_YET:
                    yield
                if kind is not Send:  # which goes on beside the computations
                    rank.wait(time)
            blocking = _HANDLERS[kind](self, worker, i)
            if blocking is not None:
                while (time := worker.ready[blocking]) == _NOT_YET:
                    yield
                rank.wait(time)

    def _request(self, ready: float, order: tuple[Any, ...], begin: Callable[..., Iterable[_Rank]], *arguments: object) -> None:
        """Have something begin in the order of time. Of equal times, messages come before sums: by then all sums of that time are known.

        Args:
            ready: from when on it can begin.
            order: what decides between equal times, different for all requests.
            begin: begins it, and returns the ranks that may wait for it.
            arguments: of `begin`.
        """
        heappush(self._requests, (max(ready, self._now), order, begin, *arguments))

    def _needs_of_compute(self, worker: _Worker, i: Compute) -> list[_Key]:
        needed = [(worker.effects[i.op].needs, i.microbatch)]  # which the first part of several takes
        return needed + [(share, i.version) for share in worker.shares] if worker.shares else needed

    def _needs_of_send(self, worker: _Worker, i: Send) -> list[_Key]:
        return [("norm", i.microbatch)] if i.message == "norm" else []  # which may still be on its way to the sender

    def _needed_sums(self, worker: _Worker, i: Update | SumSquares | TakeShared) -> list[_Key]:
        return [(name, i.batch) for name in worker.sums]

    def _needs_of_squares(self, worker: _Worker, i: SumSquares) -> list[_Key]:
        return [*self._needed_sums(worker, i), ("squares", last_microbatch(self._plan, i.batch))]

    def _needs_of_shared(self, worker: _Worker, i: AddShared) -> list[_Key]:
        k = last_microbatch(self._plan, i.batch)
        return [(f"shared of stage {s}", k) for s in self._program.shared[i.group] if s != worker.stage]

    def _needs_of_update(self, worker: _Worker, i: Update) -> list[_Key]:
        norm = [("norm", last_microbatch(self._plan, i.batch))] if self._program.global_norm else []
        return [*self._needed_sums(worker, i), *norm]

    def _needs_of_agreement(self, worker: _Worker, i: Agree) -> list[_Key]:
        return [("changes", i.batch)]

    def timeline(self) -> Timeline:
        """Return the spans of each rank so far."""
        return tuple(tuple(rank.spans) for rank in self._ranks)

    def prediction(self) -> Prediction:
        """Return the prediction from all instructions so far."""
        ranks = self._ranks
        seconds = max(rank.clock for rank in ranks)
        busy = sum(rank.busy for rank in ranks)
        return Prediction(
            timeline=self.timeline(),
            transfers=tuple(self._transfers),
            memory=tuple(tuple(rank.samples) for rank in ranks),
            seconds=seconds,
            bubble=1 - busy / (seconds * self._num_active) if seconds else 0.0,
            held_bytes=tuple(rank.most_live for rank in ranks),
            peak_bytes=tuple(max(rank.most_live, rank.peak) for rank in ranks),
            moved_bytes=tuple(rank.moved for rank in ranks),
            versions_alive=tuple(
                self._workers[w].memory.most_versions if w in self._workers else 0 for w in range(len(self._plan.workers))
            ),
            host_bytes=tuple(rank.most_in_host for rank in ranks),
            host_moved_bytes=tuple(rank.moved_to_host for rank in ranks),
        )

    def _load(self, worker: _Worker, i: Load) -> None:
        worker.memory.add(worker.cost.inputs if i.data == "inputs" else worker.cost.labels)

    def _compute(self, worker: _Worker, i: Compute) -> None:
        effect, memory, k = worker.effects[i.op], worker.memory, i.microbatch
        if i.part is None:
            worker.compute(i, effect.op, effect.seconds)
        elif not self._is_last_part(worker, i):
            return
        if effect.makes_output:
            worker.ready["activation", k] = worker.rank.clock
        if not self._is_brief:
            for kind, change in effect.waiting:
                memory.waiting[kind] += change
        memory.compute(effect.allocated, effect.freed - (self._bytes_still_used(worker, k, effect.op.parts) if self._passes else 0))
        if effect.makes_gradient:
            worker.ready["gradient", k] = worker.rank.clock
        if effect.op.finishes:
            self._accumulate(worker, k)

    def _is_last_part(self, worker: _Worker, i: Compute) -> bool:
        """Compute a part, and return whether it is the last; until then all counts that the whole op reads, and all residuals."""
        cost, memory, stage = worker.cost, worker.memory, self._plan.stages[worker.stage]
        part, kept = i.part or 0, OPS[i.op].begins and len(stage.sum_parts) > 1  # by the first part, with the forward, for the later ones
        worker.compute(i, op_of(i, self._plan), cost.seconds_of_part(i.op, part, stage))
        worker.ready[f"part {part}", i.microbatch // self._plan.microbatches_per_update(worker.stage)] = worker.rank.clock
        if part == len(stage.sum_parts) - 1:
            memory.waiting["residuals"] -= kept
            memory.add(-cost.residuals if kept else 0)
            return True
        memory.accumulate()
        memory.waiting["residuals"] += kept and not part
        memory.compute(cost.residuals if kept and not part else 0, 0)
        return False

    def _bytes_still_used(self, worker: _Worker, k: int, computed: str) -> int:
        """Return the bytes that a worker frees after computing these parts, and another worker of its rank still keeps."""
        still_used = 0
        for receiver, side in ((worker, "receiver"), (self._next_on_rank(worker), "sender")):
            if receiver is not None and k in receiver.passed:
                remaining = [arrays for arrays in receiver.passed[k] if getattr(arrays, side) not in computed]
                still_used += sum(arrays.size for arrays in receiver.passed[k]) - sum(arrays.size for arrays in remaining)
                receiver.passed[k] = remaining
                if not remaining:
                    del receiver.passed[k]
        return still_used

    def _next_on_rank(self, worker: _Worker) -> _Worker | None:
        """Return the worker of the next stage, if it is on the same rank."""
        return next((other for other in worker.rank.workers if other.stage == worker.stage + 1), None)

    def _accumulate(self, worker: _Worker, k: int) -> None:
        """Add the gradients of a microbatch to those of its batch, which may be set aside at its end."""
        worker.memory.accumulate()
        if self._program.sets_aside[worker.stage] and ends_update(self._plan, worker.stage, k):
            worker.memory.accumulates = False

    def _send(self, worker: _Worker, i: Send) -> _Key | None:
        peer, key = self._workers[i.to], (i.message, i.microbatch)
        freed, size, _ = self._bytes(i.message, worker, peer)
        worker.memory.add(-freed)
        if i.message == "weights":
            ready = worker.updated
        else:
            ready = worker.ready[key] if i.message in ("norm", "shared") else worker.ready.pop(key)  # the worker keeps these
        received = self._received(i, worker, peer)
        if worker.rank is peer.rank:
            peer.ready[received] = ready
            if i.message == "activation" and peer.cost.passed:
                peer.passed[i.microbatch] = list(peer.cost.passed)
            return None
        worker.rank.moved += size
        if self._transfers_block:
            worker.ready[held := (f"{i.message} to {i.to}", i.microbatch)] = _NOT_YET
            self._meet(received, i, worker, peer, size)
            return held
        self._request(ready, (0, i.worker, i.to, i.message, i.microbatch), self._transfer, received, i, worker, peer, ready, size)
        return None

    def _receive(self, worker: _Worker, i: Receive) -> _Key | None:
        sender = self._workers[i.source]
        key, (_, size, arrives) = self._received(i, sender, worker), self._bytes(i.message, sender, worker)
        worker.ready.setdefault(key, _NOT_YET)
        if i.message == "weights":
            worker.memory.complete(key[1], arrives)
        else:
            worker.memory.add(arrives)
        if sender.rank is worker.rank or not self._transfers_block:
            return None
        self._meet(key, i, sender, worker, size)
        return key

    def _find_bytes(self, message: Message, sender: _Worker, receiver: _Worker) -> tuple[int, int, int]:
        """Return the bytes that a message frees at its sender, its size, and what it adds at its receiver."""
        match message:
            case "activation":
                passed = receiver.cost.passed if sender.rank is receiver.rank else ()
                arrives = receiver.cost.inputs - sum(arrays.size for arrays in passed)
                return sender.cost.outputs - sender.cost.kept_outputs, sender.cost.outputs, arrives
            case "gradient":
                return sender.cost.gradient, sender.cost.gradient, receiver.cost.message
            case "squares":
                squares = self._squares_bytes(sender.stage)
                return squares, 0, squares  # too little to take time beyond the latency
            case "shared":
                shared = self._shared_bytes(sender.stage, receiver.stage)
                return 0, shared, shared
            case "weights":
                updated = self._updated_bytes(sender)
                return 0, updated, updated
            case _:
                return 0, 0, 0

    def _received(self, i: Send | Receive, sender: _Worker, receiver: _Worker) -> _Key:
        """Return what a message is among those that its receiver waits for."""
        if i.message == "shared":
            return f"shared of stage {sender.stage}", i.microbatch
        if i.message == "weights":
            return _share_name(sender.number), i.microbatch // self._plan.microbatches_per_update(receiver.stage) + 1
        return i.message, i.microbatch

    def _meet(self, received: _Key, i: Send | Receive, sender: _Worker, receiver: _Worker, size: int) -> None:
        """Note that one rank has come to a transfer for which both wait; it begins when the other one has come, too."""
        transfer = sender.number, receiver.number, str(i.message), i.microbatch
        if transfer not in self._met:
            self._met.add(transfer)
            return
        self._met.remove(transfer)
        ready = max(sender.rank.clock, receiver.rank.clock)
        self._request(ready, (0, *transfer), self._transfer, received, i, sender, receiver, ready, size)

    def _transfer(
        self, received: _Key, i: Send | Receive, sender: _Worker, receiver: _Worker, ready: float, size: int
    ) -> tuple[_Rank, ...]:
        """Begin a transfer that can begin at `ready`, and return the ranks that may wait for it."""
        ranks = sender.rank.number, receiver.rank.number
        times = _, _, arrival = self._traffic.send(*ranks, ready, size)
        if not self._is_brief:
            self._transfers.append(Transfer(i.message, ranks, i.microbatch, *times, size))
        receiver.ready[received] = arrival
        if not self._transfers_block:
            return (receiver.rank,)
        sender.ready[f"{i.message} to {receiver.number}", i.microbatch] = arrival
        return sender.rank, receiver.rank

    def _all_reduce(self, worker: _Worker, i: AllReduce) -> _Key | None:
        if self._averages_state and not i.part:
            worker.memory.add(worker.cost.state)  # the mean, until the update replaces the worker's own by it
        stage, cost, computed = self._plan.stages[worker.stage], worker.cost, worker.rank.clock
        if i.part is not None:
            computed = worker.ready.pop((f"part {i.part}", i.batch))
        size = cost.accumulators if i.part is None else cost.accumulators_of_part(i.part, stage)
        sent = cost.compressed_sums[i.part or 0] if cost.compressed_sums else None
        if sent is not None:
            # Gradients, then what all replicas have sent, then their sum. They are taken to come together.
            worker.memory.run(stage.replicas * sent, stage.replicas * sent)
        name = _sum_name(i.part)
        self._begin_sum(worker, "sum", (name, i.batch), worker.rank.clock if self._sums_block else computed, size, sent)
        return (name, i.batch) if self._sums_block else None

    def _begin_sum(self, worker: _Worker, what: str, key: _Key, ready: float, summed_bytes: float, sent: int | None = None) -> None:
        """Note that a replica has begun a sum, which takes place when all have.

        Args:
            worker: the replica.
            what: is summed.
            key: what the replicas wait for.
            ready: from when on this replica can.
            summed_bytes: of the sum.
            sent: the compressed bytes that a replica sends to each other one; None: they are not compressed.
        """
        worker.ready[key] = _NOT_YET
        begun = self._sums_begun.setdefault((worker.stage, *key), [])
        begun.append(ready)
        if len(begun) == len(self._summing[worker.stage]):
            last = max(self._sums_begun.pop((worker.stage, *key)))
            self._request(last, (1, worker.stage, *key), self._sum, what, worker.stage, key, last, summed_bytes, sent)

    def _sum(self, what: str, s: int, key: _Key, ready: float, summed_bytes: float, sent: int | None) -> list[_Rank]:
        """Sum over the replicas of stage s, in a ring, from `ready` on, and return the ranks that may wait for it.

        What is compressed goes around once, and each replica adds it up; otherwise shares go around, and then their sums.
        """
        replicas, summing = self._plan.stage_workers[s], [self._workers[w] for w in self._summing[s]]
        others = len(replicas) - 1
        size = 2 * others / len(replicas) * summed_bytes if sent is None else others * sent
        ranks = tuple(self._plan.rank_of[w] for w in replicas)
        times = _, _, summed = self._traffic.all_reduce(ranks, ready, size, rounds=2 if sent is None else 1)
        if not self._is_brief:
            self._transfers.append(Transfer(what, ranks, key[1], *times, size))
        for worker in summing:
            worker.rank.moved += round(size)
            worker.ready[key] = summed
        return [worker.rank for worker in summing]

    def _sum_changes(self, worker: _Worker, i: SumChanges) -> None:
        worker.memory.add(worker.cost.trained)  # the changes, then their mean
        self._begin_sum(worker, "changes", ("changes", i.batch), worker.rank.clock, worker.cost.trained)

    def _agree(self, worker: _Worker, i: Agree) -> None:
        worker.ready.pop(("changes", i.batch))
        worker.memory.add(-worker.cost.trained)

    def _take_shared(self, worker: _Worker, i: TakeShared) -> None:
        worker.ready["shared", last_microbatch(self._plan, i.batch)] = worker.rank.clock
        worker.memory.add(sum(worker.cost.shared))

    def _add_shared(self, worker: _Worker, i: AddShared) -> None:
        """Nothing remains to be done once the gradients of the other stages have come."""

    def _shared_bytes(self, s: int, other: int) -> int:
        """Return the size of the shared gradients that one stage sends to another."""
        sizes = zip(self._program.shared, self._costs[s].shared, strict=False)
        return sum(size for stages, size in sizes if {s, other} <= set(stages))

    def _updated_bytes(self, worker: _Worker) -> int:
        """Return the size of the weights that a replica updates for all."""
        return worker.cost.updated[worker.replica] if worker.cost.updated else 0

    def _squares_bytes(self, s: int) -> int:
        """Return the size of the sums of squares of a stage and all later ones, which stage s sends on."""
        return sum(cost.squares for cost in self._costs[s:])

    def _sum_squares(self, worker: _Worker, i: SumSquares) -> None:
        k = last_microbatch(self._plan, i.batch)
        if worker.ready.pop(("squares", k), None) is not None:
            worker.memory.add(-self._squares_bytes(worker.stage + 1))
        if worker.stage > 0:
            worker.memory.add(self._squares_bytes(worker.stage))
        worker.ready["squares" if worker.stage > 0 else "norm", k] = worker.rank.clock

    def _update(self, worker: _Worker, i: Update) -> None:
        cost, memory = worker.cost, worker.memory
        for name in worker.sums:
            worker.ready.pop((name, i.batch), None)
        if self._averages_state and self._plan.replicas[worker.stage] > 1:
            memory.add(-cost.state)
        if memory.accumulates and self._program.sets_aside[worker.stage]:
            memory.add(-cost.accumulators)
        memory.accumulates = True
        sharing = {s for stages in self._program.shared if worker.stage in stages for s in stages} - {worker.stage}
        if sharing:
            k = last_microbatch(self._plan, i.batch)
            memory.add(-sum(cost.shared) - sum(self._shared_bytes(s, worker.stage) for s in sharing))
            for kind in ("shared", *(f"shared of stage {s}" for s in sharing)):
                worker.ready.pop((kind, k))
        if worker.moved:
            worker.wait(worker.moved.get(("optimizer", 0), 0.0))
            for version in (i.batch, i.batch if i.retires is None else i.retires):
                worker.wait(worker.moved.get(("versions", version), 0.0))
        memory.update(i.batch + 1, i.retires)
        if i.retires is not None:
            worker.forget(i.retires)
        if cost.updated:
            memory.complete(i.batch + 1, self._updated_bytes(worker) - sum(cost.updated))
        worker.rank.update(worker.chunk, cost.update)
        worker.updated = worker.rank.clock

    def _release(self, worker: _Worker, i: Release) -> None:
        worker.memory.release(i.version)
        worker.forget(i.version)

    def _move(self, worker: _Worker, i: Offload | Fetch) -> None:
        """Move something over the link to the host: after what was moved before in this direction, and once it is there itself."""
        rank, link, key = worker.rank, self._host(worker.rank.number), (i.what, i.number)
        begins = max(rank.clock, rank.host_free[type(i)], worker.moved.get(key, 0.0))
        size = worker.memory.move(i)
        rank.host_free[type(i)] = sent = begins + size / link.bandwidth
        worker.moved[key] = sent + link.latency
        if not self._is_brief:
            ranks = (rank.number, HOST) if isinstance(i, Offload) else (HOST, rank.number)
            self._transfers.append(Transfer(i.what, ranks, i.number, begins, sent, worker.moved[key], size))
        if self._transfers_block:
            rank.wait(worker.moved[key])


_MESSAGES = {"inputs": "activation", "residuals": "gradient", "stash": ""}
"""The message that an op waits for, by what it reads."""

_NEEDS: dict[type, Callable[[Predictor, _Worker, Any], Sequence[_Key]]] = {
    Compute: Predictor._needs_of_compute,
    Send: Predictor._needs_of_send,
    TakeShared: Predictor._needed_sums,
    AddShared: Predictor._needs_of_shared,
    SumSquares: Predictor._needs_of_squares,
    Update: Predictor._needs_of_update,
    Agree: Predictor._needs_of_agreement,
}
"""What is to come before an instruction."""

_HANDLERS: dict[type, Callable[[Predictor, _Worker, Any], _Key | None]] = {
    Load: Predictor._load,
    Compute: Predictor._compute,
    Send: Predictor._send,
    Receive: Predictor._receive,
    AllReduce: Predictor._all_reduce,
    TakeShared: Predictor._take_shared,
    AddShared: Predictor._add_shared,
    SumSquares: Predictor._sum_squares,
    Update: Predictor._update,
    SumChanges: Predictor._sum_changes,
    Agree: Predictor._agree,
    Release: Predictor._release,
    Offload: Predictor._move,
    Fetch: Predictor._move,
}
"""What an instruction does; for what its rank then waits, if for anything."""
