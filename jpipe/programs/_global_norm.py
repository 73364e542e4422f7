"""Separate messages that bring the global norm of a batch's gradients to all workers."""

from itertools import pairwise

from jpipe.plan import Plan
from jpipe.programs._instructions import Instruction, SumSquares
from jpipe.programs._route import last_microbatch, transfer


def norm_alone(plan: Plan, batch: int) -> list[Instruction]:
    """Return separate messages: the sums of squares from the last stage to stage 0, and the norm to all workers."""
    k, first, written = last_microbatch(plan, batch), [workers[0] for workers in plan.stage_workers], list[Instruction]()
    for s in reversed(range(plan.depth)):
        written.append(SumSquares(first[s], batch))
        if s > 0:
            written += transfer(first[s], first[s - 1], k, "squares")
    return written + distribute(plan, batch, {first[0]})


def norm_of_pipeline(plan: Plan, batch: int, pipeline: int) -> list[Instruction]:
    """Return separate messages that bring the norm of one of several pipelines that agree rarely to its workers, as `norm_alone`."""
    k, workers, written = last_microbatch(plan, batch), [replicas[pipeline] for replicas in plan.stage_workers], list[Instruction]()
    for s in reversed(range(plan.depth)):
        written += [SumSquares(workers[s], batch), *(transfer(workers[s], workers[s - 1], k, "squares") if s > 0 else ())]
    for source, to in pairwise(workers):
        written += transfer(source, to, k, "norm")
    return written


def distribute(plan: Plan, batch: int, holders: set[int]) -> list[Instruction]:
    """Return the messages that bring the norm from workers that have it, at least one of stage 0, to all others."""
    k, written, source = last_microbatch(plan, batch), list[Instruction](), -1
    for workers in plan.stage_workers:
        for worker in sorted(workers, key=lambda w: w not in holders):
            if worker not in holders:
                written += transfer(source, worker, k, "norm")
            if worker in holders or worker == workers[0]:
                source = worker
    return written
