"""A simulation that adds up the costs of a program's instructions."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from heapq import heappop, heappush
from typing import Any

from jpipe.ops import OPS
from jpipe.programs._costs import HostLink, Network, Overlap, StageCost
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
from jpipe.programs._timeline import Timeline
from jpipe.programs._traffic import Traffic
from jpipe.programs._transfers import HOST, Transfer
from jpipe.programs._verify import versions_before
from jpipe.programs.prediction._batches import Batches
from jpipe.programs.prediction._prediction import Prediction, draw_grid
from jpipe.programs.prediction._state import NOT_YET, Key, Rank, Worker, effect_of, share_name, sum_name
from jpipe.schedules import SCHEDULES


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
        self._flushes = SCHEDULES[program.plan.schedule].flushes
        self._averages_state = program.plan.sync_state and self._flushes and program.plan.agree is None
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
        self._ranks = [Rank(rank, not brief and rank in running) for rank in range(len(plan.rank_workers))]
        effects = [{name: effect_of(op, cost, s, plan.depth) for name, op in OPS.items() if op.trains} for s, cost in enumerate(costs)]
        self._workers: dict[int, Worker] = {}
        for w in written:
            s, rank = plan.workers[w][0], self._ranks[plan.rank_of[w]]
            self._workers[w] = worker = Worker(plan, w, costs[s], effects[s], rank, versions_before(plan, w, program.start))
            if (begun := plan.agreement_under_way(s, program.start * plan.updates_per_batch(s))) is not None:
                worker.ready["changes", begun] = 0.0
                worker.memory.at_first += costs[s].trained
        self._summing = [[w for w in workers if w in self._workers] for workers in plan.stage_workers]  # by stage, those that begin a sum
        self._num_active = len(running)
        for rank in self._ranks:
            rank.begin()

    def run(self, instructions: Iterable[Instruction]) -> None:
        """Execute instructions, in which those of each rank are in order.

        Raises:
            ProgramError: the ranks deadlock, which verified instructions do not.
        """
        running = [self._execute(rank, queue) for rank, queue in zip(self._ranks, self._queues(instructions), strict=True)]
        self._go_on(running, Batches(len(running), 0, False))
        stuck = [rank for rank, instructions_of_rank in enumerate(running) if next(instructions_of_rank, "done") != "done"]
        if stuck:
            raise self._deadlock(stuck)

    def run_batches(self, instructions: Iterable[Instruction], most: int, until_periodic: bool) -> float | None:
        """Execute the instructions of a batch that is flushed several times, as `Batches`, and return their period."""
        batches, queues = Batches(self._num_active, most, until_periodic), self._queues(instructions)
        running = [self._repeat(rank, queue, batches) if queue else iter(()) for rank, queue in zip(self._ranks, queues, strict=True)]
        self._go_on(running, batches)
        if batches.behind:
            raise self._deadlock(batches.stuck())
        return batches.period

    def _repeat(self, rank: Rank, instructions: Sequence[Instruction], batches: Batches) -> Iterator[None]:
        begins = next(n for n, i in enumerate(instructions) if type(i) is Compute)
        return batches.execute(rank.number, instructions, begins, partial(self._execute, rank), partial(rank.end_batch, self._plan))

    def _queues(self, instructions: Iterable[Instruction]) -> list[list[Instruction]]:
        """Return the instructions of each rank."""
        queues: list[list[Instruction]] = [[] for _ in self._ranks]
        for i in instructions:
            queues[self._plan.rank_of[i.worker]].append(i)
        return queues

    def _go_on(self, running: Sequence[Iterator[None]], batches: Batches) -> None:
        """Execute the instructions of all ranks, until none can continue or all have begun the batch after the last one."""
        for instructions_of_rank in running:
            next(instructions_of_rank, None)
        while self._requests and batches.behind:
            self._now, _, begin, arguments = heappop(self._requests)
            for rank in begin(*arguments):
                next(running[rank.number], None)

    def _deadlock(self, stuck: Sequence[int]) -> ProgramError:
        grid = draw_grid(self.timeline(), notes=[(rank, "waits") for rank in stuck])
        return ProgramError(f"{self._plan.schedule}: deadlock, ranks {stuck} wait for each other\n{grid}")

    def _execute(self, rank: Rank, instructions: Iterable[Instruction]) -> Iterator[None]:
        """Execute the instructions of a rank, and pause while the time of something that it needs is not known."""
        workers, needed, times = self._workers, self._needs, rank.times
        for i in instructions:
            worker, kind = workers[i.worker], type(i)
            needs = needed.get(kind)
            if needs is not None:
                for key in needs(self, worker, i):
                    while (time := worker.ready.get(key, 0.0)) == NOT_YET:
                        yield
                    times.append(time)
                    if time > rank.clock and kind is not Send:  # which goes on beside the computations
                        rank.clock = time
            blocking = _HANDLERS[kind](self, worker, i)
            if blocking is not None:
                while (time := worker.ready[blocking]) == NOT_YET:
                    yield
                times.append(time)
                rank.wait(time)

    def _request(self, ready: float, order: tuple[Any, ...], begin: Callable[..., Iterable[Rank]], *arguments: object) -> None:
        """Have something begin in the order of time. Of equal times, messages come before sums: by then all sums of that time are known.

        Args:
            ready: from when on it can begin.
            order: what decides between equal times, different for all requests.
            begin: begins it, and returns the ranks that may wait for it.
            arguments: of `begin`.
        """
        heappush(self._requests, (max(ready, self._now), order, begin, arguments))

    def _needs_of_compute(self, worker: Worker, i: Compute) -> list[Key]:
        needs = worker.effects[i.op].needs
        needed = [(needs, i.microbatch)] if needs else []  # which the first part of several takes
        return needed + [(share, i.version) for share in worker.shares] if worker.shares else needed

    def _needs_of_send(self, worker: Worker, i: Send) -> list[Key]:
        return [("norm", i.microbatch)] if i.message == "norm" else []  # which may still be on its way to the sender

    def _needed_sums(self, worker: Worker, i: Update | SumSquares | TakeShared) -> list[Key]:
        return [(name, i.batch) for name in worker.sums]

    def _needs_of_squares(self, worker: Worker, i: SumSquares) -> list[Key]:
        return [*self._needed_sums(worker, i), ("squares", last_microbatch(self._plan, i.batch))]

    def _needs_of_shared(self, worker: Worker, i: AddShared) -> list[Key]:
        k = last_microbatch(self._plan, i.batch)
        return [(f"shared of stage {s}", k) for s in self._program.shared[i.group] if s != worker.stage]

    def _needs_of_update(self, worker: Worker, i: Update) -> list[Key]:
        norm = [("norm", last_microbatch(self._plan, i.batch))] if self._program.global_norm else []
        return [*self._needed_sums(worker, i), *norm]

    def _needs_of_agreement(self, worker: Worker, i: Agree) -> list[Key]:
        return [("changes", i.begun)]

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
            moved_bytes=tuple(rank.moved if rank.moved_by_batch is None else rank.moved_by_batch for rank in ranks),
            versions_alive=tuple(
                self._workers[w].memory.most_versions if w in self._workers else 0 for w in range(len(self._plan.workers))
            ),
            host_bytes=tuple(rank.most_in_host for rank in ranks),
            host_moved_bytes=tuple(rank.moved_to_host for rank in ranks),
        )

    def _load(self, worker: Worker, i: Load) -> None:
        worker.memory.add(worker.cost.inputs if i.data == "inputs" else worker.cost.labels)

    def _compute(self, worker: Worker, i: Compute) -> None:
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

    def _is_last_part(self, worker: Worker, i: Compute) -> bool:
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

    def _bytes_still_used(self, worker: Worker, k: int, computed: str) -> int:
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

    def _next_on_rank(self, worker: Worker) -> Worker | None:
        """Return the worker of the next stage, if it is on the same rank."""
        return next((other for other in worker.rank.workers if other.stage == worker.stage + 1), None)

    def _accumulate(self, worker: Worker, k: int) -> None:
        """Add the gradients of a microbatch to those of its batch, which may be set aside at its end."""
        worker.memory.accumulate()
        if self._program.sets_aside[worker.stage] and ends_update(self._plan, worker.stage, k):
            worker.memory.accumulates = False

    def _send(self, worker: Worker, i: Send) -> Key | None:
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
            worker.ready[held := (f"{i.message} to {i.to}", i.microbatch)] = NOT_YET
            self._meet(received, i, worker, peer, size)
            return held
        self._request(ready, (0, i.worker, i.to, i.message, i.microbatch), self._transfer, received, i, worker, peer, ready, size)
        return None

    def _receive(self, worker: Worker, i: Receive) -> Key | None:
        sender = self._workers[i.source]
        key, (_, size, arrives) = self._received(i, sender, worker), self._bytes(i.message, sender, worker)
        worker.ready.setdefault(key, NOT_YET)
        if i.message == "weights":
            worker.memory.complete(key[1], arrives)
        else:
            worker.memory.add(arrives)
        if sender.rank is worker.rank or not self._transfers_block:
            return None
        self._meet(key, i, sender, worker, size)
        return key

    def _find_bytes(self, message: Message, sender: Worker, receiver: Worker) -> tuple[int, int, int]:
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

    def _received(self, i: Send | Receive, sender: Worker, receiver: Worker) -> Key:
        """Return what a message is among those that its receiver waits for."""
        if i.message == "shared":
            return f"shared of stage {sender.stage}", i.microbatch
        if i.message == "weights":
            return share_name(sender.number), i.microbatch // self._plan.microbatches_per_update(receiver.stage) + 1
        return i.message, i.microbatch

    def _meet(self, received: Key, i: Send | Receive, sender: Worker, receiver: Worker, size: int) -> None:
        """Note that one rank has come to a transfer for which both wait; it begins when the other one has come, too."""
        transfer = sender.number, receiver.number, str(i.message), i.microbatch
        if transfer not in self._met:
            self._met.add(transfer)
            return
        self._met.remove(transfer)
        ready = max(sender.rank.clock, receiver.rank.clock)
        self._request(ready, (0, *transfer), self._transfer, received, i, sender, receiver, ready, size)

    def _transfer(self, received: Key, i: Send | Receive, sender: Worker, receiver: Worker, ready: float, size: int) -> tuple[Rank, ...]:
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

    def _all_reduce(self, worker: Worker, i: AllReduce) -> Key | None:
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
        name = sum_name(i.part)
        self._begin_sum(worker, "sum", (name, i.batch), worker.rank.clock if self._sums_block else computed, size, sent)
        return (name, i.batch) if self._sums_block else None

    def _begin_sum(self, worker: Worker, what: str, key: Key, ready: float, summed_bytes: float, sent: int | None = None) -> None:
        """Note that a replica has begun a sum, which takes place when all have.

        Args:
            worker: the replica.
            what: is summed.
            key: what the replicas wait for.
            ready: from when on this replica can.
            summed_bytes: of the sum.
            sent: the compressed bytes that a replica sends to each other one; None: they are not compressed.
        """
        worker.ready[key] = NOT_YET
        begun = self._sums_begun.setdefault((worker.stage, *key), [])
        begun.append(ready)
        if len(begun) == len(self._summing[worker.stage]):
            last = max(self._sums_begun.pop((worker.stage, *key)))
            self._request(last, (1, worker.stage, *key), self._sum, what, worker.stage, key, last, summed_bytes, sent)

    def _sum(self, what: str, s: int, key: Key, ready: float, summed_bytes: float, sent: int | None) -> list[Rank]:
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

    def _sum_changes(self, worker: Worker, i: SumChanges) -> Key | None:
        worker.memory.add(worker.cost.trained)  # the changes, then their mean
        self._begin_sum(worker, "changes", ("changes", i.batch), worker.rank.clock, worker.cost.trained)
        return ("changes", i.batch) if self._sums_block else None

    def _agree(self, worker: Worker, i: Agree) -> None:
        worker.ready.pop(("changes", i.begun))
        worker.memory.add(-worker.cost.trained)

    def _take_shared(self, worker: Worker, i: TakeShared) -> None:
        worker.ready["shared", last_microbatch(self._plan, i.batch)] = worker.rank.clock
        worker.memory.add(sum(worker.cost.shared))

    def _add_shared(self, worker: Worker, i: AddShared) -> None:
        """Nothing remains to be done once the gradients of the other stages have come."""

    def _shared_bytes(self, s: int, other: int) -> int:
        """Return the size of the shared gradients that one stage sends to another."""
        sizes = zip(self._program.shared, self._costs[s].shared, strict=False)
        return sum(size for stages, size in sizes if {s, other} <= set(stages))

    def _updated_bytes(self, worker: Worker) -> int:
        """Return the size of the weights that a replica updates for all."""
        return worker.cost.updated[worker.replica] if worker.cost.updated else 0

    def _squares_bytes(self, s: int) -> int:
        """Return the size of the sums of squares of a stage and all later ones, which stage s sends on."""
        return sum(cost.squares for cost in self._costs[s:])

    def _sum_squares(self, worker: Worker, i: SumSquares) -> None:
        k = last_microbatch(self._plan, i.batch)
        if worker.ready.pop(("squares", k), None) is not None:
            worker.memory.add(-self._squares_bytes(worker.stage + 1))
        if worker.stage > 0:
            worker.memory.add(self._squares_bytes(worker.stage))
        worker.ready["squares" if worker.stage > 0 else "norm", k] = worker.rank.clock

    def _update(self, worker: Worker, i: Update) -> None:
        cost, memory = worker.cost, worker.memory
        for name in worker.sums:
            worker.ready.pop((name, i.batch), None)
        if self._averages_state and self._plan.replicas[worker.stage] > 1:
            memory.add(-cost.state)
        if memory.accumulates and self._program.sets_aside[worker.stage]:
            memory.add(-cost.accumulators)
        memory.accumulates = True
        if self._flushes:
            worker.ready.pop(("norm", last_microbatch(self._plan, i.batch)), None)
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

    def _release(self, worker: Worker, i: Release) -> None:
        worker.memory.release(i.version)
        worker.forget(i.version)

    def _move(self, worker: Worker, i: Offload | Fetch) -> None:
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


_NEEDS: dict[type, Callable[[Predictor, Worker, Any], Sequence[Key]]] = {
    Compute: Predictor._needs_of_compute,
    Send: Predictor._needs_of_send,
    TakeShared: Predictor._needed_sums,
    AddShared: Predictor._needs_of_shared,
    SumSquares: Predictor._needs_of_squares,
    Update: Predictor._needs_of_update,
    Agree: Predictor._needs_of_agreement,
}
"""What is to come before an instruction."""

_HANDLERS: dict[type, Callable[[Predictor, Worker, Any], Key | None]] = {
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
