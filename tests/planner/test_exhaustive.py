"""The search's choice beside the best of all plans that can be enumerated."""

import itertools

import numpy as np
import pytest

from jpipe.schedules import PlainShape, PlanOptions
from jpipe_planner import find_plans
from jpipe_planner.machine.topology import Topology
from jpipe_planner.search.estimate import Estimates
from tests.planner.invented import invented_profile

LAYERS, DEVICES, BATCH = 5, 4, 8
SCHEDULES = {"pipedream_flush": (0,), "pipedream_2bw": (0, 1, 2), "pipedream": (0, 1, 2)}


def every_plan(estimates):
    """Yield all plans of one stage on each rank: all cuts, replicas and numbers in flight; each with the recomputation that fits."""
    for depth in range(1, min(LAYERS, DEVICES) + 1):
        cuts = list(itertools.combinations(range(1, LAYERS), depth - 1))
        for replicas in itertools.product((1, 2, 4), repeat=depth):
            for name, extras in SCHEDULES.items() if sum(replicas) <= DEVICES else ():
                for inner, extra in itertools.product(cuts, extras):
                    shape = PlainShape(name, BATCH, replicas, PlanOptions(extra_in_flight=extra if depth > 1 else 0))
                    one = estimates.candidate(shape, 1, (0, *inner))
                    if one is not None and one.over is None:
                        yield one


@pytest.mark.slow
def test_no_plan_of_all_is_much_faster_than_the_choice():
    ratios = []
    for seed in range(12):
        random, profile = np.random.default_rng(seed), invented_profile(seed, LAYERS)
        memory = sum(layer.weights for layer in profile.layers) * random.uniform(1.5, 4) if seed % 3 else None
        topology = Topology.flat(DEVICES, 10 ** random.uniform(8, 10), latency=1e-5, memory=memory)
        choice = find_plans(profile, topology, BATCH, schedules=tuple(SCHEDULES)).choice
        simulated = [choice.simulate(one) for one in every_plan(Estimates(profile, topology))]
        fastest = max((one.samples_per_second for one in simulated if one.candidate.over is None), default=None)
        if fastest is not None:
            ratios.append(choice.ranked[0].samples_per_second / fastest)
    assert len(ratios) >= 8
    assert min(ratios) >= 0.97
    assert np.median(ratios) >= 0.995
