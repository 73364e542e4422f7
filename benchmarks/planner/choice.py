"""Compare the planner's choice with simulating every candidate, and with all plans near it, in speed of the plan and in time.

Profiles come from a folder, or are drawn at random.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.markdown import print_table
from jpipe import InputError
from jpipe_planner import Candidate, Profile, Ranked, Topology, choose, find_candidates, improve, read_graph_txt, simulate_plan

TOPOLOGIES = ("cluster-a", "cluster-b")  # of 16 devices
MICROBATCHES = (16, 64)  # of a batch
RANDOM = 6
MOVES = (-8, -4, -3, -2, -1, 1, 2, 3, 4, 8)  # of a cut, in layers
IN_FLIGHT = (0, 1, 2, 3, 4)  # additional microbatches in flight
BY_CLOSED_FORM = 10  # kinds that earlier versions simulated, chosen by closed form; up to four times as many if it was too optimistic


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure, print and return the figures.

    Args:
        options: `profiles`, a folder with a `graph.txt` in each of its folders; None: random profiles.
    """
    rows = []
    for name, profile in _profiles(options.profiles):
        for cluster in TOPOLOGIES:
            file = Path(__file__).parents[2] / "configs" / "topologies" / f"{cluster}.yaml"
            topology = Topology.from_yaml(file.read_text(encoding="utf-8"))
            rows += [{"profile": name, "topology": cluster, **_measured(profile, topology, count)} for count in MICROBATCHES]
    shown = [
        (
            row["profile"],
            row["topology"],
            row["microbatches"],
            row["candidates"],
            *(f"{row[key]:.1%}" for key in ("closed_form_loss", "loss", "gain", "neighbour")),
            *(f"{row[key]:.1f} s" for key in ("closed_form_seconds", "seconds", "improve_seconds", "all_seconds")),
        )
        for row in rows
    ]
    losses = ("loss by closed form", "loss", "gain by steps", "best neighbour after them")
    head = ("profile", "topology", "m", "candidates", *losses, "by closed form", "choice", "steps", "simulating all")
    print_table(head, shown)
    return rows


def _profiles(folder: str | None) -> Iterator[tuple[str, Profile]]:
    """Return the profiles by name; a minibatch of a `graph.txt` counts as one row, which makes no difference here."""
    if folder is not None:
        for path in sorted(Path(folder).expanduser().glob("*/graph.txt")):
            yield path.parent.name, read_graph_txt(path.read_text(encoding="utf-8"), 1)
    else:
        yield from ((f"random {seed}", _random(seed)) for seed in range(RANDOM))


def _random(seed: int) -> Profile:
    """Draw twenty different layers, with sizes for which the links of the clusters matter."""
    random, count, layers = np.random.default_rng(seed), 20, []
    forwards, outputs, weights = random.exponential(5e-3, count), 10 ** random.uniform(5.5, 7.5, count), 10 ** random.uniform(5, 8, count)
    for n, (forward, out, size) in enumerate(zip(forwards.tolist(), outputs.tolist(), weights.tolist(), strict=True)):
        at = {"forward": forward, "backward": 2 * forward, "outputs": int(out), "residuals": {"none": int(2 * out)}}
        layers.append({"id": f"layer {n}", "weights": int(size), "optimizer": int(size), "at": [at]})
    return Profile(source="analytic", sizes=[1], inputs=[10**6], labels=[0], layers=layers)


def _measured(profile: Profile, topology: Topology, count: int) -> dict[str, Any]:
    begin = time.process_time()
    candidates = find_candidates(profile, topology, count)
    searched = time.process_time()
    choice = choose(profile, topology, candidates)
    chosen = time.process_time()
    improved = improve(choice, {})
    stepped = time.process_time()
    # all of them, by the same simulator
    fitting = sorted((candidate for candidate in candidates if candidate.over is None), key=lambda candidate: candidate.rank)
    everything, seconds = {}, {}
    for candidate in fitting:
        begun = time.process_time()
        everything[candidate] = _simulated(profile, topology, candidate)
        seconds[candidate] = time.process_time() - begun
    limit = topology.device.limit or float("inf")
    fast = {candidate: one.samples_per_second for candidate, one in everything.items() if max(one.memory) <= limit}
    best = max(fast.values())
    before = _by_closed_form(fitting, fast)
    return {
        "microbatches": count,
        "candidates": len(fitting),
        "loss": 1 - fast[choice.ranked[0].candidate] / best,
        "gain": improved.ranked[0].samples_per_second / choice.ranked[0].samples_per_second - 1,
        "neighbour": _best_neighbour(profile, topology, improved.ranked[0]),
        "improve_seconds": stepped - chosen,
        "closed_form_loss": 1 - max(fast.get(candidate, 0.0) for candidate in before) / best,
        "seconds": chosen - begin,
        "closed_form_seconds": searched - begin + sum(seconds[candidate] for candidate in before),
        "all_seconds": searched - begin + sum(seconds.values()),
        "simulated": sum(one.simulated is not None for one in choice.ranked),
    }


def _best_neighbour(profile: Profile, topology: Topology, best: Ranked) -> float:
    """Return how much faster than a plan the fastest plan near it is that fits; 0 if none is faster."""
    fastest, limit = best.seconds, topology.device.limit or float("inf")
    for candidate in _near(best.candidate, len(profile.ids)):
        try:
            plan = candidate.plan(profile.ids)
        except InputError:  # the schedule does not allow it
            continue
        costs = profile.stage_costs(plan, candidate.rows)
        computing = max(
            plan.microbatches / count * (cost.forward + cost.backward) for count, cost in zip(plan.replicas, costs, strict=True)
        )
        if computing < fastest:  # otherwise it cannot be faster
            simulated = _simulated(profile, topology, candidate)
            if simulated.simulated is not None and max(simulated.memory) <= limit:
                fastest = min(fastest, simulated.seconds)
    return best.seconds / fastest - 1


def _near(candidate: Candidate, layers: int) -> Iterator[Candidate]:
    """Yield plans with one cut moved, with a replica moved, or with another number in flight."""
    ends = (*candidate.starts[1:], layers)
    for s in range(1, candidate.depth):
        for start in (candidate.starts[s] + move for move in MOVES):
            if candidate.starts[s - 1] < start < ends[s]:
                yield dataclasses.replace(candidate, starts=(*candidate.starts[:s], start, *candidate.starts[s + 1 :]))
    for source, target in permutations(range(candidate.depth), 2):
        replicas = tuple(count - (s == source) + (s == target) for s, count in enumerate(candidate.replicas))
        if min(replicas):
            yield dataclasses.replace(candidate, replicas=replicas)
    for extra in IN_FLIGHT:
        yield dataclasses.replace(candidate, extra_in_flight=extra)


def _simulated(profile: Profile, topology: Topology, candidate: Candidate) -> Ranked:
    plan = candidate.plan(profile.ids)
    return Ranked(candidate, simulate_plan(plan, profile.stage_costs(plan, candidate.rows), topology))


def _by_closed_form(fitting: list[Candidate], fast: dict[Candidate, float]) -> list[Candidate]:
    """Choose the candidates to simulate by closed forms, one per kind."""
    first: dict[tuple[object, ...], Candidate] = {}
    for candidate in fitting:
        first.setdefault(candidate.kind, candidate)
    chosen: list[Candidate] = []
    for candidate in first.values():
        reached = max((fast.get(one, 0.0) for one in chosen), default=0.0)
        if len(chosen) >= 4 * BY_CLOSED_FORM or (len(chosen) >= BY_CLOSED_FORM and candidate.samples_per_second <= reached):
            break
        chosen.append(candidate)
    return chosen
