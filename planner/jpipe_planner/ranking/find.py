"""Find the fastest plans that fit: list candidates, simulate the best of them, and try variants and neighbours of the best plans."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jpipe
from jpipe_planner.cost.shape import is_planned
from jpipe_planner.cost.simulated import lowered
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.sharded import NO_MESH, Degrees
from jpipe_planner.ranking.choose import Choice, Ranked, choose
from jpipe_planner.ranking.improve import improve
from jpipe_planner.ranking.in_slices import find_in_slices
from jpipe_planner.ranking.offload import find_offloads, offload_bases
from jpipe_planner.ranking.variants import BASE, find_variants, variant_schedules
from jpipe_planner.search.candidate import NO_EXTRAS, Candidate, Extras
from jpipe_planner.search.candidates import Updates, find_candidates

__all__ = ["Attempt", "Compiled", "Plans", "find_plans"]


@dataclass(frozen=True)
class Compiled:
    """The memory of a plan's compiled stages.

    Attributes:
        ranked: the plan, simulated with the exact bytes of its stages and the scratch memory that XLA reports for its programs.
        estimated: for each pipeline rank the bytes in a simulation with the profile.
        lacking: the bytes that the rank with the least memory left lacks; 0 or less if the plan fits; None if memory is not limited.
        ranks: the pipeline ranks with compiled stages; the memory of the other ranks is estimated.
        extrapolated: whether a stage of many equal layers was compiled with fewer of them, and its memory extrapolated.
    """

    ranked: Ranked
    estimated: tuple[int, ...]
    lacking: float | None
    ranks: tuple[int, ...]
    extrapolated: bool = False

    @property
    def errors(self) -> tuple[float, ...]:
        """For each pipeline rank the relative error of the estimate; above 0 if the estimate was too high."""
        return tuple(estimate / true - 1 for estimate, true in zip(self.estimated, self.ranked.memory, strict=True))

    @property
    def fits(self) -> bool:
        """Whether all pipeline ranks fit."""
        return self.lacking is None or self.lacking <= 0


@dataclass(frozen=True)
class Attempt:
    """A plan with compiled stages that do not fit.

    Attributes:
        ranked: the plan, as estimated.
        compiled: the memory of its compiled stages.
        raised: the plan with more recomputation that is tried instead; None if this plan already recomputes everything.
    """

    ranked: Ranked
    compiled: Compiled
    raised: Candidate | None


@dataclass(frozen=True)
class Plans:
    """The plans that a search found.

    Attributes:
        choice: the ranking.
        candidates: all plans that were considered, with the numbers of their estimate or of their simulation.
        tried: the simulated plans, by candidate.
        excluded: the plans that need too many microbatches, or leave devices idle although all must be used.
        delayed: if schedules without a flush were not requested, their best plan if it is faster, otherwise None.
        compiled: the plans with compiled stages at the top of the ranking, in the same order.
        attempts: the plans with compiled stages that do not fit, in the order in which they were compiled.
    """

    choice: Choice
    candidates: tuple[Candidate, ...]
    tried: dict[Candidate, Ranked]
    excluded: tuple[Candidate, ...] = ()
    delayed: Ranked | None = None
    compiled: tuple[Compiled, ...] = ()
    attempts: tuple[Attempt, ...] = ()


def find_plans(
    profile: Profile,
    topology: Topology,
    batch: int,
    *,
    schedules: Sequence[str] | None = None,
    exact: bool = True,
    pipedream: Updates = "batch",
    meshes: Sequence[Degrees] = (NO_MESH,),
    replicas: bool = True,
    all_devices: bool = False,
    most_microbatches: int = 2**20,
    max_delay: float | None = None,
    global_norm: bool = False,
    share_optimizer: bool = True,
    offload: bool = False,
    extras: Extras = NO_EXTRAS,
) -> Plans:
    """Find the fastest plans that fit.

    Example:
        ```python
        topology = Topology.flat(4, bandwidth=10e9, memory=16e9)
        plans = find_plans(profile, topology, batch=64, schedules=("pipedream_flush", "zb_h1"))
        best = plans.choice.plan(plans.choice.ranked[0])  # a jpipe.Plan
        ```

    Args:
        profile: the costs of the model's layers.
        topology: the machines.
        batch: rows between two updates.
        schedules: the schedules to try; None: all.
        exact: whether plans must have exactly this batch; otherwise they may have a smaller one.
        pipedream: how stages with different numbers of replicas update, see `find_candidates`.
        meshes: the meshes that may replace the single device of a replica of a stage.
        replicas: whether stages may have replicas. Without replicas, plans with fewer stages than devices leave the other devices idle.
        all_devices: whether plans must use all devices.
        most_microbatches: the most microbatches of a plan.
        max_delay: the largest mean delay of a plan in updates, see `Candidate.delay`; 0 allows only plans without a delay; None: any.
        global_norm: whether updates use the norm of the gradients of all stages, which not all schedules support.
        share_optimizer: whether replicas may share an optimizer.
        offload: whether to try plans with parts of their state in host memory even if other plans fit. If no plan fits, they are tried
            anyway.
        extras: agreements, compressed messages and slices that all plans must have. If they say nothing of slices, plans in slices are
            tried, too.
    """
    schedules = tuple(jpipe.schedules.SCHEDULES) if schedules is None else tuple(map(jpipe.schedules.name_of, schedules))
    planned, varies = tuple(filter(is_planned, schedules)), any(name in variant_schedules() for name in schedules)
    tries = planned if BASE in planned or not varies else (*planned, BASE)
    same: dict[str, Any] = {"exact": exact, "replicas": replicas, "max_delay": max_delay, "global_norm": global_norm}
    considered = find_candidates(profile, topology, batch, schedules=tries, pipedream=pipedream, meshes=meshes, extras=extras, **same)

    def is_usable(one: Candidate) -> bool:
        return one.microbatches <= most_microbatches and (one.devices == topology.num_devices or not all_devices)

    def in_slices(extras: Extras) -> Iterator[Candidate]:
        return filter(is_usable, find_candidates(profile, topology, batch, schedules=planned, meshes=meshes, extras=extras, **same))

    usable, excluded = list(filter(is_usable, considered)), list(itertools.filterfalse(is_usable, considered))
    candidates, tried = [one for one in usable if one.schedule in planned], dict[Candidate, Ranked]()
    choice = choose(profile, topology, candidates, global_norm=global_norm, tried=tried)
    before = len(tried)
    find_variants(choice, usable, schedules, tried, max_delay=max_delay, share_optimizer=share_optimizer)
    choice = improve(choice.with_more(tried.values(), len(tried) - before), tried, max_delay)
    if extras.slices is None:
        choice = find_in_slices(choice, in_slices, tried, extras)
    known = set(candidates)
    candidates += [one.candidate for one in tried.values() if one.candidate not in known]
    if offload or not choice.ranked:
        moved = find_offloads(choice, offload_bases(candidates, choice.lacks_in_host))
        tried |= {one.candidate: one for one in moved}
        candidates += [one.candidate for one in moved]
        choice = choice.with_more(moved, len(moved))
    lowered.cache_clear()  # of large programs
    return Plans(choice, tuple(candidates), tried, excluded=tuple(excluded))
