"""A plan priced by `jpipe.simulate`: instruction by instruction, with transfers and sums on the links of a topology."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import jpipe
from planner.cost.bound import computing_seconds, port_seconds, unhindered_seconds
from planner.machine.topology import Topology

MOST_FORWARDS = 100_000  # of a simulation: some seconds
BATCHES = 4  # of a window at least, from a pipeline that is full, where it is not flushed
MICROBATCHES = 24  # of each worker in it at least: where workers share links what repeats is longer than a batch


@dataclass(frozen=True)
class Simulated:
    """What a simulation of some batches in steady state says.

    Attributes:
        batch_seconds: of one batch.
        bubble: share of the workers' time in which they do not compute.
        peak_bytes: for each worker the most bytes at a time while a computation runs, what it makes and its temporaries included.
        sent_bytes: for each worker what it sends, a batch.
    """

    batch_seconds: float
    bubble: float
    peak_bytes: tuple[int, ...]
    sent_bytes: tuple[float, ...]


def simulated(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], topology: Topology, clips: bool = False) -> Simulated | None:
    """Simulate a plan on a topology, worker w on its device w, or as the plan's `keep_together` says.

    Args:
        plan: what to run.
        costs: of its stages, as from `Profile.stage_costs` or, in exact bytes, from `jpipe.Pipeline.costs`.
        topology: the links; where workers share cores, time is stretched while more of them compute than there are cores.
        clips: whether updates wait for the norm of all stages' gradients.

    Returns:
        None where it would take longer than some seconds.
    """
    if forwards(plan) > MOST_FORWARDS:
        return None
    first, batches = window(plan)
    link, shown = network(plan, topology), first + batches + 1
    prediction = jpipe.simulate(jpipe.lower(plan, shown, clips=clips), costs, link)
    seconds = max(
        _measured(plan, prediction.timeline), unhindered_seconds(plan, costs, link, first, batches), port_seconds(plan, costs, link)
    )
    if topology.cores is not None:
        cut = jpipe.programs.extract_window(prediction.timeline, prediction.memory, plan.microbatches, first, batches)
        seconds *= _stretched(cut.timeline, cut.seconds, topology.cores) / cut.seconds
    return Simulated(
        batch_seconds=seconds,
        bubble=1 - computing_seconds(plan, costs) / (len(plan.workers) * seconds),
        peak_bytes=prediction.peak_bytes_running,
        sent_bytes=tuple(moved / shown for moved in prediction.moved_bytes),
    )


def forwards(plan: jpipe.Plan) -> int:
    """How many forwards a simulation has, which says how long it takes."""
    return plan.depth * plan.microbatches * (sum(window(plan)) + 1)


def network(plan: jpipe.Plan, topology: Topology) -> jpipe.programs.Network:
    """The link between any two workers of a plan, where they are placed."""
    place = places(plan)
    return lambda source, target: topology.link(place[source], place[target])


def _measured(plan: jpipe.Plan, timeline: jpipe.programs.Timeline) -> float:
    """Seconds of a batch of the window: the mean over the workers, for with links that they share each of them comes to it irregularly."""
    first, batches = window(plan)
    found = []
    for (s, _), row in zip(plan.workers, timeline, strict=True):
        own = plan.microbatches // plan.replicas[s]
        starts = [span.start for span in row if span.op != "B"]
        found.append(starts[(first + batches) * own] - starts[first * own])
    return sum(found) / len(found) / batches


def window(plan: jpipe.Plan) -> tuple[int, int]:
    """The first batch of the window that is simulated, where the pipeline is in steady state, and how many batches it has."""
    most = max(plan.replicas)
    late = 1 if most > 1 else 0  # hidden sums take longer to settle
    if jpipe.schedules.SCHEDULES[plan.schedule].flushes:
        return 1 + late, 2  # nearly all batches do the same
    return jpipe.programs.batches_until_full(plan) + 1 + late, max(BATCHES, -(-MICROBATCHES * most // plan.microbatches))


def places(plan: jpipe.Plan) -> tuple[int, ...]:
    """The number of each worker's device, as `jpipe.Pipeline` places them on as many devices as there are workers."""
    if plan.placement is not None:
        return tuple(number for stage in plan.placement for number in stage)
    return tuple(int(number) for number in np.argsort(plan.placing_order))


def _stretched(timeline: jpipe.programs.Timeline, seconds: float, cores: float | None) -> float:
    """How long it takes when those that compute at a time share the cores evenly: all slow down by the same factor, and the order stays."""
    if cores is None or len(timeline) <= cores:
        return seconds
    spans = [(span.start, span.end) for row in timeline for span in row]
    spans += [(span.update_start, span.update_end) for row in timeline for span in row if span.updates]
    starts, ends = (np.sort([span[n] for span in spans]) for n in (0, 1))
    times = np.unique(np.concatenate([starts, ends, [0.0, seconds]]))
    middle = (times[:-1] + times[1:]) / 2
    busy = np.searchsorted(starts, middle, side="right") - np.searchsorted(ends, middle, side="right")
    return float(np.sum(np.diff(times) * np.maximum(busy / cores, 1.0)))
