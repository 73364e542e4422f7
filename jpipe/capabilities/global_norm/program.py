"""The norm of the gradients of all stages: the instructions that compute it and bring it to all workers, their verification and price.

At a flush, the messages are separate. Otherwise they follow a `Route`: the sums of squares of a batch travel to stage 0 with input
gradients, and the norm travels back with activations.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jpipe.capabilities.protocol import LoweringHooks, MessageHooks, ProgramHooks, VerifyHooks
from jpipe.plan import Plan
from jpipe.programs._instructions import AllReduce, Instruction, Update
from jpipe.programs._route import last_microbatch, transfer
from jpipe.programs._verify import Verifier
from jpipe.programs.lowering import Run
from jpipe.programs.lowering._progress import Worker
from jpipe.programs.prediction import _actions as prediction
from jpipe.programs.prediction._prices import Change, Prices


@dataclass(frozen=True, slots=True)
class SumSquares(Instruction):
    """Sum the squares of the mean gradient of `batch`, layer by layer, and append the sums of later stages; stage 0 computes the norm."""

    worker: int
    batch: int


# Lowering ------------------------------------------------------------------------------------------------------------------


class _Lowering(LoweringHooks):
    """Writes the instructions that compute the norms of a run and bring them to the workers."""

    def __init__(self, run: Run) -> None:
        self._run, self._plan, self._route = run, run.plan, run.route
        self._due: defaultdict[int, list[int]] = defaultdict(list)  # by worker, the batches for which the worker sums squares next
        self._drained = -1  # the last batch for which a drain has brought the norm to all workers

    def after_backward(self, worker: Worker, k: int) -> None:
        """If a batch sends its sums of squares along with the input gradient of microbatch k, note that."""
        if self._route is not None and (batch := self._route.to_first_with(k)) is not None and batch >= self._run.first_free:
            self._due[worker.number].append(batch)

    def settle(self, worker: Worker) -> bool:
        """Sum the squares that are due, and send them to the stage before.

        Return False if the worker must wait for gradients, or for the squares of the next stage.
        """
        run, s, due = self._run, worker.stage, self._due[worker.number]
        while due:
            assert self._route is not None
            batch, later = due[0], [("squares", s + 1, due[0])] if s + 1 < self._plan.depth else []
            ready = run.available.latest([*run.needed_for_sum(worker, batch), *later], worker)
            if ready is None:
                return False
            worker.clock = max(worker.clock, ready)
            run.complete_sum(worker, batch, worker.clock)
            run.listing.write(worker.clock, SumSquares, worker.number, batch)
            k = last_microbatch(self._plan, batch)
            if s > 0:
                run.listing.transfer(worker.clock, worker.number, self._plan.worker(s - 1, k + self._route.delay), k, "squares")
            run.available.announce("squares" if s > 0 else "norm", s, batch, worker.clock)
            due.pop(0)
        return True

    def after_output(self, time: int, worker: Worker, k: int, to: int) -> None:
        """Send the norm along with the output of a microbatch."""
        if (batch := self._run.due_with(worker.stage + 1, k)) is not None:
            self._run.listing.transfer(time, worker.number, to, last_microbatch(self._plan, batch), "norm")

    def needed(self, worker: Worker, batch: int) -> list[tuple[str, int, int]]:
        """Return what an update at the first stage waits for: the norm. Later stages get the norm together with their input."""
        return [("norm", 0, batch)] if worker.stage == 0 else []

    def before_update(self, time: int, worker: int, batch: int, retires: int | None) -> None:
        """Bring the norm to the other replicas of stage 0."""
        if self._route is None or batch <= self._drained or self._plan.workers[worker][0] > 0:
            return
        if worker != (root := self._route.root(batch)):
            self._run.listing.transfer(time, root, worker, last_microbatch(self._plan, batch), "norm")

    def drain(self, time: int, batch: int, late: Collection[int]) -> None:
        """Write separate messages that bring the norm of a batch to the workers that lack it."""
        run, plan = self._run, self._plan
        self._drained = batch
        if plan.has_parallel_pipelines:
            for pipeline in range(plan.replicas[0]):
                run.listing.once(time, _alone(plan, batch, [replicas[pipeline] for replicas in plan.stage_workers]))
        elif self._route is not None and run.available.known("norm", 0, batch):
            run.listing.once(time, _distributed(plan, batch, {*range(len(plan.workers))} - {*late} | {self._route.root(batch)}))
        else:
            first = [workers[0] for workers in plan.stage_workers]
            run.listing.once(time, [*_summed(plan, batch, first), *_distributed(plan, batch, {first[0]})])


def _summed(plan: Plan, batch: int, workers: Sequence[int]) -> list[Instruction]:
    """Return separate messages that carry the sums of squares from the last stage to stage 0, through one worker of each stage."""
    k, written = last_microbatch(plan, batch), list[Instruction]()
    for s in reversed(range(plan.depth)):
        written += [SumSquares(workers[s], batch), *(transfer(workers[s], workers[s - 1], k, "squares") if s > 0 else ())]
    return written


def _alone(plan: Plan, batch: int, workers: Sequence[int]) -> list[Instruction]:
    """Return separate messages that bring the norm of one of several parallel pipelines to its workers."""
    written = _summed(plan, batch, workers)
    for source, to in pairwise(workers):
        written += transfer(source, to, last_microbatch(plan, batch), "norm")
    return written


def _distributed(plan: Plan, batch: int, holders: Collection[int]) -> list[Instruction]:
    """Return the messages from the workers that have the norm, `holders`, to all other workers; a worker of stage 0 must have it."""
    k, written, source = last_microbatch(plan, batch), list[Instruction](), -1
    for workers in plan.stage_workers:
        for worker in sorted(workers, key=lambda w: w not in holders):
            if worker not in holders:
                written += transfer(source, worker, k, "norm")
            if worker in holders or worker == workers[0]:
                source = worker
    return written


# Verification --------------------------------------------------------------------------------------------------------------


class _Verification(VerifyHooks):
    """Tracks which norms one worker has. A norm is identified by the last microbatch of its batch."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier, self._plan = verifier, verifier.plan
        self._known: set[int] = set()
        self.checks = {SumSquares: self._sum_squares}
        self.sends = {"squares": lambda i: verifier.take("squares", i.microbatch), "norm": lambda i: self._need(i.microbatch)}
        self.receives = {"squares": lambda i: verifier.put("later squares", i.microbatch), "norm": lambda i: self._known.add(i.microbatch)}

    def _sum_squares(self, i: SumSquares) -> None:
        verifier, k = self._verifier, last_microbatch(self._plan, i.batch)
        verifier.look_at_complete_sum(i.batch)
        if verifier.stage < self._plan.depth - 1:
            verifier.take("later squares", k)
        if verifier.stage == 0:
            self._known.add(k)
        else:
            verifier.put("squares", k)

    def updated(self, i: Update) -> None:
        k = last_microbatch(self._plan, i.batch)
        self._need(k)
        self._known = {each for each in self._known if each >= k}

    def _need(self, k: int) -> None:
        if k not in self._known:
            self._verifier.fail(f"norm of microbatch {k} used before it arrived")


# Price ---------------------------------------------------------------------------------------------------------------------


def _sum_squares(worker: prediction.Worker, i: SumSquares) -> None:
    k, s = last_microbatch(worker.all.plan, i.batch), worker.stage
    worker.wait("sum", i.batch)
    if s < worker.all.depth - 1:
        worker.wait("squares", k, uses_up=True)
        worker.change("free squares")
    if s > 0:
        worker.change("squares")
    worker.make(*(("made", "squares") if s > 0 else ("norm",)), k)


def _before_update(worker: prediction.Worker, i: Update) -> None:
    worker.wait("norm", last_microbatch(worker.all.plan, i.batch), uses_up=worker.all.flushes)


def _squares(prices: Prices, s: int) -> int:
    """Return the size of the sums of squares of a stage and all later stages."""
    return sum(cost.squares for cost in prices.costs[s:])


def _price(prices: Prices, source: int, to: int) -> tuple[int, int, int]:
    """Return the bytes of sums of squares: so few that sending them takes only the latency of the link."""
    size = _squares(prices, prices.plan.workers[source][0])
    return size, 0, size


PROGRAM = ProgramHooks(
    instructions=(SumSquares,),
    messages={"squares": MessageHooks("q", price=_price), "norm": MessageHooks("n")},
    waits=lambda plan, value: range(plan.depth),
    waits_for={SumSquares: lambda i: (AllReduce, i.batch)},
    lower=_Lowering,
    verify=_Verification,
    writers={SumSquares: _sum_squares},
    changes={
        "squares": lambda prices, cost, s: Change(_squares(prices, s)),
        "free squares": lambda prices, cost, s: Change(-_squares(prices, s + 1)),
    },
    before_update=_before_update,
)
