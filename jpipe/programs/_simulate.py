"""Simulate programs without devices: verify each instruction, and predict time, bubble, memory and bytes moved."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jpipe.capabilities.registry import programs_of, uses_of
from jpipe.errors import InputError, short
from jpipe.plan import Plan
from jpipe.programs._costs import OVERLAPS, HostLink, Link, Network, Overlap, StageCost, check_costs, unit_costs
from jpipe.programs._execution_order import ProgramError, Violation, walk
from jpipe.programs._instructions import Instruction, Program, Receive, Send
from jpipe.programs._verify import Verifier, rank_computations
from jpipe.programs.prediction import Prediction, Simulator, draw_grid
from jpipe.schedules import SCHEDULES


def simulate(
    program: Program,
    costs: Sequence[StageCost] | None = None,
    link: Link | Network | None = None,
    overlap: Overlap = "transfers and sums",
    *,
    host: Link | HostLink | None = None,
    brief: bool = False,
) -> Prediction:
    """Verify a program of whole batches (from an empty to an empty pipeline) and predict its time, memory and bytes moved.

    Each rank runs its own instructions in order. A message is sent as soon as it is computed; inside a rank this takes no time. An update
    waits until all r replicas have summed their gradients, for which each replica sends 2 (r - 1) / r of the gradients. Messages and sums
    that share ports are served in the order in which they become ready; each begins when all its ports are free. A program is verified
    once, independently of `lower`:

    - each rank computes in the order of the schedule, and reads the weight versions given by the schedule's formula, which must be alive;
    - no more versions are alive than the schedule allows;
    - each update uses the gradients of exactly its batch;
    - every buffer is made before it is used, and used once; nothing is left behind;
    - outputs and gradients go to the worker that needs them;
    - the ranks do not deadlock;
    - the total order extends data and program order.

    Args:
        program: a program from `lower`, with `drain` and with `begin` equal to `start`. It may have only some workers, if these send
            messages only to each other. Then a sum begins when the replicas among them are ready, and the other ranks have no spans.
        costs: the cost of each stage. By default a forward takes 1, a backward 2 (3 if it recomputes), and all sizes are 0.
        link: the link between any two ranks, or a function of two ranks that returns their link. By default transfers and sums are free. A
            sum has the speed of the slowest link between neighbouring replicas, and occupies the ports of all of these links.
        overlap: what can overlap with the computations of a rank. A transfer or sum that cannot overlap begins when all of its ranks have
            reached it in their programs, and they compute nothing until it has ended, like an entry in a device's queue.
        host: the link from a rank to the memory of its host, for the moves of `Plan.offload`, or a function of a rank that returns this
            link. By default moves are free. Each direction carries one move at a time. From the beginning of a move, the moved bytes count
            at the destination.

    Returns:
        The timeline, the memory and derived quantities, in the units of the costs.

    Raises:
        ProgramError: the verification fails; the message says where, with the text grid up to there.
        InputError: the program does not run from an empty to an empty pipeline, the number of costs is not the number of stages, a cost is
            negative or not finite, or `overlap` has another value.
    """
    _check(program, costs, link, overlap, host)
    costs = unit_costs(program.plan) if costs is None else costs
    network, host_link = _link_of("", link), _link_of("host: ", host)
    executed: list[Instruction] = []
    try:
        if not (brief or program.verified):
            _verify(program, executed)
    except Violation as violation:
        simulator = Simulator(replace(program, instructions=tuple(executed)), costs, network, host_link)
        simulator.run()
        raise ProgramError(f"{violation}\n{draw_grid(simulator.timeline(), notes=violation.notes)}") from None
    simulator = Simulator(program, costs, network, host_link, overlap, brief=brief)
    simulator.run()
    return simulator.prediction()


def has_repeated_batches(plan: Plan, **uses: Any) -> bool:
    """Return whether all batches of a plan have the same program once the pipeline is full, as `lower_repeated` requires.

    This is so if no capability carries anything from one batch to later ones, and without a flush no update waits for other stages.

    Args:
        plan: the plan.
        uses: as in `lower`.
    """
    flushes = SCHEDULES[plan.schedule].flushes
    return not any(hooks.carries_over or (hooks.waits is not None and not flushes) for hooks in programs_of(plan, uses_of(**uses)))


def simulate_batches(
    program: Program,
    first: int,
    batches: int,
    costs: Sequence[StageCost],
    link: Link | Network | None = None,
    overlap: Overlap = "transfers and sums",
    *,
    until_periodic: bool = True,
) -> tuple[Prediction, float]:
    """Predict the seconds of a batch in steady state, from a program with batches that later ones repeat.

    The program is not verified. The prediction has no memory over time and no transfers, and its timeline may have more batches than the
    program; otherwise it equals the result of `simulate` for the program of all batches.

    Args:
        program: a program from `lower_repeated`.
        first: the first batch that counts.
        batches: the number of batches that count.
        costs: the cost of each stage.
        link: as in `simulate`.
        overlap: as in `simulate`.
        until_periodic: whether to stop as soon as batches repeat earlier ones with all times shifted by the same seconds, because all later
            batches would repeat them as well. Then the prediction has no timeline, and its bubble is 0.

    Returns:
        The prediction, and the seconds of a batch: those by which batches are shifted, or otherwise the mean over the batches that count.
        Seconds and bubble of the prediction are for its timeline, and moved bytes are for the batches of the program.

    Raises:
        ProgramError: the ranks deadlock.
        InputError: as in `simulate`; or the program is not from `lower_repeated`.
    """
    _check(program, costs, link, overlap, None)
    if program.repeated is None:
        raise InputError(
            where="simulate_batches", expected="a program from lower_repeated", found="one from lower", change="use jpipe.simulate"
        )
    simulator = Simulator(program, costs, _link_of("", link), _link_of("host: ", None), overlap, brief=True)
    each = program.repeated.batches
    start = max(-(-(first - program.end + each) // each), 0)
    seconds = simulator.run_repeated(start, start + -(-batches // each), until_periodic)
    return simulator.prediction(with_times=not until_periodic), seconds / each


def _link_of(name: str, link: Link | Callable[..., Link] | None) -> Callable[..., Link]:
    """Return a function from ranks to their link. If `link` is a function, its results are checked."""
    if not callable(link):
        same = link or Link()
        return lambda *ranks: same

    def checked(*ranks: int) -> Link:
        found: Any = link(*ranks)
        if not isinstance(found, Link):
            numbers = " and ".join(map(str, ranks))
            raise InputError(f"simulate: {name}expected a function that gives a jpipe.Link, found {short(found)} for rank {numbers}")
        return found

    return checked


def verify(program: Program) -> None:
    """Verify a program as `simulate` does, or its part for some workers.

    In a part, all its workers are verified, and deadlocks between them are found. Outputs and gradients must go to and come from the right
    workers, but the instructions of workers outside the part are not verified.
    """
    try:
        _verify(program, [])
    except Violation as violation:
        if program.workers is None:
            simulate(program)  # fails as well, with the grid in its message
        raise ProgramError(str(violation)) from None


def _verify(program: Program, executed: list[Instruction]) -> None:
    """Verify the instructions in an executable order, append each to `executed`, and at the end mark the program as verified."""
    orders, rank_of = rank_computations(program), program.plan.rank_of
    workers = range(len(rank_of)) if program.workers is None else sorted(program.workers)
    verifiers = {w: Verifier(program, w, orders[rank_of[w]]) for w in workers}
    for instruction in walk(program):
        verifiers[instruction.worker].check(instruction)
        executed.append(instruction)
    for verifier in verifiers.values():
        verifier.check_end()
    program.verified.add(True)


def _check(program: Any, costs: Any, link: Any, overlap: Any, host: Any) -> None:
    """Check the arguments of `simulate`."""
    if not isinstance(program, Program):
        raise InputError(where="simulate", expected="a program", found=type(program).__name__, change="give jpipe.lower(plan, batches)")
    if program.workers is not None and not _is_closed(program, program.workers):
        raise InputError(
            "simulate: expected the program of all workers, or of some that send messages only to each other, found one of some workers "
            "that exchange messages with others; lower it without workers"
        )
    if not program.drained or program.begin != program.start:
        raise InputError("simulate: expected the program of a whole run, found a part of a run; lower it with begin = start and drain=True")
    if not (link is None or isinstance(link, Link) or callable(link)):
        raise InputError(where="simulate", expected="a jpipe.Link, or a function from two ranks to their link", found=short(link))
    if not (host is None or isinstance(host, Link) or callable(host)):
        raise InputError(where="simulate", key="host", expected="a jpipe.Link, or a function from a rank to its link", found=short(host))
    if overlap not in OVERLAPS:
        raise InputError(where="simulate", key="overlap", expected=f"one of {', '.join(map(repr, OVERLAPS))}", found=short(overlap))
    if costs is None:
        return
    if not isinstance(costs, Sequence) or not all(isinstance(cost, StageCost) for cost in costs):
        raise InputError(where="simulate", expected="a list of jpipe.programs.StageCost as costs", found=short(costs))
    if len(costs) != program.plan.depth:
        raise InputError(where="simulate", expected=f"{program.plan.depth} costs, one for each stage", found=len(costs))
    check_costs(program.plan, costs)


def _is_closed(program: Program, workers: frozenset[int]) -> bool:
    """Return whether all messages of a program go from and to these workers."""
    if "is closed" not in program.prepared:
        ends = (i.to if isinstance(i, Send) else i.source for i in program.instructions if isinstance(i, (Send, Receive)))
        program.prepared["is closed"] = workers.issuperset(ends)
    return bool(program.prepared["is closed"])
