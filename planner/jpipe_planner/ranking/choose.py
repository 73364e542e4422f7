"""Rank candidates: those that could be the fastest are simulated (`race`), the remaining ones are ranked by their bounds."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jpipe
from jpipe_planner.cost.bound import has_bounds, unhindered_seconds
from jpipe_planner.cost.copies import part_of
from jpipe_planner.cost.devices import kinds_of, lacking, slowed
from jpipe_planner.cost.simulated import Simulated, simulate_plan, window
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.sharded import Meshes
from jpipe_planner.ranking.race import Outcome, Race
from jpipe_planner.search.candidate import Candidate
from jpipe_planner.search.candidates import closed_form

SIMULATED = 10  # the least number of kinds
EQUAL = 0.005  # relative difference up to which plans count as equally fast
_NO_LINKS = 1e30  # bandwidth of links that cost no time
_DIFFERENT = 0.1  # relative difference of closed form and simulation above which it is explained


@dataclass(frozen=True)
class Ranked:
    """A candidate with its simulation.

    Attributes:
        candidate: the candidate, priced in closed form.
        simulated: its simulation; None if it would take too long, or if the bound shows that the plan is not the fastest.
        why: why the simulation differs from the closed form by more than a tenth: "link", "sum", "imbalance" or "bubble"; otherwise "".
        least: lower bound on the seconds of a batch, if it was not simulated because of this bound; otherwise 0.
    """

    candidate: Candidate
    simulated: Simulated | None = None
    why: str = ""
    least: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds per batch: simulated, or otherwise the longer of closed form and bound."""
        return max(self.candidate.seconds, self.least) if self.simulated is None else self.simulated.batch_seconds

    @property
    def most(self) -> float:
        """Upper bound on the rows per second, if it was not simulated because of this bound; otherwise infinity."""
        return self.candidate.batch / self.least if self.least else math.inf

    @property
    def samples_per_second(self) -> float:
        """Rows per second."""
        return self.candidate.batch / self.seconds

    @property
    def memory(self) -> tuple[int, ...]:
        """The peak memory of a device of each pipeline rank, in bytes."""
        return self.candidate.memory if self.simulated is None else self.candidate.most_of_replicas(self.simulated.peak_bytes)

    @property
    def held(self) -> tuple[int, ...] | None:
        """The part of the peak memory that a device of each pipeline rank holds between its computations; None if it was not simulated."""
        return None if self.simulated is None else self.candidate.most_of_replicas(self.simulated.held_bytes)

    def lacks(self, meshes: Meshes) -> tuple[int, float]:
        """Return the pipeline rank that lacks most memory, and how much; 0 or less if all fit.

        Args:
            meshes: the profile and the topology.
        """
        return lacking(self.memory, self.candidate.limits(*meshes.of(self.candidate.degrees)))


@dataclass(frozen=True)
class Choice:
    """A ranking of plans.

    Attributes:
        profile: the profile of the model.
        topology: the topology.
        ranked: the best plan of each kind that fits, fastest first; a kind is a schedule, the replicas of each stage, and what is kept
            together.
        rejected: the best plan of each kind that does not fit, the one that lacks least memory first.
        considered: the number of candidates.
        global_norm: whether gradients are clipped by their norm over all stages.
        open: the number of candidates that could be faster than the first one, because simulating them all would take too long.
    """

    profile: Profile
    topology: Topology
    ranked: tuple[Ranked, ...]
    rejected: tuple[Candidate, ...]
    considered: int
    global_norm: bool = False
    open: int = 0

    @cached_property
    def meshes(self) -> Meshes:
        """The profile and topology for plans on meshes."""
        return Meshes(self.profile, self.topology)

    def plan(self, ranked: Ranked) -> jpipe.Plan:
        """Return the plan of a ranked candidate, with its prediction."""
        plan, (profile, topology) = ranked.candidate.plan(self.profile.ids), self.meshes.of(ranked.candidate.degrees)
        costs = slowed(plan, profile.stage_costs(plan, ranked.candidate.rows), topology)
        bubble = ranked.candidate.bubble if ranked.simulated is None else ranked.simulated.bubble
        predicted = jpipe.plan.Predicted(
            batch_seconds=ranked.seconds,
            bubble=min(max(bubble, 0.0), 1.0),
            peak_bytes=ranked.memory,
            delay=ranked.candidate.delay,
            stage_seconds=tuple(float(cost.forward + cost.backward) for cost in costs),
            devices=kinds_of(plan, topology),
        )
        return plan.model_copy(update={"predicted": predicted})

    def with_more(self, found: Iterable[Ranked], considered: int) -> "Choice":
        """Return the ranking with further plans, which were simulated; of each kind the best plan is kept.

        Args:
            found: the plans; those that do not fit have `Candidate.over`.
            considered: how many candidates were considered in addition.
        """
        best, found = dict[tuple[object, ...], Ranked](), list(found)
        fitting = [one for one in found if one.candidate.over is None]
        for one in in_order([one for one in (*fitting, *self.ranked) if one.simulated is not None]):
            best.setdefault(one.candidate.kind, one)
        ranked = (*best.values(), *(one for one in self.ranked if one.candidate.kind not in best))
        lacking = [*self.rejected, *(one.candidate for one in found if one.candidate.over is not None)]
        rejected = _of_other_kinds(sorted(lacking, key=lambda candidate: candidate.rank), ranked)
        return dataclasses.replace(self, ranked=ranked, rejected=rejected, considered=self.considered + considered)


def choose(
    profile: Profile,
    topology: Topology,
    candidates: Iterable[Candidate],
    *,
    most: int = SIMULATED,
    global_norm: bool = False,
    tried: dict[Candidate, Ranked] | None = None,
) -> Choice:
    """Rank candidates: simulate those that fit, in the order of their bounds, until no other one can be the fastest.

    The first one is then the fastest of all candidates, to half a percent. If the simulation of a candidate finds too little memory,
    smaller ones of its kind are tried. If all simulations would take too long, the remaining candidates keep their price in closed form.

    Args:
        profile: the profile of the model.
        topology: the topology.
        candidates: candidates of any schedules, priced in the same way.
        most: the least number of kinds to simulate, so that a table can show them.
        global_norm: whether gradients are clipped by their norm over all stages, for which updates wait.
        tried: results of earlier simulations; new ones are added.
    """
    tried = {} if tried is None else tried
    meshes = Meshes(profile, topology)
    by_rank = sorted(candidates, key=lambda candidate: candidate.rank)
    fitting = [candidate for candidate in by_rank if candidate.over is None]

    def outcome(one: Ranked) -> Outcome:
        return Outcome(one.seconds, one.lacks(meshes)[1] <= 0)

    known = {candidate: outcome(one) for candidate, one in tried.items()}

    def run(candidate: Candidate, least: float | None) -> Outcome:
        tried[candidate] = Ranked(candidate, _simulated(*meshes.of(candidate.degrees), candidate, global_norm, least))
        return outcome(tried[candidate])

    race = Race(profile, topology, fitting, run, known, most, waits=global_norm or bool(profile.shared))
    best: dict[tuple[object, ...], Ranked] = {}
    for one in in_order([tried[candidate] for candidate in race.finished]):
        best.setdefault(one.candidate.kind, one)
    ranked = [_explained(*meshes.of(one.candidate.degrees), one, global_norm) for one in best.values()]
    tried.update((one.candidate, one) for one in ranked)
    by_bound = _best_by_bound([Ranked(candidate, least=least) for candidate, least in race.remaining if candidate.kind not in best])
    too_large = [_over(tried[candidate], meshes) for candidate in race.too_large]
    lacking = [candidate for candidate in by_rank if candidate.over is not None]
    rejected = _of_other_kinds([*too_large, *lacking], [*ranked, *by_bound])
    return Choice(profile, topology, (*ranked, *by_bound), rejected, len(by_rank), global_norm, race.open)


def _best_by_bound(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Return the best candidate of each kind, by closed form and bound."""
    best: dict[tuple[object, ...], Ranked] = {}
    for one in sorted(ranked, key=lambda one: (-one.samples_per_second, one.candidate.rank)):
        best.setdefault(one.candidate.kind, one)
    return list(best.values())


def in_order(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Sort plans, fastest first; those that are equally fast, within `EQUAL`, are sorted by their other properties."""
    remaining = sorted(ranked, key=lambda one: (-one.samples_per_second, one.candidate.rank))
    ordered: list[Ranked] = []
    while remaining:
        speed = remaining[0].samples_per_second
        equal = [one for one in remaining if one.samples_per_second >= speed * (1 - EQUAL)]
        remaining = remaining[len(equal) :]
        merits = {id(one): dataclasses.replace(one.candidate, seconds=one.candidate.batch / speed).rank for one in equal}
        ordered += sorted(equal, key=lambda one: merits[id(one)])
    return ordered


def _of_other_kinds(candidates: Iterable[Candidate], ranked: Iterable[Ranked]) -> tuple[Candidate, ...]:
    """Return the first candidate of each kind that is not ranked."""
    kinds, first = {one.candidate.kind for one in ranked}, dict[tuple[object, ...], Candidate]()
    for candidate in candidates:
        if candidate.kind not in kinds:
            first.setdefault(candidate.kind, candidate)
    return tuple(first.values())


def _over(one: Ranked, meshes: Meshes) -> Candidate:
    """Return the candidate marked as one that does not fit, with the memory of the simulation."""
    worst, lacks = one.lacks(meshes)
    return dataclasses.replace(one.candidate, memory=one.memory, over=(worst, round(lacks)))


def _simulated(profile: Profile, topology: Topology, candidate: Candidate, global_norm: bool, least: float | None) -> Simulated | None:
    plan = candidate.plan(profile.ids)
    return simulate_plan(plan, profile.stage_costs(plan, candidate.rows), topology, global_norm, least)


def _explained(profile: Profile, topology: Topology, one: Ranked, global_norm: bool) -> Ranked:
    """Add the reason why the simulation differs from the closed form, if it does."""
    differs = one.simulated is not None and abs(one.seconds / one.candidate.seconds - 1) > _DIFFERENT
    return dataclasses.replace(one, why=_why(profile, topology, one.candidate, global_norm)) if differs and not one.why else one


def _why(profile: Profile, topology: Topology, candidate: Candidate, global_norm: bool) -> str:
    """Return what must be left out for closed form and simulation to agree: links, only the sums over them, or the imbalance of stages."""
    unlinked = _without_links(topology)
    if _agree(profile, unlinked, candidate, global_norm):
        layers = tuple([layer.model_copy(update={"accumulators": 0}) for layer in profile.layers])
        return "sum" if _agree(profile.model_copy(update={"layers": layers, "shared": ()}), topology, candidate, global_norm) else "link"
    even = dataclasses.replace(candidate, policies=candidate.policies[:1] * candidate.depth)
    return "imbalance" if _agree(_evened(profile, candidate), unlinked, even, global_norm) else "bubble"


def _agree(profile: Profile, topology: Topology, candidate: Candidate, global_norm: bool) -> bool:
    """Return whether closed form and simulation agree, with other costs of layers or links.

    Without links no message waits, so that a bound, which takes much less time, is as long as the simulation.
    """
    plan = candidate.plan(profile.ids)
    costs = profile.stage_costs(plan, candidate.rows)
    waits = plan.vertical_sync or global_norm or topology.cores is not None or topology.levels[0].bandwidth < _NO_LINKS
    if has_bounds(plan) and not waits:
        part = part_of(plan, topology, bool(profile.shared))
        seconds = unhindered_seconds(part.plan, slowed(plan, costs, topology), part.link, *window(part.plan))
    elif (simulation := simulate_plan(plan, costs, topology, global_norm)) is not None:
        seconds = simulation.batch_seconds
    else:
        return False
    return abs(seconds / closed_form(profile, topology, candidate) - 1) <= _DIFFERENT


def _evened(profile: Profile, candidate: Candidate) -> Profile:
    """Return the profile with equal work for each device of the candidate: the work of a stage is proportional to its replicas."""
    ends, n, layers = (*candidate.starts[1:], len(profile.layers)), profile.sizes.index(candidate.rows), list(profile.layers)
    for start, end, replicas in zip(candidate.starts, ends, candidate.replicas, strict=True):
        share = replicas / candidate.num_ranks / (end - start)
        for number in range(start, end):
            work = {name: share * sum(getattr(layer.at[n], name) for layer in profile.layers) for name in ("forward", "backward")}
            at = (*layers[number].at[:n], layers[number].at[n].model_copy(update=work), *layers[number].at[n + 1 :])
            layers[number] = layers[number].model_copy(update={"at": at})
    return profile.model_copy(update={"layers": tuple(layers)})


def _without_links(topology: Topology) -> Topology:
    levels = [level.model_copy(update={"bandwidth": _NO_LINKS, "latency": 0.0}) for level in topology.levels]
    device = topology.device.model_copy(update={"overlap": "transfers and sums"})
    differing = tuple(one.model_copy(update={"bandwidth": {}}) for one in topology.differing)
    return topology.model_copy(update={"levels": tuple(levels), "device": device, "differing": differing})
