"""Measure what the choice of `find_plans` loses to other candidates and to plans near it, by simulation, and how long the search takes.

Near plans have a cut moved, a replica moved to another stage, another number of microbatches in flight, or two of these, chosen at random.
Simulating all of them would take hours, so each comparison ends after some CPU seconds. Profiles come from a folder, or are drawn at
random.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.markdown import print_table
from jpipe import InputError
from jpipe_planner import Candidate, Profile, Ranked, Topology, find_plans, read_graph_txt
from jpipe_planner.cost.simulated import simulate_plan

CLUSTERS = ("cluster-a", "cluster-b")  # of 16 devices
FLAT = (8, 16)  # devices, with links of `BANDWIDTH`
BANDWIDTH = 10e9 / 8
MICROBATCHES = (16, 64)  # of a batch
RANDOM = 6
SECONDS = 20.0  # for the other candidates of a case, and for the plans near the choice
MOVES = (-8, -4, -3, -2, -1, 1, 2, 3, 4, 8)  # of a cut, in layers
IN_FLIGHT = (0, 1, 2, 3, 4)  # additional microbatches in flight
PAIRS = 1000  # of two changes at once, at most


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure, print and return the figures.

    Args:
        options: `profiles`, a folder with a `graph.txt` in each of its folders; None: random profiles. `seconds` of each comparison.
    """
    rows = []
    for (name, profile), (machines, topology) in itertools.product(_profiles(options.profiles), _topologies()):
        for count in MICROBATCHES:
            print(f"… {name}, {machines}, {count} microbatches", file=sys.stderr, flush=True)
            rows.append({"profile": name, "topology": machines, **_measured(profile, topology, count, options.seconds or SECONDS)})
    shown = [
        (
            row["profile"],
            row["topology"],
            row["microbatches"],
            row["chosen"],
            *(f"{row[key]:.1%}" for key in ("loss_to_candidates", "loss_to_near")),
            f"{row['candidates_tried']} of {row['candidates']}",
            f"{row['near_tried']} of {row['near']}",
            row["simulated"],
            f"{row['seconds']:.1f} s",
        )
        for row in rows
    ]
    losses = ("loss to the best candidate", "to the best plan near it")
    tried = ("candidates tried", "near plans tried")
    print_table(("profile", "topology", "m", "choice", *losses, *tried, "simulated by the search", "search"), shown)
    return rows


def _topologies() -> Iterator[tuple[str, Topology]]:
    for cluster in CLUSTERS:
        file = Path(__file__).parents[2] / "configs" / "topologies" / f"{cluster}.yaml"
        yield cluster, Topology.from_yaml(file.read_text(encoding="utf-8"))
    yield from ((f"{count} devices", Topology.flat(count, BANDWIDTH)) for count in FLAT)


def _profiles(folder: str | None) -> Iterator[tuple[str, Profile]]:
    """Return the profiles by name; a minibatch of a `graph.txt` counts as one row, which makes no difference here."""
    if folder is not None:
        for path in sorted(Path(folder).expanduser().glob("*/graph.txt")):
            yield path.parent.name, read_graph_txt(path.read_text(encoding="utf-8"), 1)
    else:
        yield from ((f"random {seed}", _random(seed)) for seed in range(RANDOM))


def _random(seed: int) -> Profile:
    """Draw twenty different layers, with sizes for which the links of the clusters matter."""
    drawn, count, layers = np.random.default_rng(seed), 20, []
    forwards, outputs, weights = drawn.exponential(5e-3, count), 10 ** drawn.uniform(5.5, 7.5, count), 10 ** drawn.uniform(5, 8, count)
    for n, (forward, out, size) in enumerate(zip(forwards.tolist(), outputs.tolist(), weights.tolist(), strict=True)):
        at = {"forward": forward, "backward": 2 * forward, "outputs": int(out), "residuals": {"none": int(2 * out)}}
        layers.append({"id": f"layer {n}", "weights": int(size), "optimizer": int(size), "at": [at]})
    return Profile(source="analytic", sizes=[1], inputs=[10**6], labels=[0], layers=layers)


def _measured(profile: Profile, topology: Topology, count: int, limit: float) -> dict[str, Any]:
    begin = time.process_time()
    plans = find_plans(profile, topology, count)
    seconds, best = time.process_time() - begin, plans.choice.ranked[0]
    fitting = sorted((candidate for candidate in plans.candidates if candidate.over is None), key=lambda candidate: candidate.rank)
    near = list(_near(best.candidate, len(profile.ids)))
    other, others_tried = _fastest(profile, topology, fitting, best, limit)
    neighbour, near_tried = _fastest(profile, topology, near, best, limit)
    return {
        "microbatches": count,
        "chosen": _name(best.candidate),
        "candidates": len(fitting),
        "candidates_tried": others_tried,
        "loss_to_candidates": best.seconds / other.seconds - 1,
        "best_candidate": _name(other.candidate),
        "near": len(near),
        "near_tried": near_tried,
        "loss_to_near": best.seconds / neighbour.seconds - 1,
        "best_near": _name(neighbour.candidate),
        "simulated": len(plans.tried),
        "seconds": seconds,
    }


def _name(candidate: Candidate) -> str:
    """Format schedule, additional microbatches in flight, replicas and the first layer of each stage."""
    extra = f" +{candidate.options.extra_in_flight}" if candidate.options.extra_in_flight else ""
    parts = " in parts" if candidate.sum_parts else ""
    return f"{candidate.schedule}{extra}{parts} {'·'.join(map(str, candidate.replicas))} at {' '.join(map(str, candidate.starts))}"


def _fastest(profile: Profile, topology: Topology, candidates: Iterable[Candidate], best: Ranked, limit: float) -> tuple[Ranked, int]:
    """Return the fastest of a plan and of others that fit, and how many of these are known to be no faster or were simulated in time."""
    begin, tried, memory = time.process_time(), 0, topology.device.limit or float("inf")
    for candidate in candidates:
        if time.process_time() - begin > limit:
            break
        tried += 1
        try:
            plan = candidate.plan(profile.ids)
        except InputError:  # the schedule does not allow it
            continue
        costs = profile.stage_costs(plan, candidate.rows)
        computing = max(
            plan.microbatches / count * (cost.forward + cost.backward) for count, cost in zip(plan.replicas, costs, strict=True)
        )
        if computing >= best.seconds:  # it cannot be faster
            continue
        simulated = Ranked(candidate, simulate_plan(plan, costs, topology))
        if simulated.simulated is not None and max(simulated.memory) <= memory and simulated.seconds < best.seconds:
            best = simulated
    return best, tried


def _near(candidate: Candidate, layers: int) -> Iterator[Candidate]:
    """Yield the plans that differ in one change, then some that differ in two."""
    whole = dataclasses.replace(candidate, sum_parts=())
    one = list(dict.fromkeys(_changed(whole, layers)))
    yield from one
    drawn, seen = np.random.default_rng(0), {whole, *one}
    for _ in range(PAIRS if one else 0):
        further = list(_changed(one[drawn.integers(len(one))], layers))
        second = further[drawn.integers(len(further))]
        if second not in seen:
            seen.add(second)
            yield second


def _changed(candidate: Candidate, layers: int) -> Iterator[Candidate]:
    """Yield plans with one cut moved, with a replica moved, or with another number in flight."""
    ends = (*candidate.starts[1:], layers)
    for s in range(1, candidate.depth):
        for start in (candidate.starts[s] + move for move in MOVES):
            if candidate.starts[s - 1] < start < ends[s]:
                yield dataclasses.replace(candidate, starts=(*candidate.starts[:s], start, *candidate.starts[s + 1 :]))
    for source, target in itertools.permutations(range(candidate.depth), 2):
        replicas = tuple(count - (s == source) + (s == target) for s, count in enumerate(candidate.replicas))
        if min(replicas):
            yield dataclasses.replace(candidate, replicas=replicas)
    for extra in IN_FLIGHT if candidate.depth > 1 else ():
        yield candidate.with_options(extra_in_flight=extra)
