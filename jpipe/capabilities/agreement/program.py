"""Agreements of parallel pipelines: their places in a program, their verification and their cost."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from jpipe.capabilities.agreement.option import agreement_applied, agreement_under_way, agrees
from jpipe.capabilities.protocol import LoweringHooks, MessageHooks, ProgramHooks, VerifyHooks
from jpipe.plan import Plan, Stage
from jpipe.programs._costs import LayerCost, StageCost
from jpipe.programs._instructions import Instruction, Update
from jpipe.programs._verify import Verifier
from jpipe.programs.lowering import Run
from jpipe.programs.lowering._progress import Worker
from jpipe.programs.prediction import _actions as prediction
from jpipe.programs.prediction._prices import Change, Prices


@dataclass(frozen=True, slots=True)
class SumChanges(Instruction):
    """After update `batch`, begin to sum the changes of a stage's weights since the last agreement over the parallel pipelines.

    The instructions of all replicas stand side by side in the total order. The rank does not wait for the sum; `Agree` waits for it.
    """

    worker: int
    batch: int


@dataclass(frozen=True, slots=True)
class Agree(Instruction):
    """Move the agreed weights by the mean change of the `SumChanges` after update `begun`, and set version `batch + 1` from them.

    If the agreement is applied at once, `begun` is `batch`, and the version becomes the agreed weights. Otherwise the version is mixed with
    the agreed weights.
    """

    worker: int
    batch: int
    begun: int

    def later(self, microbatches: int, updates: int) -> Self:
        """Return the same agreement, shifted by this many updates of its stage."""
        return replace(self, batch=self.batch + updates, begun=self.begun + updates)


# Lowering ------------------------------------------------------------------------------------------------------------------


class _Lowering(LoweringHooks):
    """The agreements of a run: pipelines agree on the weights of a stage as soon as all pipelines have made the update."""

    def __init__(self, run: Run) -> None:
        self._run, self._plan = run, run.plan

    def after_update(self, time: int, worker: int, batch: int, retires: int | None) -> None:
        """After all pipelines have made an update, write the agreements on the stage's weights that begin or are applied after it."""
        run, (s, _) = self._run, self._plan.workers[worker]
        begins, applied = agrees(self._plan, s, batch), agreement_applied(self._plan, s, batch)
        if not begins and applied is None:
            return
        if (last := run.updates.come(s, time, "update", batch)) is None:
            return
        pipelines = run.updates.summing[s]
        for w in pipelines if begins else ():
            run.listing.write(last, SumChanges, w, batch)
        for w in () if applied is None else pipelines:
            run.listing.write(last, Agree, w, batch, applied)
        run.available.announce("agreed", s, batch, last)

    def version_ready(self, worker: Worker, version: int) -> int | None:
        """Return the time when the agreements that a version waits for have begun or are applied, or None if it is not known yet."""
        s, update = worker.stage, version - 1
        waits = agrees(self._plan, s, update) or agreement_applied(self._plan, s, update) is not None
        return self._run.available.time("agreed", s, update, worker) if waits and version > self._run.start else 0


def modelled(plan: Plan) -> Plan:
    """Return a plan with pipelines that agree after each update, and apply each agreement at once."""
    assert plan.agree is not None
    return plan.model_copy(update={"agree": plan.agree.model_copy(update={"every": 1, "delay": 0})})


def due(plan: Plan, i: SumChanges | Agree, shift: int) -> SumChanges | Agree | None:
    """Return an instruction of `modelled` as it runs `shift` batches later, or None if it does not run then.

    A late agreement is applied in the place where `modelled` applies another agreement at once. This only removes waits.
    """
    s, update = plan.workers[i.worker][0], i.batch + shift
    if isinstance(i, SumChanges):
        return i if agrees(plan, s, update) else None
    begun = agreement_applied(plan, s, update)
    return None if begun is None else replace(i, begun=begun - shift)


# Verification --------------------------------------------------------------------------------------------------------------


class _Verification(VerifyHooks):
    """The agreements of one worker: after which updates they must begin or be applied before the version is read."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier, self._plan, self._stage = verifier, verifier.plan, verifier.stage
        self.checks = {SumChanges: self._sum_changes, Agree: self._agree}
        self._to_begin, self._to_apply = set[int](), set[int]()

    def _sum_changes(self, i: SumChanges) -> None:
        if i.batch not in self._to_begin:
            self._verifier.fail(f"{i}: no agreement begins after update {i.batch}: expected {_one_of(self._to_begin)}")
        self._verifier.need("versions", i.batch + 1, i)
        self._verifier.put("changes", i.batch)
        self._to_begin.remove(i.batch)

    def _agree(self, i: Agree) -> None:
        if i.batch not in self._to_apply:
            self._verifier.fail(f"{i}: no agreement is due after update {i.batch}: expected {_one_of(self._to_apply)}")
        if i.begun != (begun := agreement_applied(self._plan, self._stage, i.batch)):
            self._verifier.fail(f"{i}: expected the agreement that has begun with update {begun}")
        self._verifier.need("versions", i.batch + 1, i)
        self._verifier.take("changes", i.begun)
        self._to_apply.remove(i.batch)

    def updated(self, i: Update) -> None:
        """Record the agreements that follow an update."""
        if agrees(self._plan, self._stage, i.batch):
            self._to_begin.add(i.batch)
        if agreement_applied(self._plan, self._stage, i.batch) is not None:
            self._to_apply.add(i.batch)

    def whole(self, version: int, where: object) -> None:
        """Check that the pipelines have agreed on a version."""
        if version - 1 in self._to_begin | self._to_apply:
            self._verifier.fail(f"{where}: the pipelines have not agreed on version {version}")

    def held(self, batch: int) -> set[tuple[str, int]]:
        """Return the buffer with the changes of an agreement that has begun before a batch and is not applied yet, if there is one."""
        begun = agreement_under_way(self._plan, self._stage, batch * self._plan.updates_per_batch(self._stage))
        return set() if begun is None else {("changes", begun)}


def _one_of(updates: set[int]) -> str:
    """Return the expected updates, as text for a message about an instruction for another update."""
    return f"one of update {', '.join(map(str, sorted(updates)))}" if updates else "none here"


# Price ---------------------------------------------------------------------------------------------------------------------


def _begin(worker: prediction.Worker) -> None:
    """Count the changes of an agreement that has begun but is not applied at the start of the program."""
    plan, start = worker.all.plan, worker.all.program.start
    if (begun := agreement_under_way(plan, worker.stage, start * plan.updates_per_batch(worker.stage))) is not None:
        worker.change("changes")
        worker.all.there.add(worker.place("changes", begun))


def _write_sum(worker: prediction.Worker, i: SumChanges) -> None:
    worker.change("changes")  # the changes, and then their mean
    worker.change("sum changes")
    worker.begin_sum("changes", i.batch)


def _write_agree(worker: prediction.Worker, i: Agree) -> None:
    worker.wait("changes", i.begun, uses_up=True)
    worker.change("agree")


def stage_cost(plan: Plan, stage: Stage, cost: StageCost, layers: Mapping[str, LayerCost]) -> StageCost:
    """Return the cost of a stage with the agreed weights, momentum and errors. A shared parameter counts with each layer that uses it."""
    assert plan.agree is not None
    copies = 1 + bool(plan.agree.outer.momentum) + bool(plan.agree.bits)
    return replace(cost, kept=cost.kept + copies * sum(layers[layer_id].trained for layer_id in stage.layers))


def _sent_to_each(prices: Prices, s: int) -> float:
    """Return the bytes that a pipeline sends to each other pipeline in few bits; 0: they sum their changes in a ring."""
    agree = prices.plan.agree
    assert agree is not None
    return agree.sent_share(2) * prices.costs[s].trained if agree.bits else 0


PROGRAM = ProgramHooks(
    instructions=(SumChanges, Agree),
    messages={
        "changes": MessageHooks(
            "c",
            "#4B1D78",
            "agreement of pipelines",
            is_sum=True,
            price=lambda prices, s: prices.costs[s].trained,
            gathered=_sent_to_each,
        )
    },
    carries_over=True,
    sums=(SumChanges,),
    waits_for={Agree: lambda i: (SumChanges, i.begun)},
    modelled=modelled,
    due=due,
    stage_cost=stage_cost,
    lower=_Lowering,
    verify=_Verification,
    writers={SumChanges: _write_sum, Agree: _write_agree},
    changes={
        "changes": lambda prices, cost, s: Change(cost.trained),
        "sum changes": lambda prices, cost, s: Change(
            0, round(prices.plan.replicas[s] * _sent_to_each(prices, s)), round(prices.sum("changes", s)[0])
        ),
        "agree": lambda prices, cost, s: Change(-cost.trained),
    },
    begin=_begin,
)
