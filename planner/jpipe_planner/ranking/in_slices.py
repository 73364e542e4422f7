"""Plans in slices: rows are cut along their positions where a pipeline waits for few microbatches, or lacks memory."""

import dataclasses
from collections.abc import Callable, Iterable

import jpipe
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.slices import SHORTEST
from jpipe_planner.ranking.choose import PAYS, Choice, Ranked, first_of_kinds, in_order
from jpipe_planner.ranking.variants import is_legal, lacks_memory
from jpipe_planner.search.candidate import Candidate, Extras

COUNTS = (2, 4, 8)  # the numbers of slices to try
MOST = 4  # the most plans that are simulated by their estimates, and the most plans of whole rows that are tried in the best slices
MOST_IN_ALL = 24_000  # forwards, after which no further plan is simulated
UNEVEN = 0.02  # relative difference of the last slice from the first, above which slices are cut by cost


def find_in_slices(
    choice: Choice, search: Callable[[Extras], Iterable[Candidate]], tried: dict[Candidate, Ranked], extras: Extras
) -> Choice:
    """Return the ranking with the plans in slices that are faster than all plans of whole rows by more than `PAYS`.

    Slices have more programs to compile, so they must gain as much. If no plan of whole rows fits, any plan in slices counts. `search`
    returns the candidates in these slices, the best estimates first. The new plans that count are added to `tried`.
    """
    profile, best = choice.profile, next(iter(choice.ranked), None)
    if not profile.positions or (
        best is not None and best.bubble < PAYS and not profile.saves_in_slices and not lacks_memory(best.candidate)
    ):
        return choice
    least, spent, considered = 0.0 if best is None else (1 + PAYS) * best.samples_per_second, 0, 0

    def simulated(candidates: Iterable[Candidate]) -> list[Ranked]:
        nonlocal spent
        found = list[Ranked]()
        for candidate in candidates:
            effort = choice.forwards(candidate)
            if candidate not in tried and spent + effort <= MOST_IN_ALL:
                spent += effort
                one = choice.simulate(candidate)
                found += [one] if one.simulated and one.candidate.over is None and one.samples_per_second > least else []
        return found

    near = list[Candidate]()
    for count in (count for count in COUNTS if count * SHORTEST <= profile.sizes[-1] * profile.positions):
        candidates = [
            one
            for one in search(extras._replace(slices=slices_of(profile, count)))
            if one.rows // one.degrees.rows * profile.positions >= count * SHORTEST
        ]
        considered += len(candidates)
        near += [one for one in candidates if one.over is None and one.samples_per_second > least]
    found = simulated(first_of_kinds(sorted(near, key=lambda one: one.rank))[:MOST])
    if found:
        slices, needs = in_order(found)[0].candidate.slices, choice.needs
        others = (dataclasses.replace(one.candidate, slices=slices, sum_parts=(), over=None) for one in choice.ranked[:MOST])
        found += simulated(one for one in others if one.extras.slices == slices and is_legal(one, profile.ids, needs))
    tried |= {one.candidate: one for one in found}
    return choice.with_more(found, considered)


def slices_of(profile: Profile, count: int) -> jpipe.plan.Slices:
    """Return `count` slices: equal ones, or, if later slices would take longer, slices that take equally long."""
    lengths = profile.slice_lengths(count)
    work = [sum(layer.at[0].forward for layer in profile.in_slices(lengths, n).layers) for n in (0, count - 1)]
    return jpipe.plan.ByCost(count=count, by="cost") if work[1] > (1 + UNEVEN) * work[0] else count
