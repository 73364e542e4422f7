"""What schedules say about the pipelines of a planner: their delays, and facts about parallel equal pipelines."""

from bisect import bisect_left
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

import jpipe
from jpipe.schedules import NO_OPTIONS, PlainShape, PlanOptions


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
    """Return the schedules for which planners search all cuts; for the remaining schedules see `variant_schedules`."""
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


class Pipelines(NamedTuple):
    """Parallel equal pipelines that update together; their microbatches are not specified.

    Attributes:
        schedule: a name of `jpipe.schedules.SCHEDULES`.
        width: the number of pipelines.
        depth: the number of stages of each.
        options: the options of the schedule.
    """

    schedule: str
    width: int
    depth: int
    options: PlanOptions = NO_OPTIONS

    def shape(self, microbatches: int) -> PlainShape:
        """Return the shape of all pipelines, with `microbatches` microbatches each."""
        return PlainShape(self.schedule, microbatches * self.width, (self.width,) * self.depth, self.options)


class ScheduleFacts(NamedTuple):
    """What a schedule says about pipelines, by number of microbatches and, in the arrays, by stage.

    Attributes:
        microbatches: the legal numbers of microbatches of one pipeline.
        in_flight: n_s.
        versions: weight versions alive.
        fused: whether forward and backward, or its first half, are one program.
        hidden: without a flush, how many forwards and backwards a sum of gradients may take before something waits for it.
    """

    microbatches: tuple[int, ...]
    in_flight: Any
    versions: Any
    fused: Any
    hidden: Any


@cache
def schedule_facts(pipelines: Pipelines, microbatches: tuple[int, ...]) -> ScheduleFacts:
    """Return what the schedule of pipelines says about them.

    Args:
        pipelines: the pipelines.
        microbatches: numbers of microbatches of one pipeline, ascending.
    """
    rules, stages = jpipe.schedules.SCHEDULES[pipelines.schedule], range(pipelines.depth)
    legal: list[int] = []
    in_flight, versions, fused, hidden = [], [], [], []
    for m in microbatches:
        shape = pipelines.shape(m)
        if legal or not rules.refuses(shape):  # if m is legal, so is every larger number
            legal.append(m)
            in_flight.append([rules.in_flight(shape, s) for s in stages])
            versions.append([rules.versions_alive(shape, s) for s in stages])
            few = pipelines.shape(min(m, 4 * pipelines.depth))  # more of them begin with the same op, and take long to list
            fused.append([rules.begins_fused(few, s) for s in stages])
            hidden.append([hidden_passes(shape, s, ahead) for s, ahead in enumerate(in_flight[-1])])
    return ScheduleFacts(tuple(legal), np.array(in_flight), np.array(versions), np.array(fused), np.array(hidden))


def hidden_passes(shape: PlainShape, s: int, in_flight: int) -> int:
    """Return how many forwards a replica can do after the first batch, beyond those that it may do earlier, before one reads the update."""
    rules, replicas = jpipe.schedules.SCHEDULES[shape.schedule], shape.replicas[s]
    if rules.flushes or replicas == 1:  # no sum overlaps, or there is none
        return 1
    done, most = shape.microbatches // replicas - 1 + in_flight, 1
    while not rules.version(shape, s, (done + most) * replicas):
        most *= 2
    return bisect_left(range(most), 1, key=lambda more: rules.version(shape, s, (done + more) * replicas))


@lru_cache(maxsize=64)
def batch_orders(pipelines: Pipelines, microbatches: int) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Return what each stage of one of the pipelines computes in a batch.

    Returns:
        For each stage (op, microbatch) pairs; microbatches are counted from 0 without gaps.
    """
    shape, rules = pipelines.shape(microbatches), jpipe.schedules.SCHEDULES[pipelines.schedule]
    orders = [rules.computations(shape, s, 0, 0, 1) for s in range(pipelines.depth)]
    return tuple(tuple((entry.op, entry.microbatch // pipelines.width) for entry in order) for order in orders)
