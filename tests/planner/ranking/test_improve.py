"""Steps from the best plan to faster neighbours."""

import dataclasses
import itertools

import pytest

from jpipe import InputError
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.ranking.choose import choose
from jpipe_planner.ranking.improve import GAIN, improve
from jpipe_planner.ranking.loads import least_loaded
from jpipe_planner.ranking.neighbours import QuickBound, neighbours, pairs, recut
from jpipe_planner.search.candidates import find_candidates

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
    others = choose(one, topology, [*neighbours(first.candidate, one)], most=100).ranked
    fitting = [other for other in others if other.simulated is not None and max(other.memory) <= limit]
    assert all(other.seconds >= (1 - GAIN) * first.seconds for other in fitting)


def test_schedules_that_flush_keep_equal_replicas():
    one, topology = profile(), Topology.flat(4, 1e9)
    flushing = next(c for c in find_candidates(one, topology, 12, schedules=["pipedream_flush"]) if c.replicas == (2, 2))
    moved = [*neighbours(flushing, one)]
    assert moved
    assert {c.replicas for c in moved} == {(2, 2)}
    assert {c.options.extra_in_flight for c in moved} == {0, 1, 2}
    assert {c.starts for c in moved} == {(0, cut) for cut in (1, 2, 3, 4, 5)}


@pytest.mark.parametrize(("topology", "frozen"), [(Topology.flat(4, 50.0, latency=0.3), 0), (Topology.flat(4, 1e6), 10**6)])
def test_the_quick_bound_is_at_most_the_simulation_for_plans_near_others(topology, frozen):
    one = profile()
    layers = tuple(layer.model_copy(update={"frozen": frozen} if n == 0 else {}) for n, layer in enumerate(one.layers))
    one = one.model_copy(update={"layers": layers})
    quick = QuickBound(one, topology, 1)
    schedules = ["pipedream", "pipedream_2bw", "pipedream_flush"]
    bases = [c for c in find_candidates(one, topology, 12, schedules=schedules) if c.depth > 1 and not c.options.extra_in_flight]
    near = [*bases, *(c for base in bases[:4] for c in itertools.islice((*neighbours(base, one), *pairs(base, one)), 0, None, 25))]
    tightest = 0.0
    for candidate in near:
        try:
            plan = candidate.plan(one.ids)
        except InputError:
            continue
        seconds = simulate_plan(plan, one.stage_costs(plan, 1), topology).batch_seconds
        assert quick.seconds(candidate) <= seconds * (1 + 1e-9)
        tightest = max(tightest, quick.seconds(candidate) / seconds)
    assert tightest > 0.95


def test_pairs_are_two_changes_away():
    one, topology = profile(), Topology.flat(2, 1e9)
    base = best_of(one, topology, schedules=["pipedream_2bw"]).ranked[0].candidate
    found = {(c.starts, c.options.extra_in_flight) for c in pairs(base, one)}
    assert {((0, 2), 2), ((0, 4), 1)} <= found
    assert not found & {(c.starts, c.options.extra_in_flight) for c in [base, *neighbours(base, one)]}


def test_one_cut_moves_anywhere_with_any_number_in_flight():
    one, topology = profile((1.0,) * 9), Topology.flat(2, 1e9)
    base = best_of(one, topology, schedules=["pipedream_2bw"]).ranked[0].candidate
    found = {(c.starts, c.options.extra_in_flight) for c in recut(base, one)}
    assert found == {((0, start), extra) for start in range(1, 9) for extra in range(5)}


def test_the_least_loaded_stages_are_those_of_all_cuts_and_replicas():
    """The busiest device computes or sends longest, the activations of one cut and the gradients of the other through one port."""
    one, bandwidth = profile((2.0, 1.0, 1.0, 3.0, 1.0)), 20.0
    outputs = (60, 10, 80, 10, 0)
    layers = [
        layer.model_copy(update={"at": (layer.at[0].model_copy(update={"outputs": size}),)})
        for layer, size in zip(one.layers, outputs, strict=True)
    ]
    one, topology = one.model_copy(update={"layers": tuple(layers)}), Topology.flat(4, bandwidth)
    base = next(c for c in find_candidates(one, topology, 4, schedules=["pipedream_2bw"]) if c.depth == 2)

    def load(starts, replicas):
        ends, loads = (*starts[1:], 5), []
        for start, end, count in zip(starts, ends, replicas, strict=True):
            sent = 4 / count * ((outputs[end - 1] if end < 5 else 0) + (outputs[start - 1] if start else 0))
            computes = 4 / count * sum(layer.at[0].forward + layer.at[0].backward for layer in layers[start:end])
            sums = 2 * (count - 1) / count * sum(layer.accumulators for layer in layers[start:end])
            loads.append(max(computes, (sent + sums) / bandwidth))
        return max(loads)

    for found in least_loaded(base, one, topology):
        cuts = itertools.combinations(range(1, 5), found.depth - 1)
        splits = [split for split in itertools.product((1, 2, 4), repeat=found.depth) if sum(split) == 4]
        best = min(load((0, *cut), split) for cut in cuts for split in splits)
        assert load(found.starts, found.replicas) == pytest.approx(best)
    assert {found.depth for found in least_loaded(base, one, topology)} == {2, 3, 4}
    assert not list(least_loaded(dataclasses.replace(base, schedule="pipedream_flush"), one, topology))


@pytest.mark.parametrize(("latency", "extras"), [(0.0, {0}), (0.5, {0, 1, 2}), (2.0, {0, 1, 2})])
def test_more_are_in_flight_with_a_flush_only_where_links_make_that_faster(latency, extras):
    """Stages compute for 12 seconds; without more in flight the latency of both directions counts once for every second microbatch."""
    one, topology = profile(), Topology.flat(2, 1e9, latency=latency)
    candidates = [c for c in find_candidates(one, topology, 12, schedules=["pipedream_flush"]) if c.depth == 2]
    assert {c.options.extra_in_flight for c in candidates} == extras
    for c in candidates:
        plan = c.plan(one.ids)
        assert c.seconds == pytest.approx(simulate_plan(plan, one.stage_costs(plan, 1), topology).batch_seconds)
        assert c.seconds == pytest.approx(13 * 12.0 + latency * (2 if c.options.extra_in_flight else 12), rel=1e-6)
    best = choose(one, topology, candidates).ranked[0].candidate
    assert best.options.extra_in_flight == (1 if latency else 0)
