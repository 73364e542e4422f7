"""Random profiles and machines, and the simulation of every candidate."""

import dataclasses

import numpy as np

import jpipe
from jpipe_planner.cost.shape import planned_schedules
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.ranking.choose import Choice, choose
from jpipe_planner.ranking.variants import find_variants
from jpipe_planner.search.equal import equal_pipelines
from jpipe_planner.search.estimate import Estimates


def simulate_all(profile, topology, candidates):
    """Simulate all candidates that fit by their estimates."""
    choice = Choice(profile, topology, (), (), 0)
    return [choice.simulate(candidate) for candidate in candidates if candidate.over is None]


def varied(profile, topology, candidates, schedules=None, *, global_norm=False, **options):
    """Return the simulated variants of candidates, also of those that cannot be the fastest."""
    tried = {}
    choice = dataclasses.replace(choose(profile, topology, candidates, tried=tried, global_norm=global_norm), ranked=())
    schedules = tuple(jpipe.schedules.SCHEDULES) if schedules is None else schedules
    before = len(tried)
    find_variants(choice, candidates, schedules, tried, **options)
    return [one.candidate for one in list(tried.values())[before:]]


def equal(profile, topology, batch, *, schedules=None, exact=False, **options):
    """Return the equal pipelines of some schedules, the best estimates first."""
    found = equal_pipelines(Estimates(profile, topology), batch, schedules or planned_schedules(), exact=exact, **options)
    return sorted(found, key=lambda candidate: candidate.rank)


def invented_profile(seed: int, layers: int = 8) -> Profile:
    """Invent a profile of different layers, for microbatches of one row."""
    random = np.random.default_rng(seed)
    forwards, backwards = random.exponential(1e-3, layers), random.exponential(2e-3, layers)
    outputs, weights = 10 ** random.uniform(4, 7, layers), 10 ** random.uniform(4, 8, layers)
    rows = []
    for n, (forward, backward, out, size) in enumerate(zip(forwards, backwards, outputs, weights, strict=True)):
        at = {"forward": forward, "backward": backward, "outputs": int(out), "residuals": {"none": int(2 * out), "full": int(out)}}
        rows.append({"id": f"layer_{n}", "weights": int(size), "optimizer": int(size), "update": 1e-5, "at": [at]})
    return Profile(source="analytic", sizes=[1], inputs=[1000], labels=[8], layers=rows)


def invented_topology(seed: int) -> Topology:
    """Invent a topology of one or two servers; every other one has little memory."""
    random = np.random.default_rng(seed)
    inner, outer = 10 ** random.uniform(9, 10.5), 10 ** random.uniform(8, 9.7)
    levels = [
        {"count": 2 + seed % 2, "bandwidth": inner, "latency": 5e-6},
        {"count": 2, "bandwidth": outer, "latency": random.uniform(0, 3e-4)},
    ]
    levels = levels if seed % 3 else [{"count": 4, "bandwidth": outer, "latency": 5e-5}]
    return Topology(levels=tuple(levels), device={"memory": 3e8 if seed % 2 else None}, cores=3 if seed % 5 == 4 else None)
