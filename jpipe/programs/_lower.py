"""From compute order to programs: insert loads, transfers, sums, updates and releases, and find the one total order of all workers."""

from collections import deque
from itertools import takewhile
from numbers import Integral
from typing import NamedTuple

from jpipe.errors import InputError, short
from jpipe.plan import Plan
from jpipe.programs._instructions import (
    AllReduce,
    Backward,
    Evaluate,
    Forward,
    ForwardBackward,
    Instruction,
    Load,
    Message,
    Program,
    Receive,
    Release,
    Send,
    SumSquares,
    Update,
)
from jpipe.schedules import SCHEDULES, Compute


def lower(plan: Plan, batches: int, *, begin: int = 0, start: int = 0, drain: bool = True, clips: bool = False) -> Program:
    """Write the programs of all workers for the batches `begin` .. `batches` - 1.

    Computations stand in the order of their simulated start (a forward takes 1, a backward 2, one more where it
    recomputes), transfers and sums where their producers end. All processes derive the same order from the same plan.

    Args:
        plan: what to run.
        batches: one past the last batch whose data is loaded.
        begin: the first batch whose data is loaded; what earlier batches left in flight goes on.
        start: the batch before which the pipeline was last empty.
        drain: whether to finish everything; otherwise stop where batch `batches` would be needed.
        clips: whether updates wait for the norm of all stages' gradients; only for schedules that flush.

    Returns:
        The program; the programs of successive steps, one after the other, are one run.

    Raises:
        InputError: batches out of order, or clipping with a schedule that does not flush.
    """
    if not isinstance(plan, Plan):
        raise InputError(f"lower: expected a jpipe.Plan, found {type(plan).__name__}; make one with Plan.even(…)")
    if not all(isinstance(number, Integral) for number in (batches, begin, start)):
        raise InputError(f"lower: expected integers, found start {short(start)}, begin {short(begin)}, batches {short(batches)}")
    if not 0 <= start <= begin <= batches:
        raise InputError(f"lower: expected 0 ≤ start ≤ begin ≤ batches, found start {start}, begin {begin}, batches {batches}")
    if clips and not SCHEDULES[plan.schedule].flushes:
        raise InputError(f"lower: clips is for schedules that flush, found '{plan.schedule}'")
    run = _Run(plan, start, batches, drain, clips)
    instructions = run.instructions()
    if begin > start:
        before = set(_Run(plan, start, begin, False, clips).instructions())
        instructions = [instruction for instruction in instructions if instruction not in before]
    return Program(plan, start, begin, batches, drain, clips, run.versions(), tuple(instructions))


def batches_until_full(plan: Plan) -> int:
    """After so many batches since the pipeline was empty, every step does the same, one batch later."""
    in_flight = max(SCHEDULES[plan.schedule].in_flight(plan, s) * replicas for s, replicas in enumerate(plan.replicas))
    late = 2 * max(plan.replicas) if max(plan.replicas) > 1 else 0  # a sum, and the update after it, may come so much later
    return -(-(in_flight - 1 + late) // plan.microbatches) + 1


def lower_evaluation(plan: Plan, microbatches: int, batch: int) -> Program:
    """Write the programs that run `microbatches` forward only through all stages, with the weights after `batch` batches."""
    instructions: list[Instruction] = []
    versions = [batch * plan.updates_per_batch(s) for s in range(plan.depth)]
    for diagonal in range(microbatches + plan.depth - 1):
        for s in range(plan.depth):
            k = diagonal - s
            if 0 <= k < microbatches:
                instructions += _loads(plan, s, k)
                instructions.append(Evaluate(plan.worker(s, k), k, versions[s]))
                if s < plan.depth - 1:
                    instructions += _transfer(plan.worker(s, k), plan.worker(s + 1, k), k, "activation")
    return Program(plan, 0, 0, 1, True, False, (), tuple(instructions))


class _Pending(NamedTuple):
    """An update that waits for a sum or a norm, and the version that it retires, if any."""

    batch: int
    retires: int | None


class _Run:
    """The orders of all workers, run with free transfers; every instruction is written down with its time."""

    def __init__(self, plan: Plan, start: int, batches: int, drain: bool, clips: bool) -> None:
        self.plan, self.clips = plan, clips
        self.schedule = SCHEDULES[plan.schedule]
        self.backward_time = [3 if stage.recompute != "none" else 2 for stage in plan.stages]
        workers, stages = range(len(plan.workers)), range(plan.depth)
        self.ready_workers: deque[int] = deque()
        self.clock = [0 for _ in workers]
        self.pending: list[list[_Pending]] = [[] for _ in workers]  # with a second one, the first has to be made before anything else
        self.backwards = [start * plan.microbatches // plan.replicas[s] for s, _ in plan.workers]
        self.updates = [start * plan.updates_per_batch(s) for s, _ in plan.workers]
        self.done: dict[tuple[str, int], dict[int, int]] = {(what, s): {} for what in ("forward", "backward", "sum") for s in stages}
        self.arrived: list[dict[int, list[int]]] = [{} for _ in stages]  # by batch, when each replica had its gradients
        self.blocked: dict[tuple[str, int, int], list[int]] = {}  # who waits for (what, stage, microbatch or batch)
        self.times: list[int] = []
        self.written: list[Instruction] = []
        if self.schedule.flushes:
            for batch in range(start, batches):
                self._empty_to_empty(batch, batch + 1, drain=True)
        else:
            self._empty_to_empty(start, batches, drain)

    def instructions(self) -> list[Instruction]:
        """In order of time, of equal times what moves before what computes, so that a sum is under way while its worker computes on.

        A stable sort keeps the topological order in which they were written.
        """
        computes = [isinstance(instruction, (Load, Forward, Backward, ForwardBackward)) for instruction in self.written]
        return [self.written[i] for i in sorted(range(len(self.times)), key=lambda i: (self.times[i], computes[i]))]

    def versions(self) -> tuple[tuple[int, int], ...]:
        """For each worker the oldest version that a microbatch will still read, and the newest there is."""
        oldest = [
            self.schedule.version(self.plan, s, self.backwards[w] * self.plan.replicas[s] + replica)
            for w, (s, replica) in enumerate(self.plan.workers)
        ]
        return tuple(zip(oldest, self.updates, strict=True))

    def _empty_to_empty(self, first: int, end: int, drain: bool) -> None:
        orders = [self._order(s, replica, first, end, drain) for s, replica in self.plan.workers]
        position = [0 for _ in orders]
        self.updates_before = [first * self.plan.updates_per_batch(s) for s in range(self.plan.depth)]
        self.ready_workers = deque(range(len(orders)))
        while self.ready_workers:
            w = self.ready_workers.popleft()
            while self._settle(w) and position[w] < len(orders[w]) and self._compute(w, orders[w][position[w]]):
                position[w] += 1
        stuck = [w for w, order in enumerate(orders) if position[w] < len(order)]
        if stuck:
            raise AssertionError(f"schedule '{self.plan.schedule}' deadlocks: workers {stuck} wait for each other")
        if drain:
            self._make_pending_updates(end)

    def _order(self, s: int, replica: int, start: int, batches: int, drain: bool) -> list[Compute]:
        """The schedule's order up to the first forward that needs batch `batches`."""
        end = batches * self.plan.microbatches
        order = self.schedule.computations(self.plan, s, replica, start, batches if drain else batches + 1)
        return list(takewhile(lambda entry: entry.op == "B" or entry.microbatch < end, order))

    # One computation ---------------------------------------------------------------------------------------------------

    def _compute(self, w: int, entry: Compute) -> bool:
        """Write down a computation and what follows from it, unless something it needs is not there yet."""
        plan, (op, s, k) = self.plan, entry
        version = self.schedule.version(plan, s, k)
        if op == "B":
            ready = self._when("backward", s + 1, k, w) if s + 1 < plan.depth else 0
        else:
            ready = self._when("forward", s - 1, k, w) if s > 0 else 0
            if ready is not None and plan.replicas[s] > 1:
                summed = self._when("sum", s, version - 1, w) if version > self.updates_before[s] else 0
                ready = None if summed is None else max(ready, summed)
        if ready is None:
            return False
        begins = max(self.clock[w], ready)
        if op == "B":
            self.clock[w] = begins + self.backward_time[s]
            self._write(begins, Backward(w, k, version))
            self._after_backward(w, s, k, version)
            return True
        if self.pending[w] and version > self.pending[w][0].batch:
            self._update(w, begins)
        if op == "FB":
            self.clock[w] = begins + 1 + self.backward_time[s]
            self._write(begins, *_loads(plan, s, k), ForwardBackward(w, k, version))
            self._after_backward(w, s, k, version)
            return True
        self.clock[w] = begins + 1
        self._write(begins, *_loads(plan, s, k), Forward(w, k, version))
        if s < plan.depth - 1:
            self._write(self.clock[w], *_transfer(w, plan.worker(s + 1, k), k, "activation"))
        self._there("forward", s, k, self.clock[w])
        return True

    def _after_backward(self, w: int, s: int, k: int, version: int) -> None:
        plan, ends = self.plan, self.clock[w]
        self.backwards[w] += 1
        if s > 0:
            self._write(ends, *_transfer(w, plan.worker(s - 1, k), k, "gradient"))
        self._there("backward", s, k, ends)
        replicas, every = plan.replicas[s], plan.microbatches_per_update(s)
        next_version = self.schedule.version(plan, s, k + replicas)
        assert next_version - version in (0, 1), "versions advance one by one"
        dead = version if next_version > version else None  # microbatches in flight and to come all read later versions
        ends_batch = (k // replicas + 1) % (every // replicas) == 0
        if replicas == 1 and not self.clips:
            if ends_batch:
                self._write(ends, Update(w, k // every, dead))
                self.updates[w] += 1
            elif dead is not None:
                self._write(ends, Release(w, dead))
            return
        pending = self.pending[w]
        if ends_batch:
            pending.append(_Pending(k // every, None))
        if dead is not None and pending and pending[0].retires is None and (len(pending) == 2 or pending[0].batch == dead):
            pending[0] = _Pending(pending[0].batch, dead)  # the update that is due, or that starts from this version, takes its memory
        elif dead is not None:
            self._write(ends, Release(w, dead))
        if ends_batch and len(pending) == 1:
            self._arrive(w, s, k // every)

    # Sums and updates --------------------------------------------------------------------------------------------------

    def _arrive(self, w: int, s: int, batch: int) -> None:
        """A replica has its gradients of the batch; with the last one of its stage the sum begins."""
        arrived = self.arrived[s].setdefault(batch, [])
        arrived.append(self.clock[w])
        if len(arrived) == self.plan.replicas[s]:
            begins = max(self.arrived[s].pop(batch))
            if self.plan.replicas[s] > 1:
                self._write(begins, *(AllReduce(worker, batch) for worker in self.plan.stage_workers[s]))
            self._there("sum", s, batch, begins)

    def _settle(self, w: int) -> bool:
        """Make the first of two pending updates, so that a worker never holds the gradients of three batches."""
        if len(self.pending[w]) == 2:
            s = self.plan.workers[w][0]
            summed = self._when("sum", s, self.pending[w][0].batch, w)
            if summed is None:
                return False
            self.clock[w] = max(self.clock[w], summed)
            self._update(w, self.clock[w])
            self._arrive(w, s, self.pending[w][0].batch)
        return True

    def _update(self, w: int, time: int) -> None:
        pending = self.pending[w].pop(0)
        self._write(time, Update(w, pending.batch, pending.retires))
        self.updates[w] += 1

    def _make_pending_updates(self, end: int) -> None:
        """Where the pipeline is empty: the norm goes down to stage 0 and up again, and all that waited for it or for a sum update."""
        time, plan, k = max(self.clock), self.plan, end * self.plan.microbatches - 1
        if self.clips:
            first = [workers[0] for workers in plan.stage_workers]
            for s in reversed(range(plan.depth)):
                self._write(time, SumSquares(first[s], end - 1))
                if s > 0:
                    self._write(time, *_transfer(first[s], first[s - 1], k, "squares"))
            for s, workers in enumerate(plan.stage_workers):
                if s > 0:
                    self._write(time, *_transfer(first[s - 1], first[s], k, "norm"))
                for worker in workers[1:]:
                    self._write(time, *_transfer(first[s], worker, k, "norm"))
        for w in range(len(plan.workers)):
            if self.pending[w]:
                self._update(w, time)
        self.clock = [time for _ in self.clock]

    # Bookkeeping -------------------------------------------------------------------------------------------------------

    def _write(self, time: int, *instructions: Instruction) -> None:
        self.written += instructions
        self.times += [time] * len(instructions)

    def _there(self, what: str, s: int, number: int, time: int) -> None:
        self.done[what, s][number] = time
        self.ready_workers.extend(self.blocked.pop((what, s, number), ()))

    def _when(self, what: str, s: int, number: int, w: int) -> int | None:
        """When the output, input gradient or sum was there; a worker that finds none is woken when it is."""
        time = self.done[what, s].get(number)
        if time is None:
            self.blocked.setdefault((what, s, number), []).append(w)
        return time


def _loads(plan: Plan, s: int, k: int) -> list[Instruction]:
    loads: list[Instruction] = []
    if s == 0:
        loads.append(Load(plan.worker(s, k), k, "inputs"))
    if s == plan.depth - 1:
        loads.append(Load(plan.worker(s, k), k, "labels"))
    return loads


def _transfer(source: int, to: int, k: int, message: Message) -> list[Instruction]:
    return [Send(source, k, message, to), Receive(to, k, message, source)]
