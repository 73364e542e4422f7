"""The chosen plan is as fast as the fastest of all candidates, and no simulation beats the bounds."""

import statistics

import pytest

import jpipe
from jpipe_planner.cost.bound import busy_seconds, port_seconds, unhindered_seconds
from jpipe_planner.cost.devices import network
from jpipe_planner.cost.simulated import window
from jpipe_planner.ranking.choose import choose
from jpipe_planner.ranking.table import HEAD, rows
from jpipe_planner.search.candidates import find_candidates
from tests.planner.invented import invented_profile, invented_topology, simulate_all

_SHOWN = HEAD.index("simulated")


def fastest(profile, topology, candidates):
    limit = topology.device.memory or float("inf")
    return max(one.samples_per_second for one in simulate_all(profile, topology, candidates) if max(one.memory) <= limit)


# By closed form half of them are 3 to 16% slower.
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("seed", [1, 3, 4, 6, 7, 14, 17, 18, 37])
def test_the_choice_is_as_fast_as_the_fastest_of_all_when_all_are_simulated(seed):
    profile, topology = invented_profile(seed, layers=6), invented_topology(seed)
    candidates = find_candidates(profile, topology, 12)
    choice = choose(profile, topology, candidates)
    assert choice.ranked[0].samples_per_second >= 0.99 * fastest(profile, topology, candidates)
    assert choice.open == 0


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("overlap", ["none", "transfers", "transfers and sums"])
@pytest.mark.parametrize("global_norm", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_no_simulation_is_faster_than_the_bounds(seed, global_norm, overlap):
    profile, topology = invented_profile(seed, layers=6), invented_topology(seed)
    for candidate in find_candidates(profile, topology, 12, global_norm=global_norm)[seed::9]:
        plan = candidate.plan(profile.ids)
        costs, link, batches = profile.stage_costs(plan, 1), network(plan, topology), 20
        timeline = jpipe.simulate(jpipe.lower(plan, batches, global_norm=global_norm), costs, link, overlap).timeline
        share = [plan.microbatches // plan.replicas[s] for s, _ in plan.workers]
        starts = [[span.start for span in row if span.op != "B"] for row in timeline]
        seconds = statistics.mean(row[18 * per_batch] - row[8 * per_batch] for per_batch, row in zip(share, starts, strict=True)) / 10
        bounds = port_seconds(plan, costs, link), unhindered_seconds(plan, costs, link, *window(plan))
        assert max(busy_seconds(plan, costs, None, link, overlap), *bounds) <= seconds * 1.01, candidate


def test_candidates_that_cannot_be_the_fastest_are_listed_with_their_bound():
    profile, topology = invented_profile(0), invented_topology(0)
    candidates = find_candidates(profile, topology, 12)
    choice = choose(profile, topology, candidates, most=1)
    pruned = [one for one in choice.ranked if one.simulated is None]
    assert pruned
    assert all(one.most <= 1.005 * choice.ranked[0].samples_per_second for one in pruned)
    speeds = [row[_SHOWN] for row in rows(choice, len(choice.ranked))]
    assert [text.startswith("≤") for text in speeds] == [one.simulated is None for one in choice.ranked]


def test_a_simulation_that_takes_too_long_is_reported(monkeypatch):
    monkeypatch.setattr("jpipe_planner.ranking.race.MOST_SIMULATED", 1)
    profile, topology = invented_profile(3), invented_topology(3)
    choice = choose(profile, topology, find_candidates(profile, topology, 12))
    assert sum(one.simulated is not None for one in choice.ranked) == 1
    assert choice.open > 0
