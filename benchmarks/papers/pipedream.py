"""PipeDream (SOSP 2019): table 1 and figures 1, 12, 14, 16, 17 and 18, planned from the models of `configs/papers/`."""

from collections.abc import Sequence

from benchmarks.papers import stages
from benchmarks.papers.document import Table
from benchmarks.papers.models import PIPEDREAM, pipedream_profile, servers, topology
from planner.machine.topology import Topology
from planner.profile.profile import Profile
from planner.search.partition import Partition, Problem
from planner.search.pipedream import search

SHARED_PCIE = 10e9 / 4
"""Bytes per second of each of four GPUs that share the PCIe of `cluster-a.yaml`, as those of the paper do."""

STRAIGHT = "straight"
TABLE_1: tuple[tuple[str, str, str, str], ...] = (
    ("VGG-16", "4 × 4 A", "15-1", "5.28"),
    ("VGG-16", "2 × 8 B", "15-1", "2.98"),
    ("ResNet-50", "4 × 4 A", "16", "1"),
    ("ResNet-50", "2 × 8 B", "16", "1"),
    ("AlexNet", "4 × 4 A", "15-1", "4.92"),
    ("AlexNet", "2 × 8 B", "15-1", "2.04"),
    ("GNMT-16", "1 × 4 A", STRAIGHT, "1.46"),
    ("GNMT-16", "4 × 4 A", STRAIGHT, "2.34"),
    ("GNMT-16", "2 × 8 B", STRAIGHT, "3.14"),
    ("GNMT-8", "1 × 4 A", STRAIGHT, "1.5"),
    ("GNMT-8", "3 × 4 A", STRAIGHT, "2.95"),
    ("GNMT-8", "2 × 8 B", "16", "1"),
    ("AWD-LM", "1 × 4 A", STRAIGHT, "4.25"),
    ("S2VT", "4 × 1 C", "2-1-1", "3.01"),
)
"""Model, cluster, the paper's configuration, and its speed-up over data parallelism in the time of an epoch."""


def machine(cluster: str, shared_pcie: bool = False) -> Topology:
    """`4 × 4 A`: servers, GPUs in each of them, and the paper's letter."""
    count, _, _, letter = cluster.split()
    if letter == "C":
        return topology("cluster-c")
    return servers(f"cluster-{letter.lower()}", int(count), SHARED_PCIE if shared_pcie else None)


def profile_on(model: str, where: Topology) -> Profile:
    """The profile of Cluster-A's device, with times by the FLOP/s of the device that is there."""
    return stages.scaled(pipedream_profile(model), stages.rate(topology("cluster-a").device) / stages.rate(where.device))


def table_1(models: Sequence[str] = ()) -> list[Table]:
    """The plans beside the paper's.

    Args:
        models: only these; by default all.
    """
    head = ("model", "cluster", "paper", "planned", "the paper's stages", "DP: sum ÷ compute", "planned, PCIe shared", "the paper's stages")
    rows = [_row(*case) for case in TABLE_1 if not models or case[0] in models]
    return [Table("table 1", head, rows)]


def _row(model: str, cluster: str, paper: str, speed_up: str) -> tuple[str, ...]:
    cells = [model, cluster, f"{paper} ({speed_up})"]
    for shared in (False, True) if cluster.endswith("A") else (False,):
        where = machine(cluster, shared)
        problem = stages.problem_of(profile_on(model, where), where)
        count = where.num_devices
        replicas = (1,) * count if paper == STRAIGHT else tuple(map(int, paper.split("-")))
        cells += [_cell(problem, search(problem)), _cell(problem, stages.best_cuts(problem, replicas))]
        if not shared:
            cells.append(f"{stages.sum_share(problem):.2f}")
    return (*cells, *[""] * (8 - len(cells)))


def _cell(problem: Problem, found: Partition | None) -> str:
    """Its stages, and in brackets its speed-up."""
    if found is None:
        return f"{len(problem.layers)} layers are too few"
    return f"{stages.name_of(found)} ({stages.data_parallel(problem).seconds / found.seconds:.2f})"


FIGURE_17 = {
    "VGG-16": ("1 × 4 A", "3-1", "more than 85% less"),
    "GNMT-8": ("1 × 4 A", STRAIGHT, "far less"),
    "GNMT-16": ("1 × 4 A", STRAIGHT, "far less"),
    "ResNet-50": ("1 × 4 A", "", "more"),
    "AWD-LM": ("1 × 4 A", STRAIGHT, "88% less"),
    "S2VT": ("4 × 1 C", "2-1-1", "85% less"),
}
"""The cluster, the paper's configuration where it names one, and what the text says of the bytes."""


def figure_17() -> list[Table]:
    """Bytes that all devices send for a sample."""
    head = (
        "model",
        "data parallelism",
        "fastest pipeline",
        "difference",
        "fewest bytes",
        "difference",
        "the paper's stages",
        "difference",
        "paper",
    )
    rows = []
    for model, (cluster, paper, says) in FIGURE_17.items():
        problem = stages.problem_of(profile_on(model, machine(cluster)), machine(cluster))
        size = PIPEDREAM[model].rows
        alone = stages.bytes_per_sample(problem, stages.data_parallel(problem), size)
        kinds: list[Partition | None] = [stages.best_pipeline(problem), stages.least_bytes(problem)]
        kinds += [stages.best_cuts(problem, (1, 1, 1, 1) if paper == STRAIGHT else tuple(map(int, paper.split("-"))))] if paper else []
        cells = list[str]()
        for found in kinds:
            assert found is not None
            cells += [stages.name_of(found), f"{stages.bytes_per_sample(problem, found, size) / alone - 1:+.0%}"]
        rows.append((model, f"{alone / 1e6:.1f} MB", *cells, *[""] * (6 - len(cells)), says))
    return [Table("figure 17", head, rows)]


FIGURE_1 = ("AlexNet", "VGG-16", "ResNet-50", "GNMT-8", "GNMT-16", "AWD-LM")
SERVERS = {"8 × 1080Ti": ("gtx-1080ti-32", 4), "4 × V100, PCIe": ("cluster-a", 8), "8 × V100, NVLink": ("cluster-b", 4)}
"""By name: the topology, and how many servers have 32 GPUs."""


def figure_1() -> list[Table]:
    """Which share of its time data parallelism waits: from sums that overlap fully to sums after the computation."""
    columns = [(name, *found, count) for name, found in SERVERS.items() for count in (1, found[1])]
    head = ("model", *(f"{name}, {_gpus(cluster, count)} GPUs" for name, cluster, _, count in columns))
    rows = []
    for model in FIGURE_1:
        waits = [_waits(profile_on(model, where := servers(cluster, count)), where) for _, cluster, _, count in columns]
        rows.append((model, *waits))
    return [Table("figure 1", head, rows)]


def _gpus(cluster: str, count: int) -> int:
    return servers(cluster, count).num_devices


def _waits(profile: Profile, where: Topology) -> str:
    share = stages.sum_share(stages.problem_of(profile, where))
    return f"{max(1 - 1 / share, 0):.0%} to {share / (1 + share):.0%}"


def figure_12() -> list[Table]:
    """The same for GNMT-8 on servers of 8 V100 over NVLink, in float32 and float16."""
    halves = topology("v100-16gb-8").device
    rows = []
    for count in (1, 2, 4):
        where = servers("cluster-b", count)
        full = profile_on("GNMT-8", where)
        half = stages.scaled(full, stages.rate(where.device) / stages.rate(halves, "float16"), 0.5)
        rows.append((where.num_devices, _waits(full, where), _waits(half, where)))
    return [Table("figure 12", ("GPUs", "float32", "float16"), rows)]


FIGURE_14 = {"VGG-16": "14.9", "AlexNet": "6.5", "GNMT-8": "2 or more", "GNMT-16": "2 or more"}
"""The paper's speed-up of PipeDream over model parallelism."""


def figure_14() -> list[Table]:
    """Throughput over that of model parallelism without pipelining, on 4 GPUs of Cluster-A, simulated."""
    where = machine("1 × 4 A")
    a, b = [], []
    for model, says in FIGURE_14.items():
        profile = profile_on(model, where)
        problem = stages.problem_of(profile, where)
        straight, best = stages.best_cuts(problem, (1, 1, 1, 1)), stages.best_pipeline(problem)
        assert straight is not None
        alone = _throughput(profile, problem, straight, "naive")
        piped, replicated = (_throughput(profile, problem, one) for one in (straight, best))
        whole = _throughput(profile, problem, stages.data_parallel(problem))
        cells = [f"{rate / alone:.1f}" for rate in (piped, replicated, whole)]
        a.append((model, cells[0], stages.name_of(best), cells[1], cells[2], "2 or more", says))
        hybrid = stages.best_cuts(problem, (2, 2))
        assert hybrid is not None
        gains = [_throughput(profile, problem, one) / _throughput(profile, problem, one, "naive") - 1 for one in (hybrid, best)]
        b.append((model, f"{gains[0]:+.0%}", stages.name_of(best), f"{gains[1]:+.0%}", "up to +80%"))
    head = ("model", "straight, pipelined", "fastest pipeline", "its speed-up", "data parallelism", "paper: straight", "paper: PipeDream")
    hybrid_head = ("model", "2-2: pipelining gains", "fastest pipeline", "pipelining gains", "paper")
    return [Table("figure 14a", head, a), Table("figure 14b", hybrid_head, b)]


def _throughput(profile: Profile, problem: Problem, partition: Partition, schedule: str = "pipedream") -> float:
    """Microbatches per second, simulated."""
    return partition.plan(profile.ids, problem).microbatches / stages.simulate(profile, problem, partition, schedule).batch_seconds


def figure_16() -> list[Table]:
    """Peak memory of each of 4 GPUs under straight pipelines, simulated, beside that of data parallelism."""
    where = machine("1 × 4 A")
    rows = []
    for model in ("VGG-16", "GNMT-8", "GNMT-16"):
        profile = profile_on(model, where)
        problem = stages.problem_of(profile, where)
        straight = stages.best_cuts(problem, (1, 1, 1, 1))
        assert straight is not None
        peaks = stages.simulate(profile, problem, straight).peak_bytes
        alone = max(stages.simulate(profile, problem, stages.data_parallel(problem)).peak_bytes)
        rows.append((model, *map(_gigabytes, peaks), _gigabytes(alone), f"{max(peaks) / alone:.2f}", "on par"))
    head = ("model", *(f"stage {n}" for n in range(4)), "data parallelism", "worst stage ÷ data parallelism", "paper")
    return [Table("figure 16", head, rows)]


def figure_18() -> list[Table]:
    """GNMT-8 as four stages on 4 GPUs: throughput and memory by the microbatches in flight at the first stage."""
    where = machine("1 × 4 A")
    profile = profile_on("GNMT-8", where)
    problem = stages.problem_of(profile, where)
    straight = stages.best_cuts(problem, (1, 1, 1, 1))
    assert straight is not None
    runs = {1: stages.simulate(profile, problem, straight, "naive")}
    runs |= {4 + 3 * extra: stages.simulate(profile, problem, straight, extra=extra) for extra in (0, 1)}
    size = PIPEDREAM["GNMT-8"].rows
    rows = [(n, f"{size / run.batch_seconds:.0f} samples/s", *map(_gigabytes, run.peak_bytes)) for n, run in runs.items()]
    return [Table("figure 18", ("in flight", "throughput", *(f"stage {n}" for n in range(4))), rows)]


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
