"""The planner's results for table 1 of PipeDream (SOSP 2019), beside the paper's configurations and its own recurrence.

The models get analytic profiles for the device of cluster A, with the paper's microbatches. Each is searched with the paper's rule, an
update after one microbatch of each replica, and with jpipe's default, an update of all stages after four microbatches per device.
"""

from pathlib import Path
from typing import Any

import optax

import jpipe
from benchmarks.planner.markdown import print_table
from benchmarks.planner.models import Model, gnmt, resnet50, vgg16
from planner.machine.topology import Topology
from planner.profile.analyze import analyze
from planner.profile.profile import Profile
from planner.search.paper import search_paper
from planner.search.partition import Partition, Placed, Problem, evaluate
from planner.search.pipedream import search

MICROBATCHES = 4  # per device and update of all stages
Row = dict[str, Any]

CASES = {
    "VGG-16": {"4 × 4 A": "15-1", "2 × 8 B": "15-1", "16, 10 Gbit/s": "15-1", "16, 25 Gbit/s": "15-1", "4, 25 Gbit/s": "3-1"},
    "ResNet-50": {"4 × 4 A": "16", "2 × 8 B": "16"},
    "GNMT-8": {"1 × 4 A": "straight", "3 × 4 A": "straight", "2 × 8 B": "16"},
    "GNMT-16": {"1 × 4 A": "straight", "4 × 4 A": "straight", "2 × 8 B": "straight"},
}
"""Models, clusters, and the paper's configurations; on the flat links, those that come out of its program and published profiles."""


def main() -> list[Row]:
    """Profile, search, print, and give the figures."""
    clusters = topologies()
    device = clusters["4 × 4 A"].device
    rows = []
    for name, cases in CASES.items():
        model, size, optimizer = _models(name)
        profile = analyze(*model, optimizer, (size,), device, policies=())
        rows += [
            {"model": name, "rows": size, "cluster": where, "paper": paper, **compare(profile, clusters[where])}
            for where, paper in cases.items()
        ]
    print("\nTable 1; in brackets the throughput over that of data parallelism, by the same price\n")
    head = ("model", "cluster", "paper", "M_s = r_s", f"M = {MICROBATCHES} per device", "paper's stages", "recurrence: text", "code")
    keys = ("model", "cluster", "paper", "own", "uniform", "as_paper", "text", "code")
    print_table(head, [[row[key] if isinstance(row[key], str) else _cell(row[key]) for key in keys] for row in rows])
    return rows


def topologies() -> dict[str, Topology]:
    """The clusters of table 2, parts of them, and flat links."""
    a, b = (
        Topology.from_yaml((Path("configs/topologies") / f"cluster-{x}.yaml").read_text(encoding="utf-8"), f"cluster-{x}.yaml")
        for x in "ab"
    )
    server, between = a.levels
    three = between.model_copy(update={"count": 3})
    return {
        "4 × 4 A": a,
        "3 × 4 A": a.model_copy(update={"levels": (server, three)}),
        "1 × 4 A": a.model_copy(update={"levels": (server,)}),
        "2 × 8 B": b,
        "16, 10 Gbit/s": Topology.flat(16, 10e9 / 8),
        "16, 25 Gbit/s": Topology.flat(16, 25e9 / 8),
        "4, 25 Gbit/s": Topology.flat(4, 25e9 / 8),
    }


def compare(profile: Profile, topology: Topology) -> Row:
    """The results, and their speed compared with data parallelism.

    Args:
        profile: with one microbatch size.
        topology: without a limit of memory, as in the paper.

    Returns:
        "own" with the paper's updates, "uniform" with jpipe's, "text" and "code" of the paper's recurrence, each with its stages and its
        speed-up by the price of jpipe; "as_paper" one stage for all but the dense layers at the end, replicated, where there are some.
    """
    problem, uniform = (problem_of(profile, topology, m) for m in ("replicas", MICROBATCHES * topology.num_devices))
    row: Row = {"own": _found(problem, search(problem)), "uniform": _found(uniform, search(uniform))}
    row["as_paper"] = _found(problem, dense_apart(problem, profile)) if "fc6" in profile.ids else ""
    return row | {price: _found(problem, search_paper(problem, price)) for price in ("text", "code")}


def dense_apart(problem: Problem, profile: Profile) -> Partition:
    """The dense layers of VGG-16 on one device, all others share the rest: the paper's 15-1 and 3-1."""
    cut, devices = profile.ids.index("fc6"), problem.topology.num_devices
    return evaluate(problem, [Placed(0, cut, 0, devices - 1), Placed(cut, len(profile.ids), devices - 1, 1)])


def stages(partition: Partition) -> str:
    """`15-1`: the replicas of each stage."""
    return "-".join(str(stage.replicas) for stage in partition.stages)


def problem_of(profile: Profile, topology: Topology, microbatches: Any) -> Problem:
    """The search at the only microbatch size of a profile, memory not limited."""
    costs: list[jpipe.programs.LayerCost] = list(profile.costs(profile.sizes[0]).values())
    return Problem(costs, topology, microbatches, inputs=profile.inputs[0], labels=profile.labels[0])


def _found(problem: Problem, partition: Partition) -> Row:
    """Its stages, and its speed-up over data parallelism."""
    alone = [Placed(0, len(problem.layers), 0, problem.topology.num_devices)]
    seconds = evaluate(problem, partition.stages).seconds
    return {"stages": stages(partition), "speed_up": evaluate(problem, alone).seconds / seconds, "seconds": seconds}


def _cell(found: Row) -> str:
    return f"{found['stages']} ({found['speed_up']:.2f})"


def _models(name: str) -> tuple[Model, int, optax.GradientTransformation]:
    """A model of table 1 with the paper's microbatch and optimizer."""
    momentum, adam = optax.sgd(0.1, momentum=0.9), optax.adam(1e-3)
    if name.startswith("GNMT"):
        return gnmt(int(name.removeprefix("GNMT-"))), 64, adam
    return (vgg16(), 64, momentum) if name == "VGG-16" else (resnet50(), 128, momentum)
