"""PipeDream's stages: the recurrence equals an exhaustive search, and the plans fit."""

import itertools
import random

import numpy as np
import pytest

import jpipe
from benchmarks.papers.partition import Placed, Problem, evaluate_partition, search_pipedream
from jpipe_planner import Topology
from jpipe_planner.search import pipedream
from jpipe_planner.search.estimate import Estimates
from jpipe_planner.search.pipedream import fastest_stages, pipedream_plans
from tests.planner.invented import invented_profile


@pytest.mark.parametrize("seed", range(12))
def test_the_recurrence_equals_an_exhaustive_search(seed):
    """The seconds of a stage depend on its layers, its first device and its replicas in any way; some are impossible."""
    rng = np.random.default_rng(seed)
    layers, devices, replicas = 4, 5, [1, 2, 4] if seed % 2 else [1, 2, 3, 4, 5]
    seconds = rng.integers(1, 9, (devices, devices + 1, layers + 1, layers + 1)).astype(float)
    seconds[rng.random(seconds.shape) < 0.2] = np.inf
    seconds[:, :, np.tri(layers + 1, dtype=bool)] = np.inf

    def slowest(starts, counts):
        ends, firsts = (*starts[1:], layers), [0, *itertools.accumulate(counts)]
        return max(seconds[a, r, i, j] for a, r, i, j in zip(firsts, counts, starts, ends, strict=False))

    best = {}
    for depth in range(1, layers + 1):
        for counts in itertools.product(replicas, repeat=depth):
            for inner in itertools.combinations(range(1, layers), depth - 1) if sum(counts) <= devices else ():
                best[depth] = min(best.get(depth, np.inf), slowest((0, *inner), counts))
    found = fastest_stages(lambda a, r: seconds[a, r], layers, devices, replicas, layers)
    assert {len(one.starts): one.seconds for one in found} == {depth: time for depth, time in best.items() if time < np.inf}
    for one in found:
        assert slowest(one.starts, one.replicas) == one.seconds
        assert sum(one.replicas) <= devices
    (fastest,) = fastest_stages(lambda a, r: seconds[a, r], layers, devices, replicas, None)
    assert fastest.seconds == min(best.values()) == slowest(fastest.starts, fastest.replicas)


@pytest.mark.parametrize("seed", range(6))
def test_plans_fit_and_no_plan_that_fits_has_a_much_better_estimate(seed):
    rng, profile = random.Random(seed), invented_profile(seed, 6)
    memory = sum(layer.weights for layer in profile.layers) * rng.uniform(1.2, 3.5)
    estimates = Estimates(profile, Topology.flat(4, 10 ** rng.uniform(8, 10), latency=1e-5, memory=memory))
    found = [one for one in pipedream_plans(estimates, 8, "batch", exact=True) if one.over is None]
    least = np.inf
    for depth in range(2, 5):
        for counts in itertools.product((1, 2, 4), repeat=depth):
            for inner in itertools.combinations(range(1, 6), depth - 1) if sum(counts) <= 4 else ():
                shape = jpipe.schedules.PlainShape("pipedream", 8, counts)
                one = estimates.candidate(shape, 1, (0, *inner))
                least = least if one is None or one.over else min(least, one.seconds)
    if least < np.inf:
        assert min(one.seconds for one in found) <= 1.25 * least
    assert all(sum(one.replicas) <= 4 and one.microbatches == 8 for one in found)


def test_each_stage_may_update_by_itself():
    estimates = Estimates(invented_profile(1, 6), Topology.flat(5, 1e9))
    found = list(pipedream_plans(estimates, 60, "replicas", exact=False))
    assert {one.options.update_every for one in found} == {"replicas"}
    assert all(one.microbatches == np.lcm.reduce(one.replicas) for one in found)
    assert any(len(set(one.replicas)) > 1 for one in found)


def test_of_many_layers_the_best_cuts_are_taken(monkeypatch):
    """Every third layer has a small output; cuts are made there."""
    profile = invented_profile(0, 30)
    layers = [
        layer.model_copy(
            update={"at": (layer.at[0].model_copy(update={"forward": 1e-3, "backward": 2e-3, "outputs": 10**4 if n % 3 == 2 else 10**7}),)}
        )
        for n, layer in enumerate(profile.layers)
    ]
    profile = profile.model_copy(update={"layers": tuple(layers)})
    monkeypatch.setattr(pipedream, "MOST_CUTS", 10)
    found = list(pipedream_plans(Estimates(profile, Topology.flat(4, 1e9)), 8, "batch", exact=True))
    assert {start % 3 for one in found for start in one.starts} == {0}


def test_of_many_devices_stages_get_groups(monkeypatch):
    profile, topology = invented_profile(0, 6), Topology.flat(12, 1e10)
    singly = list(pipedream_plans(Estimates(profile, topology), 24, "batch", exact=True))
    monkeypatch.setattr(pipedream, "MOST_PLACES", 6)
    assert list(pipedream_plans(Estimates(profile, topology), 24, "batch", exact=True)) == singly  # six groups are too few
    monkeypatch.setattr(pipedream, "LEAST_PLACES", 5)
    in_pairs = list(pipedream_plans(Estimates(profile, topology), 24, "batch", exact=True))
    assert {count % 2 for one in in_pairs for count in one.replicas} == {0}
    assert {count % 2 for one in singly for count in one.replicas} == {0, 1}


def test_the_price_of_the_paper_by_hand():
    layers = [
        jpipe.programs.LayerCost(4.0, 8.0, outputs=30, weights=10, update=1.0),
        jpipe.programs.LayerCost(1.0, 2.0, outputs=7, weights=90),
    ]
    levels = [{"count": 2, "bandwidth": 20.0}, {"count": 2, "bandwidth": 5.0, "latency": 1.0}]
    problem = Problem(layers, Topology(levels=levels), microbatches=6, dispatch=0.5)
    stages = [Placed(0, 1, 0, 3), Placed(1, 2, 3, 1, "full")]
    # first: 2 microbatches of 13 s each and an update; its sum takes 2 · 2/3 · 10 / 5 + 4 · 1 < 13; second: 4 + 1 again, and 0.5 an update;
    # cut: 30 / 5
    assert evaluate_partition(problem, stages).seconds == pytest.approx(6.0)
    assert evaluate_partition(problem, stages).bound == ("cut", 0)


# VGG-16: GFLOP an image forward, million parameters, million output numbers an image
VGG = [(0.17, 0.002, 3.2), (3.7, 0.037, 0.8), (1.85, 0.074, 1.6), (3.7, 0.147, 0.4), (1.85, 0.295, 0.8), (3.7, 0.59, 0.8), (3.7, 0.59, 0.2)]
VGG += [(1.85, 1.18, 0.4), (3.7, 2.36, 0.4), (3.7, 2.36, 0.1), (0.92, 2.36, 0.1), (0.92, 2.36, 0.1), (0.92, 2.36, 0.025)]
VGG += [(0.2, 102.8, 0.004), (0.03, 16.8, 0.004), (0.008, 4.1, 0.001)]


@pytest.mark.parametrize("levels", [[16], [4, 4]])
def test_vgg_has_its_convolutions_on_fifteen_workers_and_its_dense_layers_on_one(levels):
    seconds = 32 / 12e3  # for a GFLOP an image, 32 images, 12 TFLOP/s
    layers = [
        jpipe.programs.LayerCost(flops * seconds, 2 * flops * seconds, outputs=int(32 * 4e6 * out), weights=int(4e6 * weights))
        for flops, weights, out in VGG
    ]
    topology = Topology(levels=[{"count": count, "bandwidth": "25 Gbit/s"} for count in levels])
    result = search_pipedream(Problem(layers, topology))
    assert [stage.replicas for stage in result.stages] == [15, 1]
    assert result.stages[0].stop in (12, 13)  # whether the last convolution is with the dense layers
