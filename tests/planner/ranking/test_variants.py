"""Plans with several stages on a rank, or with split backwards: legal, priced as simulated, and chosen where they are the fastest."""

import itertools

import pytest

import jpipe
from planner.cost.shape import planned_schedules
from planner.cost.simulated import simulated
from planner.ranking import table
from planner.ranking.choose import Ranked, choose
from planner.ranking.variants import MOST_CHUNKS, find_variants, variant_schedules
from planner.search.candidates import find_candidates
from tests.planner.search.test_parallel import gpt, levels

FAST = levels((4, 1e9, 0.0))


@pytest.mark.slow
def test_every_schedule_is_searched_in_one_way_or_the_other():
    assert {*planned_schedules(), *variant_schedules()} == set(jpipe.schedules.SCHEDULES)
    found = find_variants(gpt(14), FAST, 8, all_devices=True)
    assert {candidate.schedule for candidate in found} == set(variant_schedules())
    assert {candidate.chunks for candidate in found} == set(range(1, MOST_CHUNKS + 1))
    assert {candidate.devices for candidate in found} == {4}


@pytest.mark.slow
def test_variants_are_priced_as_simulated_with_memory_of_each_rank():
    profile, found = gpt(6), find_variants(gpt(6), levels((4, 20_000.0, 0.02)), 8)
    assert len(found) > 20
    for candidate, known in itertools.islice(found.items(), 0, None, 7):
        plan = candidate.plan(profile.ids)
        costs = profile.stage_costs(plan, candidate.rows)
        again = simulated(plan, costs, levels((4, 20_000.0, 0.02)))
        assert (candidate.seconds, candidate.bubble) == (again.batch_seconds, again.bubble) == (known.batch_seconds, known.bubble)
        assert len(candidate.memory) == len(plan.rank_stages) == candidate.ranks
        assert max(candidate.memory) == max(again.peak_bytes)


def ranking(profile, topology, batch, schedules=None):
    candidates, variants = find_candidates(profile, topology, batch), find_variants(profile, topology, batch, schedules=schedules)
    everything = [*candidates, *variants]
    return choose(profile, topology, everything, tried={candidate: Ranked(candidate, known) for candidate, known in variants.items()})


def test_without_stale_weights_and_links_a_zero_bubble_schedule_is_the_fastest_of_those_that_flush():
    """With a large bubble, and all microbatches of one size."""
    choice = ranking(gpt(7, head=0.9, sizes=(1,), weights=10), FAST, 4)
    flushing = [one for one in choice.ranked if jpipe.schedules.SCHEDULES[one.candidate.schedule].flushes and one.candidate.depth > 1]
    assert flushing[0].candidate.schedule not in planned_schedules()
    assert any(one.candidate.schedule == "pipedream_flush" for one in flushing[1:])


def test_chunks_gain_nothing_without_a_flush():
    """Transfers are more frequent, and there is no bubble to fill: among plans of 2BW for equal layers the straight one wins."""
    profile = gpt(8, sizes=(1,))
    profile = profile.model_copy(update={"layers": profile.layers[1:-1]})
    choice = ranking(profile, levels((4, 20_000.0, 0.02)), 8, ["pipedream_2bw"])
    own = [one for one in choice.ranked if one.candidate.schedule == "pipedream_2bw"]
    assert own[0].candidate.chunks == 1
    assert any(one.candidate.chunks > 1 for one in own)


def test_plans_that_do_not_fit_are_told_by_rank():
    limited = levels((4, 1e9, 0.0), memory=100_000)
    found = find_variants(gpt(6), limited, 8, schedules=["zb_h2", "interleaved_1f1b"])
    assert any(candidate.over for candidate in found)
    for candidate in found:
        assert (candidate.over is not None) == (max(candidate.memory) > 100_000)
        if candidate.over:
            assert candidate.over == (candidate.memory.index(max(candidate.memory)), max(candidate.memory) - 100_000)


@pytest.mark.slow
def test_why_a_plan_was_chosen_is_told():
    choice = ranking(gpt(7, head=0.9, sizes=(1,)), FAST, 4)
    rows = table.why_chosen(choice, 6)
    assert rows[0][-1] == "chosen"
    for row in rows[1:]:
        assert row[-1].startswith("as fast, ") or "% slower" in row[-1]
    assert all(len(row) == len(table.WHY_HEAD) for row in rows)
    assert any(", " in row[4] for row in rows), "the memory of each rank"


@pytest.mark.parametrize("flag", ["backward_weight", "stash"])
def test_profiles_of_older_versions_are_read(flag):
    profile = gpt(2)
    text = profile.to_json()
    assert flag in text
    at = profile.layers[1].at[0]
    older = profile.from_json(profile.to_json().replace(f', "{flag}": null', "").replace(f', "{flag}": {{}}', ""))
    assert older == profile
    cost = older.costs(1)["b0"]
    assert (cost.for_weights, dict(cost.stash)) == (at.backward / 2, {})
