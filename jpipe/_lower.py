"""From compute order to programs: insert loads, transfers, updates and releases, and find the one total order of all workers."""

from collections import deque
from typing import NamedTuple

from jpipe._errors import InputError
from jpipe._plan import Plan
from jpipe._program import (
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
    recomputes), transfers where their producer ends. All processes derive the same order from the same plan.

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
    if not 0 <= start <= begin <= batches:
        raise InputError(f"lower: expected 0 ≤ start ≤ begin ≤ batches, found start {start}, begin {begin}, batches {batches}")
    if clips and not SCHEDULES[plan.schedule].flushes:
        raise InputError(f"lower: clips is for schedules that flush, found '{plan.schedule}'")
    orders = [_order(plan, s, start, batches, drain) for s in range(plan.depth)]
    done = [len(_order(plan, s, start, begin, drain=False)) for s in range(plan.depth)]  # by the steps before
    timed = _simulated_times(plan, orders)
    times: list[int] = []
    instructions: list[Instruction] = []
    for s, i, begins, ends in timed:
        if i < done[s]:
            continue
        before, after = _expand(plan, s, orders[s][i], clips)
        instructions += before
        times += [begins] * len(before)
        instructions += after
        times += [ends] * len(after)
    # A stable sort by time keeps the topological order in which `_simulated_times` visited the computations where times are equal.
    in_time = sorted(range(len(times)), key=times.__getitem__)
    return Program(plan, start, begin, batches, drain, clips, tuple(instructions[i] for i in in_time))


def batches_until_full(plan: Plan) -> int:
    """After so many batches since the pipeline was empty, every step does the same, one batch later."""
    in_flight = SCHEDULES[plan.schedule].in_flight(plan, 0)
    return -(-(in_flight - 1) // plan.microbatches) + 1


def lower_evaluation(plan: Plan, microbatches: int, version: int) -> Program:
    """Write the programs that run `microbatches` forward only, at one weight version, through all stages."""
    last = plan.depth - 1
    instructions: list[Instruction] = []
    for diagonal in range(microbatches + last):
        for s in range(plan.depth):
            k = diagonal - s
            if 0 <= k < microbatches:
                instructions += _loads(plan, s, k)
                instructions.append(Evaluate(s, k, version))
                if s < last:
                    instructions += _transfer(s, s + 1, k, "activation")
    return Program(plan, 0, 0, 1, True, False, tuple(instructions))


class Fused(NamedTuple):
    """A forward and the backward of the same microbatch right after it."""

    microbatch: int


def _order(plan: Plan, s: int, start: int, batches: int, drain: bool) -> list[Compute | Fused]:
    """The schedule's order for stage s up to the first forward that needs batch `batches`, fused where that is possible."""
    schedule, end = SCHEDULES[plan.schedule], batches * plan.microbatches
    order: list[Compute | Fused] = []
    for entry in schedule.order(plan, s, start, batches if drain else batches + 1):
        if entry.op == "F" and entry.microbatch >= end:
            break
        if s == plan.depth - 1 and entry.op == "B" and order and order[-1] == ("F", entry.microbatch):
            order[-1] = Fused(entry.microbatch)
        else:
            order.append(entry)
    return order


def _simulated_times(plan: Plan, orders: list[list[Compute | Fused]]) -> list[tuple[int, int, int, int]]:
    """Run the orders with free transfers: (stage, position, start, end) of every computation, in a topological order."""
    depth = plan.depth
    backward_time = [3 if stage.recompute != "none" else 2 for stage in plan.stages]
    forward_end: list[dict[int, int]] = [{} for _ in range(depth)]
    backward_end: list[dict[int, int]] = [{} for _ in range(depth)]
    position, clock = [0] * depth, [0] * depth
    timed: list[tuple[int, int, int, int]] = []
    waiting = deque(range(depth))
    while waiting:
        s = waiting.popleft()
        order = orders[s]
        moved = False
        while position[s] < len(order):
            entry = order[position[s]]
            k, is_backward = entry.microbatch, isinstance(entry, Compute) and entry.op == "B"
            if is_backward:
                ready = backward_end[s + 1].get(k) if s + 1 < depth else 0
            else:
                ready = forward_end[s - 1].get(k) if s > 0 else 0
            if ready is None:
                break
            begins = max(clock[s], ready)
            if is_backward:
                ends = backward_end[s][k] = begins + backward_time[s]
            elif isinstance(entry, Fused):
                ends = backward_end[s][k] = begins + 1 + backward_time[s]
            else:
                ends = forward_end[s][k] = begins + 1
            timed.append((s, position[s], begins, ends))
            clock[s] = ends
            position[s] += 1
            moved = True
        if moved:
            waiting.extend(n for n in (s - 1, s + 1) if 0 <= n < depth)
    if stuck := [s for s in range(depth) if position[s] < len(orders[s])]:
        raise AssertionError(f"schedule '{plan.schedule}' deadlocks: stages {stuck} wait for each other")
    return timed


def _expand(plan: Plan, s: int, entry: Compute | Fused, clips: bool) -> tuple[list[Instruction], list[Instruction]]:
    """The instructions around one computation: those at its start (itself included) and those at its end."""
    k, m = entry.microbatch, plan.microbatches
    version = SCHEDULES[plan.schedule].version
    v = version(plan, s, k)
    after: list[Instruction] = []
    if isinstance(entry, Compute) and entry.op == "F":
        if s < plan.depth - 1:
            after += _transfer(s, s + 1, k, "activation")
        return [*_loads(plan, s, k), Forward(s, k, v)], after
    ends_batch = (k + 1) % m == 0
    if clips and ends_batch:
        after.append(SumSquares(s, k // m))
    if s > 0:
        after += _transfer(s, s - 1, k, "gradient")
    next_v = version(plan, s, k + 1)
    assert next_v - v in (0, 1), "versions advance one by one"
    dead = v if next_v > v else None  # microbatches in flight and to come all read later versions
    if clips and ends_batch:
        if s == 0:  # the last to know its gradients: from here the norm goes from stage to stage, and all update
            for stage in range(1, plan.depth):
                after += _transfer(stage - 1, stage, k, "norm")
            after += [Update(stage, k // m, k // m) for stage in range(plan.depth)]
    elif ends_batch:
        after.append(Update(s, k // m, dead))
    elif dead is not None:
        after.append(Release(s, dead))
    if isinstance(entry, Fused):
        return [*_loads(plan, s, k), ForwardBackward(s, k, v)], after
    return [Backward(s, k, v)], after


def _loads(plan: Plan, s: int, k: int) -> list[Instruction]:
    loads: list[Instruction] = []
    if s == 0:
        loads.append(Load(s, k, "inputs"))
    if s == plan.depth - 1:
        loads.append(Load(s, k, "labels"))
    return loads


def _transfer(source: int, to: int, k: int, message: Message) -> list[Instruction]:
    return [Send(source, k, message, to), Receive(to, k, message, source)]
