"""Sums in parts: cut where they end earliest, and proposed where the simulation says that a batch takes less time."""

import itertools

import numpy as np
import pytest

import jpipe
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.sharded import Degrees
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import choose
from jpipe_planner.ranking.improve import improve
from jpipe_planner.ranking.sum_parts import MOST_PARTS, cut_sum
from jpipe_planner.search.candidates import find_candidates
from tests.planner.invented import varied


def profile(weights=(1000,) * 4) -> Profile:
    """Return layers that compute for 1 and 2 seconds; the sum of 1000 bytes over two replicas takes a second over a `slow` link."""
    at = [{"forward": 1.0, "backward": 2.0, "outputs": 10**6, "residuals": {"none": 10}}]
    layers = [{"id": f"layer_{n}", "weights": size, "at": at} for n, size in enumerate(weights)]
    return Profile(source="analytic", sizes=[1], inputs=[1], labels=[1], layers=layers)


def slow(bandwidth=1000.0, latency=0.0, overlap="transfers and sums"):
    topology = Topology.flat(2, bandwidth, latency)
    return topology.model_copy(update={"device": topology.device.model_copy(update={"overlap": overlap})})


def end_of_sum(backward, sending, fixed, parts):
    """Return when the sums of these parts are over, one after the other, by their definition."""
    clock, summed, layer = 0.0, 0.0, len(backward)
    for count in reversed(parts):
        clock += sum(backward[layer - count : layer])
        summed = max(summed, clock) + sum(sending[layer - count : layer]) + fixed
        layer -= count
    return summed


@pytest.mark.parametrize("hidden", [0.0, 3.0])
@pytest.mark.parametrize(("fixed", "least"), [(0.0, 1e-9), (0.3, 1e-9), (0.05, 0.4)])
def test_a_sum_has_the_fewest_parts_that_end_as_early_as_the_best_of_all_cuts(fixed, least, hidden):
    within = [[cut for cut in range(1, 7) if mask >> (cut - 1) & 1] for mask in range(2**6)]
    cuts = [tuple(b - a for a, b in itertools.pairwise([0, *inner, 7])) for inner in within]
    for seed in range(5):
        random = np.random.default_rng(seed)
        backward, sending = random.exponential(1.0, 7).tolist(), (random.exponential(1.0, 7) * (random.random(7) < 0.8)).tolist()
        ends = {parts: max(end_of_sum(backward, sending, fixed, parts), sum(backward) + hidden) for parts in cuts}
        enough = min(ends.values()) + least
        found = cut_sum(backward, sending, fixed, hidden, least)
        assert ends[found or (7,)] <= enough + 1e-9
        assert max(len(found), 1) == min(len(parts) for parts, end in ends.items() if end <= enough)


def test_a_large_stage_has_a_limited_number_of_parts():
    assert len(cut_sum([1.0] * 40, [1.0] * 40, 0.0, 0.0, 1e-9)) == MOST_PARTS


def test_data_parallelism_over_a_slow_link_sums_in_parts():
    """Whole, a batch takes 2 × 12 seconds and then the sum 4. The last three layers are summed before the backward is over; 1 remains."""
    one, topology = profile(), slow()
    planned = find_candidates(one, topology, 4, schedules=["pipedream_flush"])
    whole = choose(one, topology, planned)
    choice = whole.with_more([whole.simulate(found) for found in varied(one, topology, planned, ["pipedream_flush"])])
    best = choice.ranked[0]
    assert (best.seconds, whole.ranked[0].seconds) == (pytest.approx(25.0), pytest.approx(28.0))
    assert table.schedule(best.candidate) == "data parallel, sum in 3 parts"
    plan = jpipe.Plan.from_json(choice.plan(best).to_json())
    assert [stage.sum_parts for stage in plan.stages] == [(1, 1, 2)]
    assert improve(whole, {}).ranked[0].candidate.sum_parts == ((1, 1, 2),), "a step from the whole sum"


@pytest.mark.parametrize("degrees", [Degrees(data=2, fsdp=True), Degrees(model=2)], ids=str)
def test_replicas_on_meshes_sum_in_parts(degrees):
    """Each device of a mesh has half of the work and of the gradients, so that a batch takes as long as above."""
    at = [{"forward": 2.0, "backward": 4.0, "outputs": 10**6, "residuals": {"none": 10}}]
    tensor = {"weights": 1.0, "compute": 1.0, "divides": 2}
    layers = [{"id": f"layer_{n}", "weights": 2000, "tensor": tensor, "at": at} for n in range(4)]
    one = Profile(source="analytic", sizes=[2], inputs=[1], labels=[1], layers=layers)
    topology = Topology(levels=({"count": 2, "bandwidth": 1e12}, {"count": 2, "bandwidth": 2000.0}))
    found = find_candidates(one, topology, 8, schedules=["pipedream_flush"], meshes=[degrees])
    planned = [candidate for candidate in found if candidate.depth == 1 and candidate.replicas == (2,)]
    whole = choose(one, topology, planned)
    variants = varied(one, topology, planned, ["pipedream_flush"])
    (best,) = [candidate for candidate in variants if candidate.sum_parts]
    assert (best.seconds, whole.ranked[0].seconds) == (pytest.approx(25.0), pytest.approx(28.0))
    plan = jpipe.Plan.from_json(best.plan(one.ids).to_json())
    assert (plan.stages[0].sum_parts, plan.stages[0].devices_each) == ((1, 1, 2), 2)
    assert improve(whole, {}).ranked[0].candidate.sum_parts == ((1, 1, 2),)


@pytest.mark.parametrize(
    ("schedule", "topology"),
    [
        ("pipedream_flush", slow(overlap="none")),
        ("pipedream_flush", slow(overlap="transfers")),
        ("pipedream_flush", slow(1e6)),
        ("pipedream_flush", slow(1e6, latency=2.0)),
        ("pipedream_2bw", slow()),
    ],
)
def test_sums_are_whole_where_parts_gain_nothing(schedule, topology):
    """Where sums do not overlap, where they are short but for their latency, and where they overlap with the next batch anyway."""
    one = profile()
    planned = [candidate for candidate in find_candidates(one, topology, 4, schedules=[schedule]) if candidate.depth == 1]
    assert planned
    assert not any(found.sum_parts for found in varied(one, topology, planned, [schedule]))
    assert not improve(choose(one, topology, planned), {}).ranked[0].candidate.sum_parts
