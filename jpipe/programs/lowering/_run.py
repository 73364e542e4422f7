"""The computations of all workers, run in the order of their schedule; each instruction is written with its time."""

from collections.abc import Sequence
from itertools import takewhile

from jpipe.errors import InputError
from jpipe.ops import OPS
from jpipe.plan import Plan
from jpipe.programs._execution_order import ProgramError
from jpipe.programs._global_norm import distribute, last_microbatch, norm_alone, route_of, transfer
from jpipe.programs._instructions import (
    AddShared,
    Compute,
    Instruction,
    Load,
    Release,
    SumSquares,
    TakeShared,
    Update,
    ends_update,
    parts_of,
)
from jpipe.programs._timeline import Span, format_grid
from jpipe.programs.lowering._progress import Availability, Listing, PendingUpdates, Rank, Worker
from jpipe.schedules import SCHEDULES, Action


class Run:
    """A run of the computations of all workers in their order, with free transfers, that writes each instruction with its time."""

    def __init__(self, plan: Plan, start: int, batches: int, drain: bool, global_norm: bool, shared: tuple[tuple[int, ...], ...]) -> None:
        self.plan, self.start, self.global_norm, self.shared = plan, start, global_norm, shared
        self.schedule = SCHEDULES[plan.schedule]
        self.unit = max(len(stage.sum_parts) or 1 for stage in plan.stages)  # ticks of a forward, so that each part takes some
        self.again = [int(stage.recompute != "none") for stage in plan.stages]  # ticks of a forward that is computed again
        self.ranks = [Rank(rank) for rank in range(len(plan.rank_workers))]
        self.workers = [Worker(plan, w, start, self.ranks[plan.rank_of[w]]) for w in range(len(plan.workers))]
        self.available, self.listing = Availability(), Listing()
        # Without a flush the last of a rank's chunks may come to a microbatch only after the step of its batch.
        several = not self.schedule.flushes and plan.depth > len(plan.pipeline_ranks)
        self.labels_with = 0 if several else plan.depth - 1
        self.shares = [[group for group, stages in enumerate(shared) if s in stages] for s in range(plan.depth)]
        self.waits = [global_norm or bool(groups) for groups in self.shares]  # whether updates wait for other stages
        self.route = route_of(plan) if any(self.waits) and not self.schedule.flushes else None
        self.updates = PendingUpdates(plan, self.available, self.listing, self.route, self.waits)
        self.added: set[tuple[int, int, int]] = set()  # shared gradients, by worker, batch and group
        self.first_free = max(start, batches if self.schedule.flushes else plan.flush_first)
        for batch in range(start, min(self.first_free, batches)):
            self._empty_to_empty(batch, batch + 1, drain=True)
        if self.first_free < batches:
            self._empty_to_empty(self.first_free, batches, drain)

    def sets_aside(self) -> tuple[bool, ...]:
        """Return `Program.sets_aside`: where updates wait for a sum over replicas or, without a flush, for other stages."""
        return tuple(replicas > 1 or (self.route is not None and self.waits[s]) for s, replicas in enumerate(self.plan.replicas))

    def versions(self) -> tuple[tuple[int, int], ...]:
        """Return for each worker the oldest version that a microbatch will still read, and the newest one."""
        following = [worker.backwards * self.plan.replicas[worker.stage] + worker.replica for worker in self.workers]
        return tuple(
            (self.schedule.version(self.plan, worker.stage, k), worker.updates) for worker, k in zip(self.workers, following, strict=True)
        )

    def _empty_to_empty(self, first: int, end: int, drain: bool) -> None:
        orders = [self._order(rank, first, end, drain) for rank in range(len(self.ranks))]
        position = [0 for _ in orders]
        ready = self.available.woken
        ready.extend(range(len(orders)))
        while ready:
            rank = ready.popleft()
            workers, order = [self.workers[w] for w in self.plan.rank_workers[rank]], orders[rank]
            while all(map(self._settle, workers)) and position[rank] < len(order) and self._compute(order[position[rank]], workers):
                position[rank] += 1
        stuck = [rank for rank, order in enumerate(orders) if position[rank] < len(order)]
        if stuck and drain:  # otherwise they may wait for what others do once they have the next batch
            raise self._deadlock({rank: orders[rank][position[rank]] for rank in stuck})
        if drain:
            self._drain(end)

    def _deadlock(self, waiting: dict[int, Action]) -> InputError | ProgramError:
        """Return the error that shows which computations of which ranks wait for each other."""
        plan, rows = self.plan, [list[Span]() for _ in self.ranks]
        for i, time in ((i, time) for i, time in self.listing.computations() if not i.part):
            rank, (s, _) = plan.rank_of[i.worker], plan.workers[i.worker]
            chunk = plan.rank_workers[rank].index(i.worker)
            rows[rank].append(Span(i.op, i.microbatch, i.version, time, time + self._ticks(i.op, s), chunk=chunk))
        notes = [(rank, f"waits for what {op} of microbatch {k} at stage {s} needs") for rank, (op, s, k) in waiting.items()]
        what, grid = f"the order deadlocks, ranks {list(waiting)} wait for each other", format_grid(rows, notes)
        if plan.order is None:
            return ProgramError(f"{plan.schedule}: {what}\n{grid}")
        expected = "expected an order in which each computation comes after what it needs, on all ranks"
        change = "move forwards or backwards for inputs that another rank waits for to the front, or use jpipe.schedules.greedy_order"
        return InputError(f"plan: order: {expected}; {what}; {change}", *grid.splitlines())

    def _ticks(self, op: str, s: int) -> int:
        """Return the ticks of a computation: a unit for each of its halves, and one more where it recomputes the forward."""
        return self.unit * (len(OPS[op].parts) + (self.again[s] if OPS[op].gives_gradient else 0))

    def _order(self, rank: int, start: int, batches: int, drain: bool) -> list[Action]:
        """Return the schedule's order up to the first forward that needs batch `batches`."""
        plan, end = self.plan, batches * self.plan.microbatches
        stop = batches if drain else batches + self.schedule.period(plan)
        order = self.schedule.computations(plan, *plan.rank_positions[rank], start, stop)
        return list(takewhile(lambda entry: not entry.is_forward or entry.microbatch < end, order))

    def _compute(self, entry: Action, workers: Sequence[Worker]) -> bool:
        """Write a computation of a rank and what follows from it; return False if something that it needs is not available yet."""
        plan, (op, s, k) = self.plan, entry
        worker = next(worker for worker in workers if worker.stage == s)
        version = self.schedule.version(plan, s, k)
        ready = self._inputs_ready(worker, entry, version)
        if ready is None:
            return False
        begins = max(worker.clock, ready)
        if entry.is_forward:
            self._update_before(worker, k, version, begins)
            whole = self._weights_ready(worker, version)
            if whole is None:
                return False
            begins = max(begins, whole)
            self.listing.write(begins, *loads(plan, s, k, self.labels_with))
        worker.clock = begins
        self._write(worker, op, k, version)
        if "output" in OPS[op].leaves:
            self._after_forward(worker, k)
        if entry.gives_gradient:
            self._after_gradient(worker, k)
        if entry.finishes:
            self._after_backward(worker, k, version)
        return True

    def _write(self, worker: Worker, op: str, k: int, version: int) -> None:
        """Write a computation that begins now; a part of it is followed by the sum of this part."""
        s, parts = worker.stage, parts_of(op, self.plan, worker.stage, k)
        later = self.unit * len(OPS[op].parts.strip("F")) // len(parts)  # ticks of each part but the first
        for part in parts:
            self.listing.write(worker.clock, Compute(op, worker.number, k, version, part))
            worker.clock += later if part else self._ticks(op, s) - later * (len(parts) - 1)
            if part is not None:
                self.updates.begin_sum(worker, k // self.plan.microbatches_per_update(s), part)

    def _after_forward(self, worker: Worker, k: int) -> None:
        plan, w, s = self.plan, worker.number, worker.stage
        if s < plan.depth - 1:
            self.listing.write(worker.clock, *transfer(w, plan.worker(s + 1, k), k, "activation"))
            if self.global_norm and (batch := self._due_with(s + 1, k)) is not None:
                self.listing.write(worker.clock, *transfer(w, plan.worker(s + 1, k), last_microbatch(plan, batch), "norm"))
        self.available.announce("output", s, k, worker.clock)

    def _after_gradient(self, worker: Worker, k: int) -> None:
        s = worker.stage
        if s > 0:
            self.listing.write(worker.clock, *transfer(worker.number, self.plan.worker(s - 1, k), k, "gradient"))
        self.available.announce("gradient", s, k, worker.clock)

    def _due_with(self, s: int, k: int) -> int | None:
        """Return the batch whose update is due at stage s before the forward of k, if any; the norm arrives with its activation."""
        batch = self.route.norm_with(s, k) if self.route is not None and self.waits[s] else None
        return batch if batch is not None and batch >= self.first_free else None

    def _update_before(self, worker: Worker, k: int, version: int, begins: int) -> None:
        """Make the pending update that is due before the forward of microbatch k."""
        if self.route is None or not self.waits[worker.stage]:
            if worker.pending and version > worker.pending[0].batch:
                self.updates.make(worker, begins)
        elif (batch := self._due_with(worker.stage, k)) is not None and worker.updates <= batch:
            self._add_shared(worker, batch, begins)
            root = self.route.root(batch)
            if self.global_norm and worker.stage == 0 and worker.number != root:
                self.listing.write(begins, *transfer(root, worker.number, last_microbatch(self.plan, batch), "norm"))
            assert worker.pending[0].batch == batch, "updates are made in order, each with its norm"
            self.updates.make(worker, begins)

    def _inputs_ready(self, worker: Worker, entry: Action, version: int) -> int | None:
        """Return the time from which the message of a computation and the sums for its weights are available, or None."""
        plan, (op, s, k), of = self.plan, entry, self.available
        if OPS[op].reads == "stash":
            return 0
        if OPS[op].reads == "residuals":
            return of.time("gradient", s + 1, k, worker) if s + 1 < plan.depth else 0
        wanted = [("output", s - 1, k)] if s > 0 else []
        if self.route is not None and self.waits[s]:
            if (batch := self._due_with(s, k)) is not None:
                wanted += [("norm", 0, batch)] if self.global_norm and s == 0 else []
                wanted += [("shared", source, batch) for group in self.shares[s] for source in self._sources(worker, group)]
        elif plan.replicas[s] > 1 and version > self.start * plan.updates_per_batch(s):
            wanted.append(("sum", s, version - 1))
        return of.latest(wanted, worker)

    def _weights_ready(self, worker: Worker, version: int) -> int | None:
        """Return the time from which a version has the weights that other replicas update, or None."""
        s = worker.stage
        if not self.plan.shard_optimizer or self.plan.replicas[s] == 1 or version <= self.start * self.plan.updates_per_batch(s):
            return 0
        return self.available.time("weights", s, version - 1, worker)

    def _settle(self, worker: Worker) -> bool:
        """Send shared gradients, sum squares and update, where they are due before the next computation of a worker.

        Returns:
            Whether the worker can continue; False if something that these need is not available yet.
        """
        return self._give_shared(worker) and self._sum_squares(worker) and self.updates.make_early(worker) and self.updates.settle(worker)

    def _give_shared(self, worker: Worker) -> bool:
        while worker.shared_due:
            summed = self.available.time("sum", worker.stage, worker.shared_due[0], worker)
            if summed is None:
                return False
            worker.clock = max(worker.clock, summed)
            self._send_shared(worker, worker.shared_due.pop(0), worker.clock)
        return True

    def _send_shared(self, worker: Worker, batch: int, time: int) -> None:
        """Send the gradients of shared parameters to the workers of the other stages that hold them, each from one replica."""
        plan, w, s = self.plan, worker.number, worker.stage
        self.listing.write(time, TakeShared(w, batch))
        for other in sorted({stage for group in self.shares[s] for stage in self.shared[group]} - {s}):
            for replica, to in enumerate(plan.stage_workers[other]):
                if replica % plan.replicas[s] == worker.replica:
                    self.listing.write(time, *transfer(w, to, last_microbatch(plan, batch), "shared"))
        self.available.announce("shared", w, batch, time)

    def _sources(self, worker: Worker, group: int) -> list[int]:
        """Return the workers that send shared gradients of a group to a worker."""
        replicas = {s: self.plan.stage_workers[s] for s in self.shared[group] if s != worker.stage}
        return [workers[worker.replica % len(workers)] for workers in replicas.values()]

    def _add_shared(self, worker: Worker, batch: int, time: int, *, first: bool = False) -> None:
        """Add the shared gradients of the groups not added yet, or only of those of which the worker's stage is the first."""
        for group in self.shares[worker.stage]:
            if (worker.number, batch, group) not in self.added and (not first or self.shared[group][0] == worker.stage):
                self.added.add((worker.number, batch, group))
                self.listing.write(time, AddShared(worker.number, batch, group))

    def _sum_squares(self, worker: Worker) -> bool:
        s, w, plan, of = worker.stage, worker.number, self.plan, self.available
        while worker.squares_due:
            assert self.route is not None
            batch, groups = worker.squares_due[0], [group for group in self.shares[s] if self.shared[group][0] == s]
            wanted = [("sum", s, batch), *([("squares", s + 1, batch)] if s + 1 < plan.depth else [])]
            wanted += [("shared", source, batch) for group in groups for source in self._sources(worker, group)]
            ready = of.latest(wanted, worker)
            if ready is None:
                return False
            worker.clock = max(worker.clock, ready)
            self._add_shared(worker, batch, worker.clock, first=True)
            self.listing.write(worker.clock, SumSquares(w, batch))
            k = last_microbatch(plan, batch)
            if s > 0:
                self.listing.write(worker.clock, *transfer(w, plan.worker(s - 1, k + self.route.delay), k, "squares"))
            of.announce("squares" if s > 0 else "norm", s, batch, worker.clock)
            worker.squares_due.pop(0)
        return True

    def _after_backward(self, worker: Worker, k: int, version: int) -> None:
        plan, w, s, ends = self.plan, worker.number, worker.stage, worker.clock
        worker.backwards += 1
        replicas, every = plan.replicas[s], plan.microbatches_per_update(s)
        next_version = self.schedule.version(plan, s, k + replicas)
        assert next_version - version in (0, 1), "versions advance one by one"
        dead = version if next_version > version else None  # microbatches in flight and to come all read later versions
        batch = k // every if ends_update(plan, s, k) else None  # that it ends
        if replicas > 1 or self.waits[s]:
            self.updates.add(worker, batch, dead)
            self._note_due(worker, k)
        elif batch is not None:
            self.listing.write(ends, Update(w, batch, dead))
            worker.updates += 1
        elif dead is not None:
            self.listing.write(ends, Release(w, dead))

    def _note_due(self, worker: Worker, k: int) -> None:
        """Note the batches whose shared gradients a worker sends, and whose squares it sums, after its backward of microbatch k."""
        if self.route is None:
            return
        if self.shares[worker.stage] and (batch := self.route.shared_after(worker.stage, k)) is not None and batch >= self.first_free:
            worker.shared_due.append(batch)
        if self.global_norm and (batch := self.route.squares_with(k)) is not None and batch >= self.first_free:
            worker.squares_due.append(batch)

    def _drain(self, end: int) -> None:
        """Write the norm of the last batch and all pending updates where the pipeline is empty."""
        time = max(worker.clock for worker in self.workers)
        while pending := [worker.pending[0].batch for worker in self.workers if worker.pending]:
            batch = min(pending)
            late = [worker for worker in self.workers if worker.pending and worker.pending[0].batch == batch]
            for worker in late:
                if self.shares[worker.stage] and not self.available.known("shared", worker.number, batch):
                    self._send_shared(worker, batch, time)
            for worker in late:
                self._add_shared(worker, batch, time)
            if self.global_norm:
                self._finish_norm(batch, {worker.number for worker in late}, time)
            for worker in late:
                self.updates.make(worker, time)
        for worker in self.workers:
            worker.clock = time

    def _finish_norm(self, batch: int, late: set[int], time: int) -> None:
        """Write separate messages that bring the norm of a batch to the workers that lack it."""
        if self.route is not None and self.available.known("norm", 0, batch):
            holders = set(range(len(self.workers))) - late | {self.route.root(batch)}
            self.listing.write(time, *distribute(self.plan, batch, holders))
        else:
            self.listing.write(time, *norm_alone(self.plan, batch))


def loads(plan: Plan, s: int, k: int, labels_with: int | None) -> list[Instruction]:
    """Return the loads before the forward of a microbatch at stage s; the labels are loaded at stage `labels_with`."""
    loads: list[Instruction] = []
    if s == 0:
        loads.append(Load(plan.worker(s, k), k, "inputs"))
    if s == labels_with:
        loads.append(Load(plan.worker(plan.depth - 1, k), k, "labels"))
    return loads
