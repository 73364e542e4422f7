"""The price of a plan from a simulation of its program, instruction by instruction, with transfers and sums on the links of a topology."""

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

import jpipe
from jpipe_planner.cost.devices import device_numbers, network, slowed
from jpipe_planner.machine.topology import Topology

__all__ = ["Simulated", "simulate_plan"]

MOST_FORWARDS = 100_000  # the most forwards in a simulation, for some seconds
PROGRAMS = 4  # the most programs that are kept: plans that differ in their cuts have the same one
BATCHES = 4  # the fewest batches in a window, if the schedule does not flush
_NEVER = 10**9  # updates between agreements that are too many for a simulation to reach an agreement
# the fewest microbatches of a worker in a window, because with shared links the pattern repeats only after several batches
MICROBATCHES = 24


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation of some batches in steady state.

    Attributes:
        batch_seconds: seconds per batch.
        bubble: share of the ranks' time in which they do not compute.
        held_bytes: for each rank the largest number of bytes that it holds between computations, as in `jpipe.programs.Prediction`.
        peak_bytes: for each rank its peak memory in bytes, including temporaries.
        sent_bytes: for each rank the bytes that it sends per batch.
        host_bytes: for each rank the largest number of bytes that it keeps in host memory.
    """

    batch_seconds: float
    bubble: float
    held_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    sent_bytes: tuple[float, ...]
    host_bytes: tuple[int, ...] = ()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause Python's garbage collector, which otherwise looks again and again through the many small objects of a simulation."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_garbage_collection()
def simulate_plan(
    plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], topology: Topology, global_norm: bool = False
) -> Simulated | None:
    """Simulate a plan on a topology. Rank n is on device n, or where the plan's `keep_together` places it.

    If equal pipelines have no ports in common, only one of them is simulated, because the others do the same at the same times. Pipelines
    that agree are simulated for a round of agreements, and again without agreements: the time is the mean, the memory includes agreements.
    If ranks share cores, computations take longer while more ranks compute than there are cores.

    The costs are those on the usual device: `Profile.stage_costs`, or `jpipe.Pipeline.costs` for exact bytes. With `global_norm` updates
    wait for the norm of the gradients of all stages. Return None if the simulation would take more than some seconds.
    """
    plan = plan.counted
    if plan.agree is not None and _round_batches(plan) < plan.agree.every < _NEVER:
        return _between_agreements(plan, costs, topology, global_norm)
    costs, uses = slowed(plan, costs, topology), {"global_norm": global_norm, **jpipe.programs.uses_by_costs(costs)}
    workers = None if any(uses.values()) else _first_pipeline(plan, topology)
    if forwards(plan, topology) > MOST_FORWARDS:
        return None
    link, overlap, lower = network(plan, topology), topology.device.overlap, (_without_layers(plan), workers, tuple(uses.items()))
    if jpipe.programs.has_repeated_batches(plan, **uses):
        program, is_short = lowered(*lower), topology.cores is None  # if ranks share cores, the whole window is needed
        prediction, seconds = jpipe.programs.simulate_batches(program, *window(plan), costs, link, overlap, until_periodic=is_short)
    else:
        counted = sum(window(plan)) + 1
        if overlap != "transfers and sums":
            # If ranks wait for transfers or sums of other ranks, the last batches are faster: earlier ranks have nothing left to send.
            counted += jpipe.programs.batches_until_full(plan)
        counted += -counted % _round_batches(plan)
        program = lowered(*lower, counted)
        # a plan is verified before it runs
        prediction = jpipe.simulate(program, costs, link, overlap, host=hosts(plan, topology), brief=True)
        seconds = _measured(plan, prediction.timeline)
    if topology.cores is not None:
        first, batches = window(plan)
        cut = jpipe.programs.extract_window(prediction.timeline, ((),) * len(prediction.timeline), plan.microbatches, first, batches)
        seconds *= _stretched(cut.timeline, cut.seconds, topology.cores) / cut.seconds
    passes = [plan.microbatches / plan.replicas[s] * (cost.forward + cost.backward) for s, cost in enumerate(costs)]
    # In a window ranks may still run ahead of the busiest one, which all wait for in the end.
    seconds = max(seconds, *(sum(passes[s] for s in stages) for stages in plan.pipeline_ranks))
    computing = sum(
        plan.microbatches * (cost.forward + cost.backward) + plan.updates_per_batch(s) * plan.replicas[s] * cost.update
        for s, cost in enumerate(costs)
    )
    ranks = [rank if workers is None else rank - replica for rank, (_, replica) in enumerate(plan.rank_positions)]
    return Simulated(
        batch_seconds=seconds,
        bubble=max(1 - computing / (len(plan.rank_workers) * seconds), 0.0),  # not a little below 0
        held_bytes=tuple(map(prediction.held_bytes.__getitem__, ranks)),
        peak_bytes=tuple(map(prediction.peak_bytes.__getitem__, ranks)),
        sent_bytes=tuple(prediction.moved_bytes[rank] / program.end for rank in ranks),
        host_bytes=tuple(map(prediction.host_bytes.__getitem__, ranks)),
    )


@lru_cache(maxsize=PROGRAMS)
def lowered(
    plan: jpipe.Plan, workers: frozenset[int] | None, uses: tuple[tuple[str, Any], ...], batches: int | None = None
) -> jpipe.programs.Program:
    """Return the program of some batches of a plan, or if None with the batches that later ones repeat."""
    if batches is None:
        return jpipe.programs.lower_repeated(plan, workers=workers, **dict(uses))
    return jpipe.lower(plan, batches, workers=workers, **dict(uses))


def _without_layers(plan: jpipe.Plan) -> jpipe.Plan:
    """Return the plan without the layers of stages; sums in parts have a size for each layer."""
    stages = tuple(stage if stage.sum_parts else stage.model_copy(update={"layers": ()}) for stage in plan.stages)
    return plan.model_copy(update={"stages": stages})


def _first_pipeline(plan: jpipe.Plan, topology: Topology) -> frozenset[int] | None:
    """Return the workers of the first pipeline if all pipelines do the same at the same times, otherwise None."""
    alike = len(set(plan.replicas)) == 1 and plan.replicas[0] > 1 and len([level for level in topology.levels if level.count > 1]) == 1
    differs = topology.differing or topology.cores is not None or plan.placement is not None
    if not alike or differs or plan.shard_optimizer or plan.agree is not None or plan.links is not None or plan.offload is not None:
        return None
    return frozenset(w for w, (_, replica) in enumerate(plan.workers) if replica == 0)


def _between_agreements(
    plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], topology: Topology, global_norm: bool
) -> Simulated | None:
    """Estimate a plan with rounds that are too long to simulate, from a shorter round and from batches without an agreement."""
    assert plan.agree is not None
    some = _round_batches(plan)
    plans = [plan.model_copy(update={"agree": plan.agree.model_copy(update={"every": every})}) for every in (some, _NEVER)]
    agreeing, alone = (simulate_plan(each, costs, topology, global_norm) for each in plans)
    if agreeing is None or alone is None:
        return None
    share = some / plan.agree.every
    seconds = share * agreeing.batch_seconds + (1 - share) * alone.batch_seconds
    return dataclasses.replace(
        agreeing,
        batch_seconds=seconds,
        bubble=1 - (1 - alone.bubble) * alone.batch_seconds / seconds,
        sent_bytes=tuple(share * more + (1 - share) * less for more, less in zip(agreeing.sent_bytes, alone.sent_bytes, strict=True)),
    )


def _round_batches(plan: jpipe.Plan) -> int:
    """Return the number of batches in the longest round of agreements that is simulated; 1 without agreements.

    In such a round each agreement ends before the next begins. An agreement that is applied late ends after the batch that applies it,
    where the stage waits for its sum.
    """
    if plan.agree is None or plan.agree.every >= _NEVER:
        return 1
    fragments = plan.depth if plan.agree.fragments == "stages" else plan.agree.fragments or 1
    flushes = jpipe.schedules.SCHEDULES[plan.schedule].flushes
    settles = 1 if flushes else jpipe.programs.batches_until_full(plan)
    return min(plan.agree.every, fragments * (plan.agree.delay + settles))


def forwards(plan: jpipe.Plan, topology: Topology) -> int:
    """Return the number of forwards in a simulation of a plan; batches that repeat are lowered once, which takes about as long."""
    plan = plan.counted
    pipelines = plan.replicas[0] if _first_pipeline(plan, topology) is not None else 1
    lowered = simulated = sum(window(plan)) + 1
    if jpipe.programs.has_repeated_batches(plan):
        lowered = 1 + (0 if jpipe.schedules.SCHEDULES[plan.schedule].flushes else jpipe.programs.batches_until_full(plan))
    return plan.depth * plan.microbatches * (lowered + simulated) // 2 // pipelines


def hosts(plan: jpipe.Plan, topology: Topology) -> jpipe.programs.HostLink | None:
    """Return a function from the number of a rank to its link to host memory; None if the plan keeps nothing in host memory."""
    if plan.offload is None:
        return None
    devices, links = device_numbers(plan), [device.host.link for device in topology.devices]
    return lambda rank: links[devices[rank]]


def _measured(plan: jpipe.Plan, timeline: jpipe.programs.Timeline) -> float:
    """Return the mean seconds per batch over the window and the simulated ranks: ranks that share links begin batches irregularly."""
    first, batches = window(plan)
    seconds, rows = 0.0, [(workers, row) for workers, row in zip(plan.rank_workers, timeline, strict=True) if row]
    for workers, row in rows:
        forwards_per_batch = len(workers) * plan.microbatches // plan.replicas[plan.workers[workers[0]][0]]
        starts = [span.start for span in row if jpipe.ops.OPS[span.op].begins]
        seconds += starts[(first + batches) * forwards_per_batch] - starts[first * forwards_per_batch]
    return seconds / len(rows) / batches


def window(plan: jpipe.Plan) -> tuple[int, int]:
    """Return the first batch, in steady state, and the number of batches that are measured, whole rounds of agreements."""
    most, of_round = max(plan.replicas), _round_batches(plan)
    late = 1 if most > 1 else 0  # with sums that overlap, the steady state begins later
    if jpipe.schedules.SCHEDULES[plan.schedule].flushes:
        first, batches = 1 + late, 2  # nearly all batches are equal
    else:
        first, batches = jpipe.programs.batches_until_full(plan) + 1 + late, max(BATCHES, -(-MICROBATCHES * most // plan.microbatches))
    if plan.agree is not None and plan.agree.delay:
        first += of_round + plan.agree.delay  # by then each fragment has applied an agreement
    return first, batches + -batches % of_round


def _stretched(timeline: jpipe.programs.Timeline, seconds: float, cores: float | None) -> float:
    """Return the seconds if the ranks that compute at the same time share the cores evenly, so that their order stays the same."""
    if cores is None or len(timeline) <= cores:
        return seconds
    spans = [(span.start, span.end) for row in timeline for span in row]
    spans += [(span.update_start, span.update_end) for row in timeline for span in row if span.updates]
    starts, ends = (np.sort([span[n] for span in spans]) for n in (0, 1))
    times = np.unique(np.concatenate([starts, ends, [0.0, seconds]]))
    middle = (times[:-1] + times[1:]) / 2
    busy = np.searchsorted(starts, middle, side="right") - np.searchsorted(ends, middle, side="right")
    return float(np.sum(np.diff(times) * np.maximum(busy / cores, 1.0)))
