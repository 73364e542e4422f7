"""Measure the time of `find_plans` on one core, and of its closed forms alone, with and without a memory limit.

The layers are synthetic and all different: from the first to the last, weights grow and outputs shrink, as in convolutional networks.
"""

import sys
import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.planner.markdown import print_table
from jpipe_planner import Candidate, Profile, Topology, find_plans
from jpipe_planner.search.candidates import find_candidates

ETHERNET, NVLINK = 25e9 / 8, 30e9
SHARE = 0.7  # of the memory that the fastest plan takes: the limit of the runs with one
REPEATS = 3
STAGES: dict[str, Any] = {"exact": False, "schedules": ("pipedream",), "pipedream": "replicas"}  # each stage updates by itself


def main() -> list[dict[str, Any]]:
    """Measure, print and return the figures."""
    flat, servers = Topology.flat(16, ETHERNET), _servers(8, 2)
    searches = [
        ("40 layers, 16 devices", 0.02, "0.12 to 0.33 s", 40, flat, True),
        ("240 layers, 8 × 2 devices", 0.2, "59 s", 240, servers, True),
        ("1,500 layers, 16 devices", 1.0, "38 s", 1500, flat, False),
        ("500 layers, 16 × 8 × 8 devices", 10.0, "", 500, _servers(16, 8, 8), False),
    ]
    rows = []
    for what, goal, original, layers, topology, limited_too in searches:
        profile = invented(layers, topology)
        of_stages = partial(find_candidates, profile, batch=topology.num_devices**2, **STAGES)
        rows.append(_row(what, of_stages, topology, goal, original))
        if limited_too:
            rows.append(_row(f"{what}, memory limited", of_stages, limited(of_stages, topology)))
    sweep, cluster = partial(find_candidates, blocks(96), batch=16384, exact=False), _servers(8, 512)
    rows.append(_row("all schedules: 98 layers, 8 × 512 devices", sweep, cluster, goal=10.0))
    rows.append(_row("the same, memory limited", sweep, limited(sweep, cluster)))
    shown = [
        (what, f"{row['candidates']:.3f} s", f"{row['seconds']:.3f} s", f"{goal:g} s" if goal else "", row["original"])
        for row in rows
        for what, goal in [(row["what"], row["goal"])]
    ]
    print_table(("search", "candidates", "whole search", "goal", "the original program"), shown)
    return rows


def invented(count: int, topology: Topology) -> Profile:
    """Return a deterministic model of `layers` layers for which data parallelism communicates twice as long as it computes."""
    random, bandwidth = np.random.default_rng(0), topology.levels[-1].bandwidth
    seconds = random.uniform(0.2e-3, 5e-3, count)
    share = np.arange(count) / count
    weights = np.exp(5 * share + random.uniform(0, 3, count))
    weights = (weights * 3 * seconds.sum() * bandwidth / weights.sum()).astype(int)
    outputs = 8 * np.exp(-4 * share) * random.uniform(0.5, 1, count)  # times those that take as long as a stage
    outputs = (outputs * 3 * seconds.sum() / topology.num_devices * bandwidth).astype(int)
    layers = [
        {
            "id": f"layer {n}",
            "weights": size,
            "optimizer": size,
            "update": 1e-5,
            "at": [{"forward": time, "backward": 2 * time, "outputs": out, "residuals": {"none": 2 * out, "full": out}}],
        }
        for n, (time, out, size) in enumerate(zip(seconds.tolist(), outputs.tolist(), weights.tolist(), strict=True))
    ]
    return Profile(source="analytic", sizes=[1], inputs=[int(outputs[0])], labels=[0], layers=layers)


def limited(listed: partial[list[Candidate]], topology: Topology) -> Topology:
    """Return the same topology with less memory than the candidate with the best estimate takes."""
    memory = SHARE * max(listed(topology=topology)[0].memory)
    return topology.model_copy(update={"device": topology.device.model_copy(update={"memory": memory})})


def blocks(count: int) -> Profile:
    """Return a GPT of equal blocks between an embedding and a head, at five microbatch sizes."""
    sizes = (1, 2, 4, 8, 16)

    def layer(name: str, share: float, weights: int) -> dict[str, Any]:
        at = [
            {
                "forward": 1e-3 * share * rows,
                "backward": 2e-3 * share * rows,
                "outputs": 2_000_000 * rows,
                "residuals": {"none": int(60e6 * rows), "dots_saveable": int(20e6 * rows), "full": 2_000_000 * rows},
            }
            for rows in sizes
        ]
        return {"id": name, "weights": weights, "optimizer": 6 * weights, "update": 1e-4, "at": at}

    layers = [
        layer("embed", 0.01, 200_000_000),
        *(layer(f"block_{n}", 1.0, 90_000_000) for n in range(count)),
        layer("head", 4, 200_000_000),
    ]
    tokens = [2048 * rows for rows in sizes]
    return Profile(source="analytic", sizes=sizes, inputs=tokens, labels=tokens, layers=layers)


def _servers(*counts: int) -> Topology:
    """Return servers with NVLink inside and Ethernet between them, each outer level half as fast."""
    bandwidths = [NVLINK, *(ETHERNET / 2**k for k in range(len(counts) - 1))]
    return Topology(levels=[{"count": count, "bandwidth": bandwidth} for count, bandwidth in zip(counts, bandwidths, strict=True)])


def _row(what: str, listed: partial[list[Candidate]], topology: Topology, goal: float | None = None, original: str = "") -> dict[str, Any]:
    """Measure the CPU seconds to list candidates with their estimates, and those to find plans: the shortest of some runs.

    `listed` is `find_candidates` with its arguments except the topology.
    """
    print(f"… {what}", file=sys.stderr, flush=True)
    found = partial(find_plans, *listed.args, **listed.keywords)
    times: dict[str, list[float]] = {"candidates": [], "seconds": []}
    for _ in range(REPEATS):
        for key, run in (("candidates", listed), ("seconds", found)):
            start = time.process_time()
            run(topology=topology)
            times[key].append(time.process_time() - start)
    return {"what": what, **{key: min(each) for key, each in times.items()}, "goal": goal, "original": original}
