"""What schedules say about the plans of a planner: their delays, and what is in flight."""

from bisect import bisect_left
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

import jpipe
from jpipe.schedules import PlainShape, PlanOptions

__all__ = ["is_planned", "needs_vertical_sync", "planned_schedules", "updates_early"]


@lru_cache(maxsize=4096)
def mean_delay(shape: PlainShape) -> float:
    """Return the mean age of the weights that the stages compute gradients with, in updates, as `jpipe.Plan.mean_delay`."""
    return sum(jpipe.schedules.SCHEDULES[shape.schedule].delays(shape)) / shape.depth


@cache
def is_planned(schedule: str) -> bool:
    """Return whether planners search all cuts for this schedule: it has one stage on each rank, and whole backwards."""
    rules, shape = jpipe.schedules.SCHEDULES[schedule], PlainShape(schedule, 4, (1, 1))
    if "order" in rules.options or (rules.layout != "straight" and rules.flushes):
        return False
    return not any(rules.splits(shape, s) for s in range(shape.depth))


def planned_schedules() -> tuple[str, ...]:
    """Return the schedules for which planners search all cuts; plans of the remaining ones are derived from theirs."""
    return tuple(filter(is_planned, jpipe.schedules.SCHEDULES))


def updates_early(schedule: str) -> bool:
    """Return whether updates of the planned stages of a schedule cannot depend on the gradients of all stages.

    They do with shared parameters, and if gradients are clipped by their norm over all stages.
    """
    options = PlanOptions(vertical_sync=needs_vertical_sync(schedule))
    shape = PlainShape(schedule, 2, (1, 1), options)
    return is_planned(schedule) and jpipe.schedules.SCHEDULES[schedule].updates_early(shape)


def needs_vertical_sync(schedule: str) -> bool:
    """Return whether updates of a schedule can depend on the gradients of all stages with `vertical_sync` only."""
    rules = jpipe.schedules.SCHEDULES[schedule]
    return "vertical_sync" in rules.options and rules.updates_early(PlainShape(schedule, 2, (1, 1)))


class ScheduleFacts(NamedTuple):
    """What a schedule says about the stages of a plan: arrays over the stages.

    Attributes:
        in_flight: n_s.
        versions: weight versions alive.
        fused: whether forward and backward, or its first half, are one program.
        hidden: without a flush, how many forwards and backwards a sum of gradients may take before something waits for it.
    """

    in_flight: Any
    versions: Any
    fused: Any
    hidden: Any


@lru_cache(maxsize=4096)
def schedule_facts(shape: PlainShape) -> ScheduleFacts | None:
    """Return what the schedule says about a plan with one stage on each rank; None if it cannot run it."""
    rules, stages = jpipe.schedules.SCHEDULES[shape.schedule], range(shape.depth)
    if rules.refuses(shape):
        return None
    in_flight = [rules.in_flight(shape, s) for s in stages]
    # More microbatches begin with the same op, and take long to list.
    few = min(shape.microbatches // max(shape.replicas), 4 * shape.depth) * max(shape.replicas)
    beginning = PlainShape(shape.schedule, few, shape.replicas, shape.options) if len(set(shape.replicas)) == 1 else shape
    return ScheduleFacts(
        np.array(in_flight),
        np.array([rules.versions_alive(shape, s) for s in stages]),
        np.array([rules.begins_fused(beginning, s) for s in stages]),
        np.array([hidden_passes(shape, s, ahead) for s, ahead in enumerate(in_flight)]),
    )


def hidden_passes(shape: PlainShape, s: int, in_flight: int) -> int:
    """Return how many forwards, beyond those in flight, a replica can do after the first batch before one reads the update."""
    rules, replicas = jpipe.schedules.SCHEDULES[shape.schedule], shape.replicas[s]
    if rules.flushes or replicas == 1 or shape.options.update_every == "replicas":  # no sum overlaps, there is none, or one pass
        return 1
    done, most = shape.microbatches // replicas - 1 + in_flight, 1
    while not rules.version(shape, s, (done + most) * replicas):
        most *= 2
    return bisect_left(range(most), 1, key=lambda more: rules.version(shape, s, (done + more) * replicas))
