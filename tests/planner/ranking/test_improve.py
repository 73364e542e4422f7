"""Steps from the best plan to faster neighbours."""

import dataclasses

import pytest

from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.ranking.choose import choose
from jpipe_planner.ranking.improve import GAIN, improve, neighbours
from jpipe_planner.search.candidates import find_candidates
from jpipe_planner.search.estimate import Estimates

SECONDS = (2.0, 1.0, 1.0, 1.0, 1.0, 2.0)  # the first three layers compute as long as the last three


def profile(seconds=SECONDS) -> Profile:
    """Return a profile of these layers; a backward takes twice as long as a forward."""
    layers = [
        {"id": f"layer_{n}", "weights": 10**6, "at": [{"forward": one, "backward": 2 * one, "outputs": 10, "residuals": {"none": 10}}]}
        for n, one in enumerate(seconds)
    ]
    return Profile(source="analytic", sizes=[1], inputs=[1], labels=[1], layers=layers)


def best_of(one, topology, batch=12, **options):
    """Return the ranking of plans of two stages with one replica each."""
    candidates = [c for c in find_candidates(one, topology, batch, **options) if c.depth == 2 and c.options.extra_in_flight == 0]
    return choose(one, topology, candidates)


def test_a_cut_moves_from_a_bad_place_to_the_best_one():
    one, topology = profile(), Topology.flat(2, 1e9)
    choice = best_of(one, topology, schedules=["pipedream_2bw"])
    good = choice.ranked[0].candidate
    assert good.starts == (0, 3)
    for start in (1, 5):
        bad = choose(one, topology, [dataclasses.replace(good, starts=(0, start))])
        known = {}
        improved = improve(bad, known)
        assert improved.ranked[0].candidate.starts == (0, 3)
        assert improved.ranked[0].seconds == pytest.approx(choice.ranked[0].seconds)
        assert len(improved.ranked) == 1  # of the same kind
        assert improved.ranked[0].candidate in known
        assert improved.considered > bad.considered


def test_a_replica_moves_to_the_stage_that_needs_it():
    one, topology = profile((1.0, 4.0)), Topology.flat(4, 1e9)
    candidates = find_candidates(one, topology, 12, schedules=["pipedream_2bw"])
    even = choose(one, topology, [c for c in candidates if c.replicas == (2, 2) and not c.options.extra_in_flight])
    best = improve(even, {}).ranked
    assert best[0].candidate.replicas == (1, 3)
    assert best[1].candidate.replicas == (2, 2)
    assert best[0].seconds == pytest.approx(12 / 3 * 12.0, rel=0.01)
    assert best[1].seconds == pytest.approx(12 / 2 * 12.0, rel=0.01)


def test_more_are_in_flight_where_a_link_has_a_latency():
    one, topology = profile(), Topology.flat(2, 1e9, latency=3.0)
    without = best_of(one, topology, schedules=["pipedream"])
    with_more = improve(without, {}).ranked[0]
    assert with_more.candidate.options.extra_in_flight == 1
    assert with_more.seconds < (1 - GAIN) * without.ranked[0].seconds
    assert with_more.candidate.delay > without.ranked[0].candidate.delay
    assert improve(without, {}, max_delay=without.ranked[0].candidate.delay).ranked[0].candidate.options.extra_in_flight == 0


@pytest.mark.parametrize("memory", [None, 1.0])
def test_no_neighbour_of_the_result_is_faster_and_none_that_does_not_fit_is_taken(memory):
    one, topology = profile(), Topology.flat(2, 1e9)
    bad = dataclasses.replace(best_of(one, topology, schedules=["pipedream_2bw"]).ranked[0].candidate, starts=(0, 1))
    choice = choose(one, topology, [bad])
    if memory is not None:  # exactly what the first plan needs
        device = topology.device.model_copy(update={"memory": max(choice.ranked[0].memory)})
        topology = topology.model_copy(update={"device": device})
        choice = choose(one, topology, [bad])
    first = improve(choice, {}).ranked[0]
    limit = topology.device.limit or float("inf")
    assert max(first.memory) <= limit
    others = choose(one, topology, [*neighbours(first.candidate, Estimates(one, topology))], most=100).ranked
    fitting = [other for other in others if other.simulated is not None and max(other.memory) <= limit]
    assert all(other.seconds >= (1 - GAIN) * first.seconds for other in fitting)


def test_schedules_that_flush_keep_equal_replicas():
    one, topology = profile(), Topology.flat(4, 1e9)
    flushing = next(c for c in find_candidates(one, topology, 12, schedules=["pipedream_flush"]) if c.replicas == (2, 2))
    moved = [*neighbours(flushing, Estimates(one, topology))]
    assert moved
    assert {c.replicas for c in moved} == {(2, 2)}
    assert {c.options.extra_in_flight for c in moved} == {0, 1, 2}
    assert {c.starts for c in moved} == {(0, cut) for cut in (1, 2, 3, 4, 5)}


@pytest.mark.parametrize("latency", [0.0, 0.5, 2.0])
def test_more_are_in_flight_with_a_flush_only_where_links_make_that_faster(latency):
    """Stages compute for 12 seconds; without more in flight the latency of both directions counts once for every second microbatch."""
    one, topology = profile(), Topology.flat(2, 1e9, latency=latency)
    best = improve(best_of(one, topology, schedules=["pipedream_flush"]), {}).ranked[0]
    assert best.candidate.options.extra_in_flight == (1 if latency else 0)
    assert best.seconds == pytest.approx(13 * 12.0 + latency * 2, rel=1e-6)
