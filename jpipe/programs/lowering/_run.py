"""Run the computations of all workers in the order of their schedule, and write each instruction with its time."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from jpipe._frozen import FrozenMapping
from jpipe.capabilities.protocol import hooks, made
from jpipe.capabilities.registry import programs_of
from jpipe.errors import InputError, Problem
from jpipe.ops import OPS, Op
from jpipe.plan import Plan, repeats_forward
from jpipe.programs._execution_order import ProgramError
from jpipe.programs._instructions import (
    Compute,
    Instruction,
    Program,
)
from jpipe.programs._route import route_of
from jpipe.programs._timeline import Span, format_grid
from jpipe.programs.lowering._listing import Listing
from jpipe.programs.lowering._progress import Availability, PendingUpdates, Rank, Results, Worker
from jpipe.schedules import SCHEDULES, Action


class _Effect(NamedTuple):
    """What an op needs and computes at a stage."""

    op: Op  # the op
    ticks: int  # the ticks that it takes
    needs: Results | None  # the outputs or gradients of another stage for which it waits; None if it waits for neither
    output: Results | None  # the outputs of the stage, if the op computes an output for another stage; otherwise None
    gradient: Results | None  # the input gradients of the stage, if the op computes one for another stage; otherwise None
    loads: bool  # whether inputs or labels are loaded before it


class Run:
    """A run of the computations of all workers in order, with transfers that take no time. It writes instructions with their times.

    It can continue from batch to batch. The times do not depend on the choice of `workers`.

    Args:
        plan: the plan to run.
        start: the batch before which the pipeline is empty.
        last: an upper limit of the batches to which the run continues.
        uses: as in `Program`.
        workers: the workers to write instructions for; None: all.
        alike: whether to run only the first replica of each stage if all replicas do the same; see `Listing`.
    """

    def __init__(
        self,
        plan: Plan,
        start: int,
        last: int,
        uses: FrozenMapping[Any],
        workers: Collection[int] | None = None,
        *,
        alike: bool = True,
    ) -> None:
        self.plan, self.start, self.last, self.uses = (plan := plan.counted), start, last, uses
        self.schedule, self.depth, self.replicas = SCHEDULES[plan.schedule], plan.depth, plan.replicas
        self.sums = [plan.sums_gradients(s) for s in range(plan.depth)]  # whether updates wait for a sum over replicas
        self.every = [plan.microbatches_per_update(s) for s in range(plan.depth)]  # microbatches before an update
        self.each = [every // count for every, count in zip(self.every, self.replicas, strict=True)]  # the same for one replica
        used = programs_of(plan, uses)
        self.unit = max((unit(plan) for unit in hooks("unit", used)), default=1)  # ticks of a forward
        again = [int(repeats_forward(stage.recompute)) for stage in plan.stages]  # by stage, whether a backward repeats the forward
        self.ticks: dict[tuple[str, int], int] = {}  # the effect of an op at a stage
        for (name, op), s in itertools.product(OPS.items(), range(plan.depth)):
            self.ticks[name, s] = self.unit * (len(op.parts) + (again[s] if op.gives_gradient else 0))
        # Without a flush, a rank's last chunk may compute a microbatch only after the step of its batch.
        several = not self.schedule.flushes and plan.depth > len(plan.pipeline_ranks)
        self.labels_with = 0 if several else plan.depth - 1
        waiting = {s for waits in hooks("waits", used) for s in waits(plan, uses)}
        self.waits = [s in waiting for s in range(plan.depth)]  # whether updates wait for other stages
        self.route = route_of(plan) if any(self.waits) and not self.schedule.flushes else None
        self.routed = [self.route is not None and wait for wait in self.waits]  # whether updates are made at the times of the route
        self.version = self.schedule.version if plan.flush_first else self.schedule.formula
        # With a route, one replica of each stage sends messages for all.
        self.alike = alike and plan.replicas[0] > 1 and len(set(plan.replicas)) == 1 and self.route is None
        ranks = [Rank(rank) for rank in range(len(plan.rank_workers))]
        self.workers = [Worker(plan, w, start, ranks[plan.rank_of[w]]) for w, (_, j) in enumerate(plan.workers) if not (self.alike and j)]
        self.worker_at = {(worker.stage, worker.rank.number): worker for worker in self.workers}
        self.rank_workers: dict[int, list[Worker]] = {}
        for rank, (p, j) in enumerate(plan.rank_positions):
            if not (self.alike and j):
                self.rank_workers[rank] = [self.worker_at[s, rank] for s in plan.pipeline_ranks[p]]
        self.of_stage = {rank: {worker.stage: worker for worker in workers} for rank, workers in self.rank_workers.items()}
        self.available, self.listing = Availability(), Listing(plan, workers, self.alike)
        self.effects = [{name: self._effect(op, s) for name, op in OPS.items()} for s in range(plan.depth)]  # by stage
        # By stage, whether its computations are written, and whether its transfers to the next stage are.
        self.written = [workers is None or not set(plan.stage_workers[s]).isdisjoint(workers) for s in range(plan.depth)]
        self.linked = [before or after for before, after in pairwise(self.written)] + [False]
        self.is_whole = workers is None and not self.alike  # whether the listing has all instructions since the start
        lowerings = made("lower", used, self)
        self._before_compute, self._settle = hooks("before_compute", lowerings), hooks("settle", lowerings)
        self._after_output, self._after_backward = hooks("after_output", lowerings), hooks("after_backward", lowerings)
        self._needed, self._version_ready = hooks("needed", lowerings), hooks("version_ready", lowerings)
        self._needed_for_sum, self._complete_sum = hooks("needed_for_sum", lowerings), hooks("complete_sum", lowerings)
        self._drain, self._drained = hooks("drain", lowerings), hooks("drained", lowerings)
        self._writers = hooks("write", lowerings)
        self.updates = PendingUpdates(plan, self.available, self.listing, lowerings, self.routed, start, self.alike)
        self.end = start  # one past the last batch to load
        self.first_free = max(start, plan.flush_first)  # the first batch of the part without a flush
        after = last + self.schedule.period(plan)
        # By rank: the further computations in the part without a flush, the order so far, and the position in this order.
        self.following: dict[int, Iterator[Action]] = {rank: self._actions(rank, self.first_free, after) for rank in self.rank_workers}
        self.held_back: dict[int, list[Action]] = {}  # the next entry, if it needs the next batch
        self.orders: dict[int, list[Action]] = {rank: [] for rank in self.rank_workers}
        self.position = dict.fromkeys(self.rank_workers, 0)

    def program(self, batches: int, drain: bool) -> Program:
        """Continue as `go_on` does, and return the program of this part."""
        begin, ended, updated = self.end, self.ended(), self.updated()
        instructions = self.go_on(batches, drain)
        return Program(
            self.plan,
            self.start,
            begin,
            batches,
            drain,
            self.uses,
            self.separates_sums(),
            self.versions(),
            range(ended, self.ended()),
            tuple(map(range, updated, self.updated())),
            tuple(instructions),
            self.listing.workers,
        )

    def go_on(self, batches: int, drain: bool) -> list[Instruction]:
        """Compute up to the first forward that needs batch `batches`, drain the pipeline if requested, and return the new instructions.

        The run goes from batch to batch, so that a long run equals the programs of its steps, one after the other.
        """
        while self.end < batches:
            if self.schedule.flushes_after(self.plan, self.end):
                self._compute_and_drain(self.end, self.end + 1)
                self.orders, self.position = {rank: [] for rank in self.rank_workers}, dict.fromkeys(self.rank_workers, 0)
            else:
                for rank in self.rank_workers:
                    self._extend_order(rank, (self.end + 1) * self.plan.microbatches)
                self._compute_all()
            self.end += 1
        if drain and self.first_free < batches and not self.schedule.flushes:
            self._compute_and_drain(self.first_free, batches)
        self.is_whole = False
        return self.listing.take()

    def _compute_and_drain(self, first: int, end: int) -> None:
        """Compute the remaining computations of the batches `first` .. `end` - 1, so that the pipeline is empty."""
        self.orders = {rank: [*self._actions(rank, first, end)] for rank in self.rank_workers}
        self._compute_all()
        self._check_done(end)
        self._update_all()

    def separates_sums(self) -> tuple[bool, ...]:
        """Return `Program.separates_sums`: whether updates wait for a sum over replicas or, without a flush, for other stages."""
        return tuple(sums or (self.route is not None and self.waits[s]) for s, sums in enumerate(self.sums))

    def versions(self) -> tuple[tuple[int, int], ...]:
        """Return for each worker the oldest version that a microbatch will still read, and the newest one."""
        slices, replicas = self.plan.row_slices, self.plan.replicas
        following = [(worker.backwards // slices * replicas[worker.stage] + worker.replica) * slices for worker in self.workers]
        if not self.plan.stash:
            following = [worker.backwards + len(worker.in_flight) for worker in self.workers]
        versions = [
            (self.schedule.version(self.plan, worker.stage, k), worker.updates) for worker, k in zip(self.workers, following, strict=True)
        ]
        return tuple(version for version in versions for _ in range(self.plan.replicas[0] if self.alike else 1))

    def updated(self) -> list[int]:
        """Return for each stage the number of batches by which it has been updated."""
        plan = self.plan
        first = [self.worker_at[s, plan.rank_of[workers[0]]] for s, workers in enumerate(plan.stage_workers)]
        return [worker.updates // plan.updates_per_batch(s) for s, worker in enumerate(first)]

    def ended(self) -> int:
        """Return the number of batches for which the last stage has completed the gradients, over all replicas."""
        plan, s = self.plan, self.plan.depth - 1
        if self.sums[s]:
            return self.updates.begun[s] // plan.updates_per_batch(s)
        worker = self.worker_at[s, plan.rank_of[plan.stage_workers[s][0]]]
        return worker.backwards // plan.microbatches if self.separates_sums()[s] else self.updated()[s]

    def _actions(self, rank: int, first: int, end: int) -> Iterator[Action]:
        return self.schedule.computations(self.plan, *self.plan.rank_positions[rank], first, end)

    def _extend_order(self, rank: int, end: int) -> None:
        """Extend the order of a rank up to its first forward of microbatch `end` or a later one."""
        order = self.orders[rank]
        for entry in itertools.chain(self.held_back.pop(rank, ()), self.following[rank]):
            if entry.microbatch >= end and entry.is_forward:
                self.held_back[rank] = [entry]
                break
            order.append(entry)

    def _compute_all(self) -> None:
        """Compute the computations in the orders of all ranks, as far as possible.

        All ranks begin at the same time, so that the instructions and their order depend only on what the pipeline holds.
        """
        time = max(worker.clock for worker in self.workers)
        for worker in self.workers:
            worker.clock = time
        ready = self.available.wake(self.rank_workers)
        while ready:
            rank = ready.popleft()
            workers, order, n = self.rank_workers[rank], self.orders[rank], self.position[rank]
            of_stage = self.of_stage[rank]
            while self._settled(workers) and n < len(order) and self._compute(order[n], of_stage[order[n].stage]):
                n = self.position[rank] = n + 1

    def _check_done(self, end: int) -> None:
        """Check that all ranks have come to the ends of their orders; the pipeline is empty before batch `end`."""
        waiting = {rank: order[self.position[rank]] for rank, order in self.orders.items() if self.position[rank] < len(order)}
        if waiting:
            raise self._deadlock(waiting, end)

    def _deadlock(self, waiting: dict[int, Action], end: int) -> InputError | ProgramError:
        """Return the error for ranks that wait for each other before the pipeline is empty at batch `end`; its message shows where."""
        plan, rows = self.plan, [list[Span]() for _ in self.plan.rank_workers]
        if not self.is_whole:
            try:
                Run(plan, self.start, end, self.uses, alike=False).go_on(end, True)
            except (InputError, ProgramError) as error:
                return error
        begun: dict[tuple[int, str, int], tuple[Compute, int]] = {}
        for i, time in self.listing.computations():
            begun.setdefault((i.worker, i.op, i.microbatch), (i, time))
        for i, time in begun.values():
            rank, (s, _) = plan.rank_of[i.worker], plan.workers[i.worker]
            chunk = plan.rank_workers[rank].index(i.worker)
            rows[rank].append(Span(i.op, i.microbatch, i.version, time, time + self.ticks[i.op, s], chunk=chunk))
        notes = [(rank, f"waits for what {op} of microbatch {k} at stage {s} needs") for rank, (op, s, k) in waiting.items()]
        what, grid = f"the order deadlocks, ranks {list(waiting)} wait for each other", format_grid(rows, notes)
        if plan.row_slices > 1 and len(set(self.replicas)) > 1:
            expected, found = "slices for which the order does not deadlock", f"replicas {list(self.replicas)} and {plan.row_slices} slices"
            return InputError(where="plan", key="slices", expected=expected, found=found, change="use equal replicas, or fewer slices")
        if plan.order is None:
            return ProgramError(f"{plan.schedule}: {what}\n{grid}")
        expected = "expected an order in which each computation comes after what it needs, on all ranks"
        change = "move forwards or backwards for inputs that another rank waits for to the front, or use jpipe.schedules.greedy_order"
        return InputError(Problem(f"{expected}; {what}", "plan", "order", change=change), *grid.splitlines())

    def _effect(self, op: Op, s: int) -> _Effect:
        of, needs, is_last = self.available.of, None, s == self.depth - 1
        if op.begins and s > 0:
            needs = of("output", s - 1)
        if op.reads == "residuals" and not is_last:
            needs = of("gradient", s + 1)
        output = of("output", s) if "output" in op.leaves and not is_last else None
        gradient = of("gradient", s) if op.gives_gradient and s > 0 else None
        return _Effect(op, self.ticks[op.name, s], needs, output, gradient, op.begins and s in (0, self.labels_with))

    def _compute(self, entry: Action, worker: Worker) -> bool:
        """Write a computation of a worker and the instructions that follow from it; return False if something that it needs is missing."""
        name, s, k = entry
        effect, of_rank = self.effects[s][name], worker.rank
        op, begins = effect.op, of_rank.clock
        if effect.needs is not None:
            received = effect.needs.times.get(k)
            if received is None:
                effect.needs.wait(k, of_rank.number)
                return False
            if received > begins:
                begins = received
        if op.finishes and not op.begins:
            version = worker.in_flight[0] if self.plan.stash else worker.updates
        else:
            version = self.version(self.plan, s, k)
        if op.begins:
            if version > worker.read or self.routed[s]:
                weights = self._weights_ready(worker, k, version)
                if weights is None:
                    return False
                begins = max(begins, weights)
            if worker.pending:
                self._update_before(worker, k, version, begins)
            if version > worker.read:
                whole = self._whole(worker, version)
                if whole is None:
                    return False
                begins, worker.read = max(begins, whole), version
            worker.in_flight.append(version)
            if not self.plan.stash:
                self._release_before(worker, version)
            if effect.loads:
                self._load(begins, worker, k)
        of_rank.clock = begins
        for hook in self._before_compute:
            hook(begins, worker)
        ends = of_rank.clock = self._write(worker, effect, k, version)
        if effect.output is not None:
            if self.linked[s]:
                to = self.plan.worker(s + 1, k)
                self.listing.transfer(ends, worker.number, to, k, "activation")
                for hook in self._after_output:
                    hook(ends, worker, k, to)
            effect.output.announce(k, ends)
        if effect.gradient is not None:
            if self.linked[s - 1]:
                self.listing.transfer(ends, worker.number, self.plan.worker(s - 1, k), k, "gradient")
            effect.gradient.announce(k, ends)
        if op.finishes:
            self._finish(worker, k, version)
        return True

    def _load(self, time: int, worker: Worker, k: int) -> None:
        """Write the loads before a forward of a microbatch. Labels are loaded before the forward of stage `labels_with`."""
        if worker.stage == 0:
            self.listing.load(time, worker.number, k, "inputs")
        if worker.stage == self.labels_with:
            self.listing.load(time, self.plan.worker(self.plan.depth - 1, k), k, "labels")

    def _write(self, worker: Worker, effect: _Effect, k: int, version: int) -> int:
        """Write a computation that begins now, and return when it ends."""
        for write in self._writers:
            if (ends := write(worker, effect.op, effect.ticks, k, version)) is not None:
                return int(ends)
        begins = worker.rank.clock
        if self.written[worker.stage]:
            self.listing.compute(begins, effect.op.name, worker.number, k, version)
        return begins + effect.ticks

    def due_with(self, s: int, k: int) -> int | None:
        """Return the batch, if any, by which stage s updates before the forward of k, because the activation brings its message."""
        batch = self.route.from_first_with(s, k) if self.route is not None and self.waits[s] else None
        return batch if batch is not None and batch >= self.first_free else None

    def _update_before(self, worker: Worker, k: int, version: int, begins: int) -> None:
        """Make the pending update that is due before the forward of microbatch k, if there is one."""
        if self.route is None or not self.waits[worker.stage]:
            if version > worker.pending[0].batch:
                self.updates.make(worker, begins)
        elif (batch := self.due_with(worker.stage, k)) is not None and worker.updates <= batch:
            assert worker.pending[0].batch == batch, "updates are made in order, each with what it waits for"
            self.updates.make(worker, begins)

    def _weights_ready(self, worker: Worker, k: int, version: int) -> int | None:
        """Return the time when the weights that a forward reads have all their sums, or None if a sum is not available yet."""
        s = worker.stage
        if self.route is None or not self.waits[s]:
            summed = self.sums[s] and version > self.start * self.plan.updates_per_batch(s)
            return self.available.time("sum", s, version - 1, worker) if summed else 0
        batch = self.due_with(s, k)
        if batch is None:
            return 0
        wanted = [each for needed in self._needed for each in needed(worker, batch)]
        return self.available.latest(wanted, worker)

    def _whole(self, worker: Worker, version: int) -> int | None:
        """Return the time from which a version is complete, with all additions of capabilities; None if it is not complete yet."""
        ready = 0
        for hook in self._version_ready:
            if (time := hook(worker, version)) is None:
                return None
            ready = max(ready, time)
        return ready

    def _settled(self, workers: Sequence[Worker]) -> bool:
        """Make the updates that are due before the next computation of a rank, and run the hooks of capabilities for this place.

        Return False if the rank must wait for something that updates or hooks need.
        """
        for worker in workers:
            if not worker.pending:
                continue
            if not all(settle(worker) for settle in self._settle):
                return False
            if len(worker.pending) > 1 and not self.updates.settle(worker):
                return False
        return True

    def needed_for_sum(self, worker: Worker, batch: int) -> list[tuple[str, int, int]]:
        """Return the results that a worker needs to complete the gradients of a batch, for sums of squares at its stage."""
        return [("sum", worker.stage, batch), *(each for needed in self._needed_for_sum for each in needed(worker, batch))]

    def complete_sum(self, worker: Worker, batch: int, time: int) -> None:
        """Let capabilities complete the gradients of a batch, for sums of squares at the stage of the worker."""
        for hook in self._complete_sum:
            hook(time, worker.number, batch)

    def _finish(self, worker: Worker, k: int, version: int) -> None:
        plan, w, s = self.plan, worker.number, worker.stage
        worker.backwards += 1
        worker.in_flight.popleft()
        if not (plan.stash or self.waits[s]):
            self._update_in_place(worker, k)
            return
        following = worker.in_flight[0] if worker.in_flight else self.version(plan, s, k + self.replicas[s] * plan.row_slices)
        assert following - version in (0, 1), "versions advance one by one"
        dead = version if following > version else None  # all present and future microbatches read later versions
        batch = k // self.every[s] if worker.backwards % self.each[s] == 0 else None  # the batch that this backward ends
        if self.sums[s] or self.waits[s]:
            if batch is not None or dead is not None:
                self.updates.add(worker, batch, dead)
            for hook in self._after_backward:
                hook(worker, k)
        elif batch is not None:
            self.updates.write_update(worker.clock, w, batch, dead)
            worker.updates += 1
        elif dead is not None:
            self.updates.write_release(worker.clock, w, dead)

    def _update_in_place(self, worker: Worker, k: int) -> None:
        """Without a stash, update after the last backward of a batch, in place unless the next forward reads the old version."""
        if worker.backwards % self.each[worker.stage] == 0:
            following = self.version(self.plan, worker.stage, worker.backwards + len(worker.in_flight))
            self._release_before(worker, min(following, worker.updates))
            is_last = worker.oldest == worker.updates < following  # the old version is the only one, and no forward reads it any more
            self.updates.write_update(worker.clock, worker.number, worker.updates, worker.updates if is_last else None)
            worker.updates += 1
            worker.oldest += is_last

    def _release_before(self, worker: Worker, version: int) -> None:
        """Without a stash, release the versions before the one that the next forward reads: a drain keeps them."""
        while worker.oldest < version:
            self.updates.write_release(worker.clock, worker.number, worker.oldest)
            worker.oldest += 1

    def _update_all(self) -> None:
        """Write all pending updates when the pipeline is empty, and the instructions of capabilities before them."""
        time = max(worker.clock for worker in self.workers)
        while pending := [worker.pending[0].batch for worker in self.workers if worker.pending]:
            batch = min(pending)
            late = [worker for worker in self.workers if worker.pending and worker.pending[0].batch == batch]
            for hook in self._drain:
                hook(time, batch, [worker.number for worker in late])
            for worker in late:
                self.updates.make(worker, time)
        for worker in self.workers:
            worker.clock = time
            for hook in self._drained:
                hook(time, worker.number)
