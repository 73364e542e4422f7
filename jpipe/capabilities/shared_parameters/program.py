"""Gradients of shared parameters: their exchange and sum before an update, the verification and the cost.

Without a flush a stage sends its gradients of a batch as soon as it has the sum over its replicas, see `Route.complete_after`.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from jpipe.capabilities.protocol import LoweringHooks, MessageHooks, ProgramHooks, VerifyHooks
from jpipe.capabilities.shared_parameters.option import ROOM
from jpipe.plan import Plan
from jpipe.programs._costs import SharedCost, StageCost
from jpipe.programs._instructions import AllReduce, Instruction, Update
from jpipe.programs._route import last_microbatch
from jpipe.programs._verify import Verifier
from jpipe.programs.lowering import Run
from jpipe.programs.lowering._progress import Worker
from jpipe.programs.prediction import _actions as prediction
from jpipe.programs.prediction._prices import Change, Prices

Stages = tuple[tuple[int, ...], ...]
"""For each group of shared parameters the stages that hold it, in order."""


@dataclass(frozen=True, slots=True)
class TakeShared(Instruction):
    """Copy the gradients of `batch` with respect to shared parameters, for the other stages that hold these parameters."""

    worker: int
    batch: int


@dataclass(frozen=True, slots=True)
class AddShared(Instruction):
    """Add the gradients from the other stages to the gradients of `batch`, for the shared parameters of group `group`."""

    worker: int
    batch: int
    group: int


def _others(groups: Stages, s: int) -> list[int]:
    """Return the stages that share parameters with a stage."""
    return sorted({other for stages in groups if s in stages for other in stages} - {s})


# Lowering ------------------------------------------------------------------------------------------------------------------


class _Lowering(LoweringHooks):
    """The shared gradients of a run."""

    def __init__(self, run: Run) -> None:
        self._run, self._plan, self._groups = run, run.plan, run.uses[ROOM]
        self._due: defaultdict[int, list[int]] = defaultdict(list)  # by worker, the next batches to send gradients of
        self._added: set[tuple[int, int, int]] = set()  # by worker, batch and group

    def after_backward(self, worker: Worker, k: int) -> None:
        """Record the batch with gradients that a worker sends after its backward of microbatch k."""
        route, s = self._run.route, worker.stage
        if route is not None and _others(self._groups, s) and (batch := route.complete_after(s, k)) is not None:
            self._due[worker.number] += [batch] if batch >= self._run.first_free else []

    def settle(self, worker: Worker) -> bool:
        """Send the gradients that are due. Return False if the sum over the replicas is not available yet."""
        due = self._due[worker.number]
        while due:
            summed = self._run.available.time("sum", worker.stage, due[0], worker)
            if summed is None:
                return False
            worker.clock = max(worker.clock, summed)
            self._send(worker.number, due.pop(0), worker.clock)
        return True

    def _send(self, w: int, batch: int, time: int) -> None:
        """Send gradients to the workers of the other stages that hold the parameters; each of them gets its gradients from one replica."""
        plan, (s, own) = self._plan, self._plan.workers[w]
        self._run.listing.write(time, TakeShared, w, batch)
        for other in _others(self._groups, s):
            for replica, to in enumerate(plan.stage_workers[other]):
                if replica % plan.replicas[s] == own:
                    self._run.listing.transfer(time, w, to, last_microbatch(plan, batch), "shared")
        self._run.available.announce("shared", w, batch, time)

    def needed(self, worker: Worker, batch: int) -> list[tuple[str, int, int]]:
        """Return the gradients of other stages that an update waits for."""
        return self._needed(worker, batch, first=False)

    def needed_for_sum(self, worker: Worker, batch: int) -> list[tuple[str, int, int]]:
        """Return the gradients for the groups that begin at the worker's stage: only this stage counts these groups."""
        return self._needed(worker, batch, first=True)

    def _needed(self, worker: Worker, batch: int, *, first: bool) -> list[tuple[str, int, int]]:
        s = worker.stage
        groups = [stages for stages in self._groups if s in stages and (not first or stages[0] == s)]
        senders = [self._plan.stage_workers[other] for stages in groups for other in stages if other != s]
        return [("shared", workers[worker.replica % len(workers)], batch) for workers in senders]

    def complete_sum(self, time: int, w: int, batch: int) -> None:
        """Add the gradients of the groups that begin at the worker's stage."""
        self._add(time, w, batch, first=True)

    def before_update(self, time: int, w: int, batch: int, retires: int | None) -> None:
        """Add the gradients of the groups that are not added yet."""
        self._add(time, w, batch)

    def _add(self, time: int, w: int, batch: int, *, first: bool = False) -> None:
        s, _ = self._plan.workers[w]
        for group, stages in enumerate(self._groups):
            if s in stages and (w, batch, group) not in self._added and (not first or stages[0] == s):
                self._added.add((w, batch, group))
                self._run.listing.write(time, AddShared, w, batch, group)

    def drain(self, time: int, batch: int, late: Collection[int]) -> None:
        """Send and add all remaining gradients before these workers update."""
        for w in late:
            if _others(self._groups, self._plan.workers[w][0]) and not self._run.available.known("shared", w, batch):
                self._send(w, batch, time)
        for w in late:
            self._add(time, w, batch)


# Verification --------------------------------------------------------------------------------------------------------------


class _Verification(VerifyHooks):
    """The shared gradients of one worker: its own gradients, the received gradients, and the groups that were added."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier, self._plan, self._stage = verifier, verifier.plan, verifier.stage
        self._groups: Stages = verifier.uses[ROOM]
        self.checks = {TakeShared: self._take_shared, AddShared: self._add_shared}
        self.sends = {"shared": lambda i: verifier.look_at("shared", i.microbatch)}  # kept for other sends until the update
        self.receives = {"shared": lambda i: verifier.put(f"shared of stage {verifier.plan.workers[i.source][0]}", i.microbatch)}

    def _take_shared(self, i: TakeShared) -> None:
        self._verifier.look_at_sum(i.batch)
        self._verifier.put("shared", last_microbatch(self._plan, i.batch))

    def _add_shared(self, i: AddShared) -> None:
        self._verifier.look_at_sum(i.batch)
        k, stages = last_microbatch(self._plan, i.batch), self._groups[i.group]
        if self._stage not in stages:
            self._verifier.fail(f"{i}: stage {self._stage} does not hold the group, but stages {list(stages)} do")
        for kind in ("shared", *(f"shared of stage {s}" for s in stages if s != self._stage)):
            self._verifier.look_at(kind, k)  # kept for other groups until the update
        self._verifier.put(f"group {i.group} added", k)

    def complete(self, batch: int) -> None:
        """Check that the groups that begin at this stage are added: only this stage counts them."""
        for group, stages in enumerate(self._groups):
            if stages[0] == self._stage:
                self._verifier.look_at(f"group {group} added", last_microbatch(self._plan, batch))

    def updated(self, i: Update) -> None:
        """Remove the buffers that an update uses up: the gradients of this stage and of other stages, and the sums."""
        k, groups = last_microbatch(self._plan, i.batch), [group for group, stages in enumerate(self._groups) if self._stage in stages]
        kinds = ["shared"] if groups else []
        kinds += [f"shared of stage {s}" for s in _others(self._groups, self._stage)]
        for kind in (*kinds, *(f"group {group} added" for group in groups)):
            self._verifier.take(kind, k)


# Price ---------------------------------------------------------------------------------------------------------------------


def costs(plan: Plan, of_stages: Sequence[StageCost], parameters: Sequence[SharedCost]) -> list[StageCost]:
    """Return the costs with the bytes of the gradients that stages exchange, for each group of shared parameters."""
    groups: dict[tuple[int, ...], int] = {}
    for parameter in parameters:
        holders = tuple(s for s, stage in enumerate(plan.stages) if not set(stage.layers).isdisjoint(parameter.layers))
        if len(holders) > 1 and not parameter.frozen:
            groups[holders] = groups.get(holders, 0) + parameter.accumulators
    if not groups:
        return [*of_stages]
    sizes = [tuple(size if s in holders else 0 for holders, size in groups.items()) for s in range(plan.depth)]
    return [replace(cost, shared=each) for cost, each in zip(of_stages, sizes, strict=True)]


def used(of_stages: Sequence[StageCost]) -> Stages:
    """Return for each group of shared parameters the stages that hold it."""
    sizes = zip(*(cost.shared for cost in of_stages), strict=True)
    return tuple(tuple(s for s, size in enumerate(group) if size) for group in sizes)


def _size(prices: Prices, s: int, other: int) -> int:
    """Return the bytes of the gradients that one stage sends to another."""
    sizes = zip(prices.program.uses[ROOM], prices.costs[s].shared, strict=False)
    return sum(size for stages, size in sizes if {s, other} <= set(stages))


def _price(prices: Prices, source: int, to: int) -> tuple[int, int, int]:
    """Return the price of the gradients that one stage sends to another; the sender keeps its copy."""
    size = _size(prices, prices.plan.workers[source][0], prices.plan.workers[to][0])
    return 0, size, size


def _write_take(worker: prediction.Worker, i: TakeShared) -> None:
    worker.wait("sum", i.batch)
    worker.make("made", "shared", last_microbatch(worker.all.plan, i.batch))
    worker.change("take shared")


def _write_add(worker: prediction.Worker, i: AddShared) -> None:
    for s in worker.all.program.uses[ROOM][i.group]:
        worker.wait("shared", s, last_microbatch(worker.all.plan, i.batch))


def _before_update(worker: prediction.Worker, i: Update) -> None:
    """Wait for the gradients of the other stages, and free all exchanged gradients."""
    if others := _others(worker.all.program.uses[ROOM], worker.stage):
        worker.change("free shared", *others)
        for other in others:
            worker.wait("shared", other, last_microbatch(worker.all.plan, i.batch), uses_up=True)


PROGRAM = ProgramHooks(
    instructions=(TakeShared, AddShared),
    messages={"shared": MessageHooks("p", price=_price, awaited=lambda worker, source, k: (worker.all.plan.workers[source][0], k))},
    waits=lambda plan, uses: {s for stages in uses[ROOM] for s in stages},
    waits_for=dict.fromkeys((TakeShared, AddShared), lambda i: (AllReduce, i.batch)),
    model_costs=costs,
    used=used,
    lower=_Lowering,
    verify=_Verification,
    writers={TakeShared: _write_take, AddShared: _write_add},
    changes={
        "take shared": lambda prices, cost, s: Change(sum(cost.shared)),
        "free shared": lambda prices, cost, s, *others: Change(-sum(cost.shared) - sum(_size(prices, other, s) for other in others)),
    },
    before_update=_before_update,
)
