"""Lower a plan: insert loads, transfers, sums, updates and releases into the schedule's order of computations."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from jpipe._frozen import NOTHING
from jpipe._numbers import is_int
from jpipe.capabilities.protocol import hooks
from jpipe.capabilities.registry import known_beside, programs_of, uses_of
from jpipe.errors import InputError, Problem, nearest, short
from jpipe.plan import Plan, excluded
from jpipe.programs._instructions import Compute, Instruction, Load, Program, Repeated, joined
from jpipe.programs._route import transfer
from jpipe.programs.lowering._run import Run
from jpipe.schedules import SCHEDULES


def lower(
    plan: Plan,
    batches: int,
    *,
    begin: int = 0,
    start: int = 0,
    drain: bool = True,
    workers: Collection[int] | None = None,
    **uses: Any,
) -> Program:
    """Write the programs of all workers, or of some, for the batches `begin` .. `batches` - 1.

    Computations are in the order of their simulated starts: a forward takes 1, a backward 2, half of a backward 1, and recomputation 1
    more. Transfers and sums come where the computations of their arrays end. All processes derive the same order from the plan.

    Args:
        plan: the plan to run.
        batches: one past the last batch to load.
        begin: the first batch to load; microbatches of earlier batches may be in flight.
        start: the batch before which the pipeline was last empty.
        drain: whether to finish all microbatches; otherwise stop before the first computation that needs batch `batches`.
        workers: the workers with instructions in the program; all by default.
        uses: what to do in addition to the plan. `global_norm=True`: updates use the norm of the gradients of all stages.
            `shared_parameters=((0, 3),)`: for each group of shared parameters, the stages that hold them, in order.

    Returns:
        The program. The programs of successive steps, one after the other, are one run.

    Raises:
        InputError: batches are out of order, a worker does not exist, `uses` has an unknown name or something that the schedule cannot do,
            or `Plan.order` deadlocks (the message ends with the text grid up to the deadlock).
        ProgramError: the order of a schedule deadlocks; the message ends with the text grid up to the deadlock.
    """
    if not isinstance(plan, Plan):
        raise InputError(where="lower", expected="a jpipe.Plan", found=type(plan).__name__, change="make one with Plan.even(…)")
    if not all(map(is_int, (batches, begin, start))):
        raise InputError(where="lower", expected="integers", found=f"start {short(start)}, begin {short(begin)}, batches {short(batches)}")
    if not 0 <= start <= begin <= batches:
        raise InputError(where="lower", expected="0 ≤ start ≤ begin ≤ batches", found=f"start {start}, begin {begin}, batches {batches}")
    for name, value in uses.items():
        if problem := _refusal(plan, name, value):
            raise InputError(problem._replace(where="lower", key=name))
    if workers is not None and not {*workers} <= {*range(len(plan.workers))}:
        raise InputError(
            where="lower", key="workers", expected=f"numbers of workers of the plan, below {len(plan.workers)}", found=short(list(workers))
        )
    run = Run(plan, start, batches, uses_of(**uses), workers)
    if begin > start:
        run.go_on(begin, False)
    return run.program(batches, drain)


def lower_repeated(plan: Plan, *, workers: Collection[int] | None = None, **uses: Any) -> Program:
    """Write the program of as few batches as `simulate_batches` needs to predict any number of batches.

    Under a schedule that flushes this is the first batch. Otherwise these are the batches until the pipeline is full, then the batches that
    all later ones repeat, and a drain. As many batches are repeated as have arrays at the same time: all microbatches in flight, and sums.

    Args:
        plan: the plan to run, for which `has_repeated_batches` is true.
        workers: as in `lower`.
        uses: as in `lower`.
    """
    rules, first, count, plan = SCHEDULES[plan.schedule], 0, 1, plan.counted
    if not rules.flushes:
        period, in_flight, m = rules.period(plan), _in_flight(plan), plan.microbatches
        first = max(batches_until_full(plan), plan.flush_first + -(-2 * in_flight // m))  # all in flight follow a full pipeline
        in_parts = any(unit(plan) > 1 for unit in hooks("unit", programs_of(plan)))
        alive = 2 * m if in_parts else 1  # the sum of a part begins before the previous batch's update
        count = -(-max(in_flight, alive) // (m * period)) * period
    run = Run(plan, 0, first + count, uses_of(**uses), workers)
    parts = [run.program(first, False), run.program(first + count, False), run.program(first + count, True)]
    before = len(parts[0].instructions)
    return replace(joined(parts), repeated=Repeated(before, before + len(parts[1].instructions), count))


def _refusal(plan: Plan, name: str, value: Any) -> Problem | None:
    """Return why a program cannot do something in addition to its plan, or None."""
    if (option := known_beside().get(name)) is None:
        return Problem("unknown", change=nearest(name, known_beside()))
    if not value:
        return None
    if option.refusal is not None and (reason := option.refusal(plan, value)):
        return Problem(reason)
    return excluded(plan, **{option.stands_for: True})


def batches_until_full(plan: Plan) -> int:
    """Return after how many batches an empty pipeline is in steady state: each step repeats the previous one, one batch later.

    Then n_s r_s microbatches are in flight at each stage s, and the first update is made or pending, like later updates after a step.
    """
    plan = plan.counted
    return plan.flush_first + -(-(_in_flight(plan) - 1) // plan.microbatches) + 1


def _in_flight(plan: Plan) -> int:
    """Return the largest number of microbatches that the replicas of a stage have in flight."""
    return max(SCHEDULES[plan.schedule].in_flight(plan, s) * replicas for s, replicas in enumerate(plan.replicas))


def lower_evaluation(
    plan: Plan, microbatches: int, batch: int, *, first: int = 0, labels: bool = True, workers: Collection[int] | None = None
) -> Program:
    """Write the programs that compute only forwards, of `microbatches` microbatches at all stages with the weights after `batch` batches.

    `first` is the number of the first microbatch. The last stage may load labels. Only `workers` (None: all) have instructions.
    """
    instructions: list[Instruction] = []
    written = frozenset(range(len(plan.workers)) if workers is None else workers)
    stages = [
        s for s in range(plan.depth) if not written.isdisjoint(chain(*plan.stage_workers[s : s + 2]))
    ]  # or the next stage, which receives
    versions = [batch * plan.updates_per_batch(s) for s in range(plan.depth)]
    for diagonal in range(microbatches + plan.depth - 1):
        for s in stages:
            k = first + diagonal - s
            if not first <= k < first + microbatches:
                continue
            w, after = plan.worker(s, k), plan.worker(s + 1, k) if s < plan.depth - 1 else None
            if w in written:
                instructions += [Load(w, k, "inputs")] if s == 0 else []
                instructions += [Load(w, k, "labels")] if labels and s == plan.depth - 1 else []
                instructions.append(Compute("E", w, k, versions[s]))
            if after is not None and (w in written or after in written):
                instructions += (i for i in transfer(w, after, k, "activation") if i.worker in written)
    return without_training(plan, instructions, workers)


def without_training(plan: Plan, instructions: Sequence[Instruction], workers: Collection[int] | None) -> Program:
    """Return a program with these instructions that completes no update and no batch."""
    chosen, no_batches = None if workers is None else frozenset(workers), (range(0),) * plan.depth
    return Program(plan, 0, 0, 1, True, NOTHING, (False,) * plan.depth, (), range(0), no_batches, tuple(instructions), chosen)
