"""From many candidates to a ranking: the best of each kind are simulated, and where closed form and simulation differ it is told why."""

import bisect
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jpipe
from planner.candidate import Candidate
from planner.candidates import closed_form
from planner.profile import Profile
from planner.simulated import Simulated, simulated
from planner.topology import Topology

SIMULATED = 10  # of the best
_PATIENCE = 4  # times as many, where closed forms promise more than simulations keep
_EQUAL = 0.005  # share by which plans that are equally fast may differ
_DIFFERENT = 0.1  # between closed form and simulation


@dataclass(frozen=True)
class Ranked:
    """A candidate with its simulation.

    Attributes:
        candidate: with the closed form.
        simulated: None where that would take long.
        why: what makes the simulation differ from the closed form by more than a tenth: "link", "sum", "imbalance" or "bubble"; "" where
            it does not.
    """

    candidate: Candidate
    simulated: Simulated | None = None
    why: str = ""

    @property
    def seconds(self) -> float:
        """Of a batch, as simulated if it was."""
        return self.candidate.seconds if self.simulated is None else self.simulated.batch_seconds

    @property
    def samples_per_second(self) -> float:
        """Rows a second."""
        return self.candidate.batch / self.seconds

    @property
    def memory(self) -> tuple[int, ...]:
        """Bytes that a worker of each stage holds at most."""
        if self.simulated is None:
            return self.candidate.memory
        peaks, first = self.simulated.peak_bytes, 0
        found = []
        for count in self.candidate.replicas:
            found.append(max(peaks[first : first + count]))
            first += count
        return tuple(found)


@dataclass(frozen=True)
class Choice:
    """What there is to choose from.

    Attributes:
        profile: of the model.
        topology: of the machines.
        ranked: the best of each kind that fit, the fastest first; a kind is a schedule, the replicas of each stage, and what is kept
            together.
        rejected: the best of each kind that does not fit, the one that lacks least first.
        considered: how many candidates there were.
        clips: whether gradients are clipped by their norm over all stages.
    """

    profile: Profile
    topology: Topology
    ranked: tuple[Ranked, ...]
    rejected: tuple[Candidate, ...]
    considered: int
    clips: bool = False

    def plan(self, ranked: Ranked) -> jpipe.Plan:
        """The plan of one of them, with what is predicted of it."""
        bubble = ranked.candidate.bubble if ranked.simulated is None else ranked.simulated.bubble
        predicted = jpipe.Predicted(batch_seconds=ranked.seconds, bubble=min(max(bubble, 0.0), 1.0), peak_bytes=ranked.memory)
        return ranked.candidate.plan(self.profile.ids).model_copy(update={"predicted": predicted})


def choose(
    profile: Profile,
    topology: Topology,
    candidates: Iterable[Candidate],
    *,
    most: int = SIMULATED,
    clips: bool = False,
    tried: dict[Candidate, Ranked] | None = None,
) -> Choice:
    """Rank candidates: those that fit by their closed form, the best of them by simulation.

    One that the simulation finds too large gives way to the next of its kind that is smaller.

    Args:
        profile: of the model.
        topology: what they run on.
        candidates: of any schedules, priced alike.
        most: how many to simulate; more, up to four times as many, as long as another one's closed form promises to be faster still.
        clips: whether gradients are clipped by their norm over all stages, for which updates wait.
        tried: those that were simulated before; is added to.
    """
    tried = {} if tried is None else tried
    everything = sorted(candidates, key=lambda candidate: candidate.rank)
    fitting = [candidate for candidate in everything if candidate.over is None]
    limit = math.inf if topology.device.memory is None else topology.device.memory
    queue, fastest = _best_of_each_kind(fitting), 0.0
    ranked: list[Ranked] = []
    too_large: list[Candidate] = []
    while queue and len(ranked) + len(too_large) < _PATIENCE * most:
        candidate = queue[0]
        if len(ranked) >= most and candidate.samples_per_second <= fastest:
            break  # no simulation is to be expected to be faster than its closed form
        queue.pop(0)
        if candidate not in tried:
            tried[candidate] = _simulate(profile, topology, candidate, clips)
        one = tried[candidate]
        if max(one.memory) <= limit:
            ranked.append(one)
            fastest = max(fastest, one.samples_per_second)
        else:
            too_large.append(_over(candidate, one.memory, limit))
            if smaller := smaller_than(candidate, fitting):
                bisect.insort(queue, smaller[0], key=lambda candidate: candidate.rank)
    rest = [Ranked(candidate) for candidate in queue]
    kinds = {candidate.kind for candidate in (*queue, *(one.candidate for one in ranked))}
    lacking = [candidate for candidate in everything if candidate.over is not None]
    rejected = [candidate for candidate in _best_of_each_kind([*too_large, *lacking]) if candidate.kind not in kinds]
    return Choice(profile, topology, (*_in_order(ranked), *rest), tuple(rejected), len(everything), clips)


def smaller_than(candidate: Candidate, others: Iterable[Candidate]) -> list[Candidate]:
    """Those of its kind that come after it and need less memory."""
    return [
        other
        for other in others
        if other.kind == candidate.kind and other.rank > candidate.rank and max(other.memory) < max(candidate.memory)
    ]


def _in_order(ranked: Sequence[Ranked]) -> list[Ranked]:
    """The fastest first; those that are as fast as the first of them but for what no prediction can tell go by their other merits."""
    left = sorted(ranked, key=lambda one: (-one.samples_per_second, one.candidate.rank))
    found: list[Ranked] = []
    while left:
        speed = left[0].samples_per_second
        equal = [one for one in left if one.samples_per_second >= speed * (1 - _EQUAL)]
        left = left[len(equal) :]
        merits = {id(one): dataclasses.replace(one.candidate, seconds=one.candidate.batch / speed).rank for one in equal}
        found += sorted(equal, key=lambda one: merits[id(one)])
    return found


def _best_of_each_kind(candidates: Iterable[Candidate]) -> list[Candidate]:
    best: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        best.setdefault(candidate.kind, candidate)
    return list(best.values())


def _over(candidate: Candidate, memory: Sequence[int], limit: float) -> Candidate:
    """The candidate as one that does not fit, by what the simulation says."""
    worst = max(range(len(memory)), key=lambda s: memory[s])
    return dataclasses.replace(candidate, memory=tuple(memory), over=(worst, round(memory[worst] - limit)))


def _simulate(profile: Profile, topology: Topology, candidate: Candidate, clips: bool) -> Ranked:
    plan = candidate.plan(profile.ids)
    found = simulated(plan, profile.stage_costs(plan, candidate.rows), topology, clips)
    if found is None or abs(found.batch_seconds / candidate.seconds - 1) <= _DIFFERENT:
        return Ranked(candidate, found)
    return Ranked(candidate, found, _why(profile, topology, candidate, clips))


def _why(profile: Profile, topology: Topology, candidate: Candidate, clips: bool) -> str:
    """What to take out for closed form and simulation to agree: links, or of these only the sums, or else what makes stages uneven."""
    unlinked = _without_links(topology)
    if _agree(profile, unlinked, candidate, clips):
        layers = tuple([layer.model_copy(update={"weights": 0}) for layer in profile.layers])
        return "sum" if _agree(profile.model_copy(update={"layers": layers}), topology, candidate, clips) else "link"
    even = dataclasses.replace(candidate, policies=candidate.policies[:1] * candidate.depth)
    return "imbalance" if _agree(_evened(profile, candidate), unlinked, even, clips) else "bubble"


def _agree(profile: Profile, topology: Topology, candidate: Candidate, clips: bool) -> bool:
    """Whether closed form and simulation do, where layers or links cost something else."""
    plan = candidate.plan(profile.ids)
    found = simulated(plan, profile.stage_costs(plan, candidate.rows), topology, clips)
    return found is not None and abs(found.batch_seconds / closed_form(profile, topology, candidate) - 1) <= _DIFFERENT


def _evened(profile: Profile, candidate: Candidate) -> Profile:
    """The profile with as much to compute for each worker of the candidate: a stage's share goes by its replicas."""
    ends, n, layers = (*candidate.starts[1:], len(profile.layers)), profile.sizes.index(candidate.rows), list(profile.layers)
    for start, end, replicas in zip(candidate.starts, ends, candidate.replicas, strict=True):
        share = replicas / candidate.workers / (end - start)
        for number in range(start, end):
            own = {name: share * sum(getattr(layer.at[n], name) for layer in profile.layers) for name in ("forward", "backward")}
            at = (*layers[number].at[:n], layers[number].at[n].model_copy(update=own), *layers[number].at[n + 1 :])
            layers[number] = layers[number].model_copy(update={"at": at})
    return profile.model_copy(update={"layers": tuple(layers)})


def _without_links(topology: Topology) -> Topology:
    levels = [level.model_copy(update={"bandwidth": 1e30, "latency": 0.0}) for level in topology.levels]
    return topology.model_copy(update={"levels": tuple(levels)})
