"""Candidates of both searches are comparable: the bytes that they send, and their costs where devices share cores."""

import dataclasses
import math

import pytest

from jpipe.schedules import PlainShape, PlanOptions
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile, TensorProfile
from jpipe_planner.profile.sharded import NO_MESH, Degrees, Meshes, possible_degrees, shard_profile
from jpipe_planner.ranking.choose import choose
from jpipe_planner.search.candidates import find_candidates
from jpipe_planner.search.estimate import Estimates
from tests.planner.invented import equal


def blocks(count: int = 4, weights: int = 1_000) -> Profile:
    """Return a profile of equal blocks; a forward takes one second, a backward two."""
    at = [{"forward": 1.0, "backward": 2.0, "outputs": 100, "residuals": {"none": 300}}]
    layers = [{"id": f"block_{n}", "weights": weights, "optimizer": weights, "update": 0.1, "at": at} for n in range(count)]
    return Profile(source="analytic", sizes=[1], inputs=[10], labels=[4], layers=layers)


def machines(count: int, cores: float | None = None) -> Topology:
    return Topology(levels=({"count": count, "bandwidth": 1e9},), cores=cores)


def placed(profile, topology, *replicas, microbatches):
    """Return a candidate with one layer a stage and its own replicas in each; the last stage has the remaining layers."""
    every = "replicas" if microbatches == "replicas" else "batch"
    count = math.lcm(*replicas) if microbatches == "replicas" else microbatches
    shape = PlainShape("pipedream", count, replicas, PlanOptions(update_every=every))
    return Estimates(profile, topology).candidate(shape, 1, tuple(range(len(replicas))))


def simulate(profile, topology, candidate):
    plan = candidate.plan(profile.ids)
    simulated = simulate_plan(plan, profile.stage_costs(plan, candidate.rows), topology)
    assert simulated is not None
    return simulated


@pytest.mark.parametrize(("replicas", "microbatches"), [((2, 1, 1), 4), ((3, 2), "replicas"), ((4,), 8), ((1, 1, 1), 3)])
def test_sent_bytes_of_stages_with_unequal_replicas_equal_the_simulators(replicas, microbatches):
    profile, topology = blocks(), machines(sum(replicas))
    candidate = placed(profile, topology, *replicas, microbatches=microbatches)
    assert candidate.sent * candidate.batch == pytest.approx(sum(simulate(profile, topology, candidate).sent_bytes), rel=1e-3)


@pytest.mark.slow
def test_sent_bytes_of_equal_pipelines_equal_the_simulators():
    profile, topology = blocks(), machines(4)
    for candidate in equal(profile, topology, 8, exact=True):
        assert candidate.sent * candidate.batch == pytest.approx(sum(simulate(profile, topology, candidate).sent_bytes), rel=1e-3)


@pytest.mark.slow
def test_workers_of_both_searches_share_cores():
    profile, topology = blocks(), machines(4, cores=1)
    straight = [candidate for candidate in equal(profile, topology, 16, exact=True) if not candidate.options.extra_in_flight]
    plans = [((2, 1, 1), 8), ((3, 1), "replicas"), ((2, 2), 8)]
    unequal = [placed(profile, topology, *replicas, microbatches=microbatches) for replicas, microbatches in plans]
    for candidate in (*straight, *unequal):
        assert candidate.seconds >= candidate.microbatches * 4 * 3.0  # computed by a single core
        assert candidate.seconds == pytest.approx(simulate(profile, topology, candidate).batch_seconds, rel=0.05)
    assert {candidate.bound for candidate in unequal} == {"the cores"}
    assert "the cores" in {candidate.bound for candidate in straight}


def test_the_best_of_pipedreams_is_found_with_the_time_that_its_cores_take():
    profile = blocks()
    alone, shared = (
        next(one for one in find_candidates(profile, machines(4, cores), 8, schedules=["pipedream"]) if one.replicas == (1,) * 4)
        for cores in (None, 1.0)
    )
    assert shared.seconds == pytest.approx((1 - alone.bubble) * 4 * alone.seconds)
    assert shared.bubble == pytest.approx(0.75)
    assert (alone.bound, shared.bound) == ("stage 0 computes", "the cores")


def test_without_replicas_there_is_one_pipeline_of_any_depth():
    candidates = find_candidates(blocks(), machines(7), 8, exact=False, replicas=False)
    assert {max(candidate.replicas) for candidate in candidates} == {1}
    assert {candidate.depth for candidate in candidates} == set(range(1, len(blocks().ids) + 1))
    assert any(max(candidate.replicas) > 1 for candidate in find_candidates(blocks(), machines(7), 8, exact=False))


@pytest.mark.parametrize(
    ("microbatches", "first", "delay", "computing"),
    [(2, "pipedream", 1.0, 12.0), (8, "pipedream_2bw", 1.0, 48.0), (8, "pipedream", 0.25, 48.0)],
)
def test_data_parallelism_hides_its_sum_one_update_late(microbatches, first, delay, computing):
    """Each of two replicas computes 12 s a microbatch. The sum takes 10 s, and messages between stages take so long that none pay."""
    at = [{"forward": 1.0, "backward": 2.0, "outputs": 10**12, "residuals": {"none": 300}}]
    layers = [{"id": f"block_{n}", "weights": 2_500, "at": at} for n in range(4)]
    profile, topology = Profile(source="analytic", sizes=[1], inputs=[10], labels=[4], layers=layers), Topology.flat(2, 1e3)
    flushing, late = (find_candidates(profile, topology, microbatches, schedules=names) for names in (["pipedream_flush"], [first]))
    (late,) = [candidate for candidate in late if candidate.replicas == (2,)]
    assert late.is_late_data_parallel
    assert late.delay == delay
    assert choose(profile, topology, flushing).ranked[0].seconds == pytest.approx(computing + 10.0)
    assert late.seconds == simulate(profile, topology, late).batch_seconds == pytest.approx(computing)
    every = find_candidates(profile, topology, microbatches)
    ranked = choose(profile, topology, every).ranked
    assert ranked[0].candidate.is_late_data_parallel
    assert ranked[0].candidate.delay == (1.0 if microbatches == 2 else 0.25)  # of equally fast ones that with newer weights
    assert sum(candidate.is_late_data_parallel for candidate in every) == (1 if microbatches == 2 else 2)
    assert not any(candidate.is_late_data_parallel for candidate in find_candidates(profile, topology, microbatches, max_delay=0.2))
    assert not any(candidate.is_late_data_parallel for candidate in find_candidates(profile, Topology.flat(1, 1e3), microbatches))


def meshes_of(weights: int, memory: float | None = None):
    """Return four equal blocks that can be sharded, and two servers of four devices with slow links between them."""
    tensor = {"weights": 1.0, "compute": 1.0, "residuals": {"none": 1.0}, "reduced": 100.0, "reductions": 2, "divides": 4}
    layers = tuple(layer.model_copy(update={"tensor": TensorProfile(**tensor)}) for layer in blocks(weights=weights).layers)
    levels = {"count": 4, "bandwidth": 1e12}, {"count": 2, "bandwidth": 1e2}
    return blocks().model_copy(update={"layers": layers}), Topology(levels=levels, device={"memory": memory})


def test_candidates_on_meshes_are_those_of_devices_that_have_a_share():
    profile, topology = meshes_of(1000)
    degrees = Degrees(model=4)
    candidates = find_candidates(profile, topology, 8, meshes=[degrees])
    alone = find_candidates(shard_profile(profile, degrees, topology), topology.groups(4), 8)
    assert [dataclasses.replace(one, degrees=NO_MESH, sent=one.sent / 4) for one in candidates] == alone
    assert {one.devices for one in candidates} <= {4, 8}
    plan = candidates[0].plan(profile.ids)
    assert {(tuple(stage.mesh.items()), stage.fsdp, stage.devices_each) for stage in plan.stages} == {((("model", 4),), False, 4)}


def test_meshes_change_nothing_of_the_candidates_without():
    profile, topology = meshes_of(1000)
    without = find_candidates(profile, topology, 8)
    assert without == find_candidates(blocks(weights=1000), topology, 8)
    candidates = find_candidates(profile, topology, 8, meshes=possible_degrees(profile, topology))
    assert [one for one in candidates if one.degrees == NO_MESH] == without
    assert {one.degrees for one in candidates} == set(possible_degrees(profile, topology))


def test_a_layer_that_fits_no_device_is_planned_for_a_mesh():
    profile, topology = meshes_of(10**6, memory=2.9e6)  # a layer, its gradients and optimizer state are 3 MB
    assert all(one.over for one in find_candidates(profile, topology, 8))
    choice = choose(profile, topology, find_candidates(profile, topology, 8, meshes=possible_degrees(profile, topology)))
    best = choice.ranked[0]
    assert best.candidate.degrees.size > 1
    assert max(best.memory) <= 2.9e6
    assert choice.plan(best).stages[0].mesh == best.candidate.degrees.mesh
    seen = Meshes(profile, topology).of(best.candidate.degrees)
    assert best.seconds == pytest.approx(simulate(*seen, best.candidate).batch_seconds)
