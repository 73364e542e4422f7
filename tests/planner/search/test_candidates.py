"""Candidates of both searches, in terms that can be compared: what they send, and what they cost where devices share cores."""

import pytest

from planner.cost.simulated import simulated
from planner.machine.topology import Topology
from planner.profile.profile import Profile
from planner.search.candidates import as_candidate, find_candidates
from planner.search.parallel import sweep
from planner.search.partition import Placed, Problem, evaluate


def blocks(count: int = 4, weights: int = 1_000) -> Profile:
    """Equal blocks; a forward takes a second, a backward two."""
    at = [{"forward": 1.0, "backward": 2.0, "outputs": 100, "residuals": {"none": 300}}]
    layers = [{"id": f"block_{n}", "weights": weights, "optimizer": weights, "update": 0.1, "at": at} for n in range(count)]
    return Profile(source="analytic", sizes=[1], inputs=[10], labels=[4], layers=layers)


def machines(count: int, cores: float | None = None) -> Topology:
    return Topology(levels=({"count": count, "bandwidth": 1e9},), cores=cores)


def placed(profile, topology, *replicas, microbatches):
    """One layer a stage, with replicas of its own; the last stage has what is left."""
    count = len(profile.ids)
    ends = [*range(1, len(replicas)), count]
    stages = [Placed(s, ends[s], sum(replicas[:s]), r) for s, r in enumerate(replicas)]
    problem = Problem(list(profile.costs(1).values()), topology, microbatches, inputs=10, labels=4)
    return as_candidate(problem, evaluate(problem, stages), 1)


def simulate(profile, topology, candidate):
    plan = candidate.plan(profile.ids)
    found = simulated(plan, profile.stage_costs(plan, candidate.rows), topology)
    assert found is not None
    return found


@pytest.mark.parametrize(("replicas", "microbatches"), [((2, 1, 1), 4), ((3, 2), "replicas"), ((4,), 8), ((1, 1, 1), 3)])
def test_what_stages_of_their_own_replicas_send_is_what_the_simulator_counts(replicas, microbatches):
    profile, topology = blocks(), machines(sum(replicas))
    candidate = placed(profile, topology, *replicas, microbatches=microbatches)
    assert candidate.sent * candidate.batch == pytest.approx(sum(simulate(profile, topology, candidate).sent_bytes), rel=1e-3)


@pytest.mark.slow
def test_what_equal_pipelines_send_is_what_the_simulator_counts():
    profile, topology = blocks(), machines(4)
    for candidate in sweep(profile, topology, 8, exact=True):
        assert candidate.sent * candidate.batch == pytest.approx(sum(simulate(profile, topology, candidate).sent_bytes), rel=1e-3)


@pytest.mark.slow
def test_workers_of_both_searches_share_cores():
    profile, topology = blocks(), machines(4, cores=1)
    equal = [candidate for candidate in sweep(profile, topology, 16, exact=True) if not candidate.extra_in_flight]
    plans = [((2, 1, 1), 8), ((3, 1), "replicas"), ((2, 2), 8)]
    own = [placed(profile, topology, *replicas, microbatches=microbatches) for replicas, microbatches in plans]
    for candidate in (*equal, *own):
        assert candidate.seconds >= candidate.microbatches * 4 * 3.0  # computed by a single core
        assert candidate.seconds == pytest.approx(simulate(profile, topology, candidate).batch_seconds, rel=0.05)
    assert {candidate.bound for candidate in own} == {"the cores"}
    assert "the cores" in {candidate.bound for candidate in equal}


def test_the_best_of_pipedreams_is_found_with_the_time_that_its_cores_take():
    profile = blocks()
    alone, shared = (find_candidates(profile, machines(4, cores), 8, schedules=["pipedream"])[-1] for cores in (None, 1.0))
    assert shared.seconds == pytest.approx((1 - alone.bubble) * 4 * alone.seconds)
    assert shared.bubble == pytest.approx(0.75)
    assert (alone.bound, shared.bound) == ("stage 0 computes", "the cores")
