"""All candidates: equal pipelines of all schedules, and PipeDream's stages, which may have different numbers of replicas."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import jpipe
from jpipe_planner.cost.shape import planned_schedules, updates_early
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.sharded import NO_MESH, Degrees, Meshes
from jpipe_planner.search.candidate import NO_EXTRAS, Candidate, Extras
from jpipe_planner.search.equal import equal_pipelines
from jpipe_planner.search.estimate import Estimates
from jpipe_planner.search.pipedream import SCHEDULE, pipedream_plans

__all__ = ["Updates", "find_candidates", "has_searchable_stages"]

Updates = Literal["batch", "replicas"]
"""How PipeDream's stages update; see `find_candidates`."""

MOST_DIFFERING = 1024  # if devices differ, PipeDream's stages are searched for at most this many devices


def has_searchable_stages(topology: Topology) -> bool:
    """Return whether PipeDream's stages are searched for a topology. They are not if very many devices differ."""
    return not topology.differing or topology.num_devices <= MOST_DIFFERING


def find_candidates(
    profile: Profile,
    topology: Topology,
    batch: int,
    *,
    exact: bool = True,
    schedules: Sequence[str] | None = None,
    pipedream: Updates = "batch",
    meshes: Sequence[Degrees] = (NO_MESH,),
    replicas: bool = True,
    max_delay: float | None = None,
    global_norm: bool = False,
    extras: Extras = NO_EXTRAS,
) -> list[Candidate]:
    """Return all plans of equal pipelines, and for each microbatch size the best of PipeDream's plans (1F1B round-robin), with estimates.

    The best estimates come first, plans that do not fit last. Schedules that do not flush are tried with 0, 2 and 4 additional microbatches
    in flight. If layers share a parameter, or gradients are clipped by their norm over all stages, schedules with `updates_early` are left
    out, and `pipedream` is tried only with `vertical_sync` and equal pipelines. Data parallelism is also tried with each schedule that does
    not flush: then the sum of an update overlaps with the next computations, and is applied one update late.

    The arguments are as in `find_plans`, with all `planned_schedules` by default. With `pipedream="batch"` all stages update once per
    batch, so the number of replicas must divide the number of microbatches. With "replicas", as in the original, each stage updates after
    one microbatch of each of its replicas, so the number of replicas is free; the batch may be smaller.
    """
    schedules, in_slices = planned_schedules() if schedules is None else schedules, extras.slices is not None
    is_restricted = global_norm or bool(profile.shared)
    if is_restricted:
        schedules = tuple(name for name in schedules if not updates_early(name))
    if in_slices:
        schedules = tuple(name for name in schedules if jpipe.schedules.SCHEDULES[name].takes_slices)

    def search(on_devices: Topology) -> Iterator[Candidate]:
        estimates = Estimates(of_mesh, on_devices, extras)
        yield from equal_pipelines(estimates, batch, schedules, exact=exact, replicas=replicas, syncs=is_restricted)
        if SCHEDULE in schedules and not (is_restricted or in_slices) and extras.agree is None and has_searchable_stages(on_devices):
            plans = pipedream_plans(estimates, batch, pipedream, exact)  # plans of one stage may be equal pipelines, too
            yield from (one for one in plans if one.depth > 1 or one.options.update_every == "replicas")

    views, found = Meshes(profile, topology), list[Candidate]()
    for degrees in meshes:
        of_mesh, machine = views.of(degrees)
        searched = [
            dataclasses.replace(one, placed_on=order) if n else one
            for n, order in enumerate(machine.orders())
            for one in search(machine.ordered(order))
            if one.is_within(max_delay) and (replicas or max(one.replicas) == 1)
        ]
        found += searched if degrees.size == 1 else [on_meshes(candidate, degrees) for candidate in searched]
    useful = dict[object, Candidate]()
    for candidate in found:
        # With one stage all schedules that flush are equal. A schedule that does not flush applies the sum of the gradients of several
        # replicas one update late, so that the sum overlaps with the next computations.
        same: object = candidate
        if candidate.is_late_data_parallel:
            same = candidate.rows, candidate.microbatches, candidate.replicas, candidate.degrees, candidate.delay
        elif candidate.depth == 1 and len(schedules) > 1 and not jpipe.schedules.SCHEDULES[candidate.schedule].data_parallel:
            continue
        useful.setdefault(same, candidate)
    return sorted(useful.values(), key=lambda candidate: candidate.rank)


def on_meshes(candidate: Candidate, degrees: Degrees) -> Candidate:
    """Convert a candidate for the topology in which each mesh counts as one device to a candidate on meshes."""
    return dataclasses.replace(candidate, degrees=degrees, sent=candidate.sent * degrees.size)
