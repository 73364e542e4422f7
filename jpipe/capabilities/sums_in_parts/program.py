"""Computations and sums of single parts of a stage: their places in a program, their verification and their cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from jpipe.capabilities.protocol import LoweringHooks, ProgramHooks, VerifyHooks
from jpipe.capabilities.sums_in_parts.option import layers_by_part
from jpipe.ops import OPS, Leaves, Op
from jpipe.plan import Plan, Stage
from jpipe.programs._costs import LayerCost, StageCost
from jpipe.programs._instructions import AllReduce, Compute, ends_update
from jpipe.programs._timeline import Span
from jpipe.programs._verify import Verifier
from jpipe.programs.lowering import Run
from jpipe.programs.lowering._progress import Worker
from jpipe.programs.prediction import _actions as prediction
from jpipe.programs.prediction._prices import Change, Prices


class _Part:
    """One of `parts` parts of a stage."""

    __slots__ = ()
    part: int
    parts: int

    @property
    def piece(self) -> str:
        return f" {self.part}"

    @property
    def following(self) -> int:
        return self.parts - 1 - self.part


@dataclass(frozen=True, slots=True)
class ComputePart(_Part, Compute):
    """Run an op that computes gradients of weights, for one of `parts` parts of the stage. Part 0 has the last layers.

    The parts of a microbatch follow each other.
    """

    part: int
    parts: int

    @property
    def shown(self) -> str:
        return "B" if self.part and OPS[self.op].begins else self.op


@dataclass(frozen=True, slots=True)
class SumPart(_Part, AllReduce):
    """Begin to sum the gradients of one part of the stage. The sum of the last part is an `AllReduce` of the core."""

    part: int
    parts: int


def op_of_part(op: Op, part: int, parts: int) -> Op:
    """Return the op for one part of a stage. Part 0 reads what the whole op reads; each part leaves a stash for the next one."""
    left_by_one: dict[Leaves, bool] = {"state": part == 0, "gradient": part == parts - 1}
    leaves = (*(kind for kind in op.leaves if left_by_one.get(kind, True)), *(("stash",) if part < parts - 1 else ()))
    return replace(op, function=f"{op.function} {part}", reads="stash" if part else op.reads, leaves=leaves)


def parts_of(op: str, plan: Plan, s: int, k: int) -> int:
    """Return the number of parts in which an op of microbatch k is computed at stage s; 0: it is computed as a whole."""
    return len(plan.stages[s].sum_parts) if OPS[op].finishes and ends_update(plan, s, k) else 0


# Lowering ------------------------------------------------------------------------------------------------------------------


class _Lowering(LoweringHooks):
    """The last backwards of updates, in parts; each part is followed by its sum."""

    def __init__(self, run: Run) -> None:
        self._run, self._plan = run, run.plan
        self.begins_sums = [s for s, stage in enumerate(run.plan.stages) if stage.sum_parts]

    def write(self, worker: Worker, op: Op, ticks: int, k: int, version: int) -> int | None:
        """Write the parts of a computation and their sums, and return the time of their end; None if it is computed as a whole."""
        run, s = self._run, worker.stage
        parts, batch = parts_of(op.name, self._plan, s, k), k // run.every[s]
        later = run.unit * len(op.parts.strip("F")) // max(parts, 1)  # the ticks of each part except the first
        for part in range(parts):
            run.listing.compute(worker.clock, op.name, worker.number, k, version, ComputePart, part, parts)
            worker.clock += later if part else ticks - later * (parts - 1)
            if part == parts - 1:
                run.updates.begin_sum(worker, batch)
            elif (begins := run.updates.come(s, worker.clock, "sum", batch, part)) is not None:
                run.updates.write_sums(begins, s, SumPart, batch, part, parts)
        return worker.clock if parts else None


# Verification --------------------------------------------------------------------------------------------------------------


class _Verification(VerifyHooks):
    """Tracks the parts of the last computation that one worker has computed, and the parts of its updates that it has summed."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._unfinished: list[Compute] = []  # the remaining parts of the last computation, in order
        self._summed: dict[int, int] = {}  # the number of summed parts, by batch
        self.checks = {Compute: self._compute, ComputePart: self._compute, SumPart: self._sum_part, AllReduce: self._all_reduce}

    def _compute(self, i: Compute) -> None:
        """Check a computation, or one part of it. The last part leaves what the whole computation leaves."""
        verifier, plan = self._verifier, self._verifier.plan
        op = op_of_part(OPS[i.op], i.part, i.parts) if isinstance(i, ComputePart) else OPS[i.op]
        verifier.read(i, op)
        if not self._unfinished:
            verifier.check_next(i)
            whole, parts = (i.op, i.worker, i.microbatch, i.version), parts_of(i.op, plan, verifier.stage, i.microbatch)
            self._unfinished = [ComputePart(*whole, part, parts) for part in range(parts)] or [Compute(*whole)]
        if i != (following := self._unfinished.pop(0)):
            verifier.fail(f"{i}: the next part is {following}")
        verifier.check_version(i)
        if i.following:
            verifier.leave(i, replace(op, leaves=tuple(kind for kind in op.leaves if kind != "accumulators")))
            verifier.put(f"sums of part{i.piece}", i.microbatch // plan.microbatches_per_update(verifier.stage))
        else:
            verifier.leave(i, op)

    def _sum_part(self, i: SumPart) -> None:
        self._check_in_order(i, i.part)
        self._verifier.take(f"sums of part{i.piece}", i.batch)
        self._summed[i.batch] = i.part + 1

    def _all_reduce(self, i: AllReduce) -> None:
        self._check_in_order(i, len(self._verifier.plan.stages[self._verifier.stage].sum_parts) - 1)
        self._verifier.all_reduce(i)
        self._summed.pop(i.batch, None)

    def _check_in_order(self, i: AllReduce, part: int) -> None:
        if part > self._summed.get(i.batch, 0):
            self._verifier.fail(f"{i} before the sum of part {part - 1}: all replicas sum the parts in order")


# Price ---------------------------------------------------------------------------------------------------------------------


def _compute_part(worker: prediction.Worker, i: ComputePart) -> None:
    program, k, is_last = worker.all, i.microbatch, not i.following
    op, _, awaited, left = worker.effect(i.op)
    leaves = op.begins and i.parts > 1  # part 0 has the forward, and leaves residuals for the other parts
    prediction.prepare(worker, i)
    needs = prediction.NOWHERE if i.part or awaited is None else awaited[k]
    made = [worker.place("part", i.part, k // program.plan.microbatches_per_update(worker.stage))]
    if is_last:
        made += [places[k] for places in left]
        if leaves:
            worker.change("last part")
        prediction.change_bytes(worker, i, op)
    else:
        worker.accumulate()
        worker.change("first part" if leaves and not i.part else "part")
    prediction.work(worker, i, program.seconds[_seconds, worker.stage, i.op, i.part], needs, made, i.part)
    if is_last:
        prediction.finish(worker, i, op)


def _seconds(prices: Prices, s: int, op: str, part: int) -> float:
    return prices.costs[s].seconds_of_part(op, part, prices.plan.stages[s])


def _sum(worker: prediction.Worker, i: AllReduce) -> None:
    """Begin the sum of a part after the part is computed. The sum of part 0 includes averaged layer state."""
    parts = len(worker.all.plan.stages[worker.stage].sum_parts)
    if not parts:
        prediction.all_reduce(worker, i)
        return
    part = parts - 1 - i.following
    if worker.all.averages_state and not part:
        worker.change("take state")
    worker.change("sum", part)
    worker.begin_sum("sum", i.batch, worker.place("part", part, i.batch), part, i.following)


def stage_cost(plan: Plan, stage: Stage, cost: StageCost, layers: Mapping[str, LayerCost]) -> StageCost:
    """Return the cost with the costs of each part of the stage. Part 0 recomputes the forward of all layers."""
    if not stage.sum_parts or not cost.backward:
        return cost
    parts = [[layers[layer_id] for layer_id in part] for part in layers_by_part(stage)]
    forward = sum(layer.forward for part in parts for layer in part)
    scale = cost.forward / forward / cost.backward if forward else 1 / cost.backward  # one program with the forward takes less time
    _, *later = (scale * sum(layer.backward for layer in part) for part in parts)
    sizes = tuple(sum(layer.summed for layer in part) for part in parts)
    return replace(cost, part_times=(1 - sum(later), *later), part_accumulators=sizes)


def pieces(stage: Stage, cost: StageCost) -> list[float]:
    """Return the bytes of the gradients of each part of a stage."""
    return [cost.accumulators_of_part(part, stage) for part in range(len(stage.sum_parts))]


def fit_cost(cost: StageCost, spans: Sequence[Span]) -> StageCost:
    """Return the cost of a stage with the measured share of each part in the time of a backward."""
    numbers = sorted({span.part for span in spans if span.part})
    if not numbers:
        return cost
    whole = cost.backward_weight if any(span.op == "W" for span in spans) else cost.backward
    later = [median(span.end - span.start for span in spans if span.part == number) / whole for number in numbers]
    return replace(cost, part_times=(max(1 - sum(later), 0.0), *later))


PROGRAM = ProgramHooks(
    instructions=(ComputePart, SumPart),
    sums=(SumPart,),
    stage_cost=stage_cost,
    fit_cost=fit_cost,
    pieces=pieces,
    per_piece=("part_times", "part_accumulators"),
    unit=lambda plan: max(len(stage.sum_parts) or 1 for stage in plan.stages),  # so that no part takes zero time
    lower=_Lowering,
    verify=_Verification,
    writers={ComputePart: _compute_part, SumPart: _sum, AllReduce: _sum},
    changes={
        "first part": lambda prices, cost, s: Change(cost.residuals, cost.residuals + cost.temporary, residuals=cost.residuals),
        "part": lambda prices, cost, s: Change(0, cost.temporary),
        "last part": lambda prices, cost, s: Change(-cost.residuals, residuals=-cost.residuals),
    },
)
