"""The properties of plans that follow from their schedules: delays, and the microbatches in flight."""

from bisect import bisect_left
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

import jpipe
from jpipe.schedules import PlainShape, PlanOptions

__all__ = ["is_planned", "needs_vertical_sync", "planned_schedules", "updates_early"]


@lru_cache(maxsize=4096)
def mean_delay(shape: PlainShape) -> float:
    """Return the mean age, in updates, of the weights with which the stages compute gradients. It equals `jpipe.Plan.mean_delay`."""
    return sum(jpipe.schedules.SCHEDULES[shape.schedule].delays(shape)) / shape.depth


@cache
def is_planned(schedule: str) -> bool:
    """Return whether planners search all cuts for this schedule: it has one stage on each rank and does not split backwards."""
    rules, shape = jpipe.schedules.SCHEDULES[schedule], PlainShape(schedule, 4, (1, 1))
    if "order" in rules.options or (rules.layout != "straight" and rules.flushes):
        return False
    return not any(rules.splits(shape, s) for s in range(shape.depth))


def planned_schedules() -> tuple[str, ...]:
    """Return the schedules for which planners search all cuts. Plans of the other schedules are derived from plans of these schedules."""
    return tuple(filter(is_planned, jpipe.schedules.SCHEDULES))


def updates_early(schedule: str) -> bool:
    """Return whether updates cannot depend on the gradients of all stages, as for shared parameters or a norm over all stages."""
    options = PlanOptions(vertical_sync=needs_vertical_sync(schedule))
    shape = PlainShape(schedule, 2, (1, 1), options)
    return is_planned(schedule) and jpipe.schedules.SCHEDULES[schedule].updates_early(shape)


def needs_vertical_sync(schedule: str) -> bool:
    """Return whether the updates of a schedule need `vertical_sync` to depend on the gradients of all stages."""
    rules = jpipe.schedules.SCHEDULES[schedule]
    return "vertical_sync" in rules.options and rules.updates_early(PlainShape(schedule, 2, (1, 1)))


class ScheduleFacts(NamedTuple):
    """The properties of a plan's stages that follow from the schedule, as arrays over the stages.

    Attributes:
        in_flight: n_s, the microbatches in flight.
        versions: the weight versions alive.
        fused: whether the forward and the backward (or the first half of the backward) are one program.
        hidden: without a flush, how many forwards and backwards a replica can compute before it needs a sum of gradients that has begun.
        early: the most gradients that arrive while a stage still computes forwards of additional microbatches in flight.
    """

    in_flight: Any
    versions: Any
    fused: Any
    hidden: Any
    early: int = 0


@lru_cache(maxsize=4096)
def schedule_facts(shape: PlainShape) -> ScheduleFacts | None:
    """Return the facts of a schedule for a plan with one stage on each rank, or None if the schedule cannot run the plan."""
    rules, stages = jpipe.schedules.SCHEDULES[shape.schedule], range(shape.depth)
    if rules.refuses(shape):
        return None
    in_flight = [rules.in_flight(shape, s) for s in stages]
    # With more microbatches the first op is the same, but the list of ops takes long.
    each = max(shape.replicas) * shape.row_slices
    few = min(shape.microbatches // each, 4 * shape.depth) * each
    beginning = replace(shape, microbatches=few) if len(set(shape.replicas)) == 1 else shape
    return ScheduleFacts(
        np.array(in_flight),
        np.array([rules.versions_alive(shape, s) for s in stages]),
        np.array([_begins_fused(beginning, s) for s in stages]),
        np.array([hidden_passes(shape, s, ahead) for s, ahead in enumerate(in_flight)]),
        shape.options.extra_in_flight,
    )


def _begins_fused(shape: PlainShape, s: int) -> bool:
    """Return `Schedule.begins_fused` for a rank of one stage from its first computation; a list of all takes long."""
    first = next(jpipe.schedules.SCHEDULES[shape.schedule].computations(shape, s, 0, 0, 1))
    op = jpipe.ops.OPS[first.op]
    return op.begins and op.gives_gradient


def hidden_passes(shape: PlainShape, s: int, in_flight: int) -> int:
    """Return how many forwards, in addition to n_s, a replica can compute after the first batch before a forward needs the update."""
    rules, replicas = jpipe.schedules.SCHEDULES[shape.schedule], shape.replicas[s]
    if rules.flushes or replicas == 1 or shape.options.update_every == "replicas":  # no overlap, no sum, or overlap with one pass
        return 1
    done, most = shape.microbatches // replicas - 1 + in_flight, 1
    while not rules.version(shape, s, (done + most) * replicas):
        most *= 2
    return bisect_left(range(most), 1, key=lambda more: rules.version(shape, s, (done + more) * replicas))
