"""What a flush costs: the time per sample of the best plan that flushes, relative to that of the best asynchronous plan."""

import dataclasses
from dataclasses import dataclass

import jpipe
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.ranking.choose import EQUAL, Choice, Ranked
from jpipe_planner.search.candidate import Candidate


@dataclass(frozen=True)
class PriceOfFlush:
    """The best plan that flushes beside the best asynchronous plan.

    An asynchronous plan trains sooner if it reaches the same loss with fewer than `ratio` times the samples. For equal stages and links
    that take no time, the ratio is (m + d - 1)/m.

    Attributes:
        flushing: the best plan that flushes.
        asynchronous: the best plan that does not.
    """

    flushing: Ranked
    asynchronous: Ranked

    @property
    def ratio(self) -> float:
        """The time per sample with the flush, divided by that without."""
        return self.asynchronous.samples_per_second / self.flushing.samples_per_second

    @property
    def is_free(self) -> bool:
        """Whether the plan that flushes is faster than the asynchronous one, or counts as equally fast."""
        return self.ratio <= 1 + EQUAL

    @property
    def is_simulated(self) -> bool:
        """Whether both times are simulated; otherwise one of them is an estimate, because simulating the plan would take too long."""
        return self.flushing.simulated is not None and self.asynchronous.simulated is not None


def price_of_flush(choice: Choice, asynchronous: Candidate | None = None) -> PriceOfFlush | None:
    """Return the best plan of a choice that flushes beside its best asynchronous plan, both simulated where that takes seconds.

    Args:
        choice: a ranking.
        asynchronous: an asynchronous plan from outside the ranking, for rankings without one.

    Returns:
        The two plans; None if the ranking has only plans of one of the two kinds.
    """
    flushing = next((one for one in choice.ranked if _flushes(one.candidate)), None)
    outside = None if asynchronous is None else Ranked(asynchronous)
    best = next((one for one in choice.ranked if not _flushes(one.candidate)), outside)
    return None if flushing is None or best is None else PriceOfFlush(_simulated(choice, flushing), _simulated(choice, best))


def _flushes(candidate: Candidate) -> bool:
    return jpipe.schedules.SCHEDULES[candidate.schedule].flushes


def _simulated(choice: Choice, ranked: Ranked) -> Ranked:
    """Return a plan with its simulation, unless that would take too long."""
    if ranked.simulated is not None:
        return ranked
    profile, topology = choice.meshes.of(ranked.candidate.degrees)
    plan = ranked.candidate.plan(profile.ids)
    simulation = simulate_plan(plan, profile.stage_costs(plan, ranked.candidate.rows), topology, choice.global_norm)
    return ranked if simulation is None else dataclasses.replace(ranked, simulated=simulation, least=0.0)
