"""Measure the time of the searches on one core, with and without a memory limit.

The layers are synthetic and all different: from the first to the last, weights grow and outputs shrink, as in convolutional networks.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import jpipe
from benchmarks.planner.markdown import print_table
from jpipe_planner import Problem, Profile, Topology, search_parallel, search_pipedream

ETHERNET, NVLINK = 25e9 / 8, 30e9
SHARE = 0.7  # of the memory that the fastest plan takes: the limit of the runs with one
REPEATS = 3


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
        problem = invented(layers, topology)
        rows.append(_row(what, partial(search_pipedream, problem), goal=goal, original=original))
        if limited_too:  # half a minute and more for the larger ones
            rows.append(_row(f"{what}, memory limited", partial(search_pipedream, with_limit(problem))))
    gpt, cluster = blocks(96), _servers(8, 512)
    rows.append(_row("2BW sweep, all schedules: 98 layers, 8 × 512 devices", partial(search_parallel, gpt, cluster, 16384), goal=1.0))
    most = max(search_parallel(gpt, cluster, 16384)[0].memory)
    small = cluster.model_copy(update={"device": cluster.device.model_copy(update={"memory": SHARE * most})})
    rows.append(_row("the same, memory limited", partial(search_parallel, gpt, small, 16384)))
    shown = [(row["what"], f"{row['seconds']:.3f} s", f"{row['goal']:g} s" if row["goal"] else "", row["original"]) for row in rows]
    print_table(("search", "found", "goal", "the original program"), shown)
    return rows


def invented(count: int, topology: Topology) -> Problem:
    """Return a deterministic model of `layers` layers for which data parallelism communicates twice as long as it computes."""
    random, bandwidth = np.random.default_rng(0), topology.levels[-1].bandwidth
    seconds = random.uniform(0.2e-3, 5e-3, count)
    share = np.arange(count) / count
    weights = np.exp(5 * share + random.uniform(0, 3, count))
    weights = (weights * 3 * seconds.sum() * bandwidth / weights.sum()).astype(int)
    outputs = 8 * np.exp(-4 * share) * random.uniform(0.5, 1, count)  # times those that take as long as a stage
    outputs = (outputs * 3 * seconds.sum() / topology.num_devices * bandwidth).astype(int)
    layers = [
        jpipe.programs.LayerCost(
            time, 2 * time, outputs=out, weights=size, optimizer=size, residuals={"none": 2 * out, "full": out}, update=1e-5
        )
        for time, out, size in zip(seconds.tolist(), outputs.tolist(), weights.tolist(), strict=True)
    ]
    return Problem(layers, topology, inputs=int(outputs[0]), policies=("none", "full"))


def with_limit(problem: Problem) -> Problem:
    """Return the same topology with less memory than the fastest plan takes."""
    return dataclasses.replace(problem, memory=SHARE * max(search_pipedream(problem).memory))


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


def _row(what: str, find: Callable[[], Any], goal: float | None = None, original: str = "") -> dict[str, Any]:
    """Measure the shortest of some runs, to exclude the effect of other programs."""
    print(f"… {what}", file=sys.stderr, flush=True)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        find()
        times.append(time.perf_counter() - start)
    return {"what": what, "seconds": min(times), "goal": goal, "original": original}
