"""PipeDream (SOSP 2019): table 1, section 5.4 and figures 1 and 15 to 18, planned for the models of `configs/papers/`."""

import statistics
from collections.abc import Sequence

from benchmarks.papers import stages
from benchmarks.papers.document import Table
from benchmarks.papers.models import PIPEDREAM, pipedream_profile, servers, topology
from benchmarks.papers.partition import Partition, Problem, search_pipedream
from jpipe_planner import Profile, Topology

SHARED_PCIE = 10e9 / 4
"""Bytes per second of each of four GPUs that share the PCIe of `cluster-a.yaml`, as those of the paper do."""

PREPRINT_SERVERS = {"V100": ("cluster-a", 10e9 / 8)}
"""By GPU: the topology with its device, and the bytes per second of the network."""

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
DEPTHS = {("GNMT-16", "4 × 4 A"): 14, ("GNMT-16", "2 × 8 B"): 14, ("GNMT-8", "3 × 4 A"): 10}
"""Stages of the straight pipelines that PipeDream's published code has for that many GPUs; the other GPUs are idle."""


def machine(cluster: str, shared_pcie: bool = False) -> Topology:
    """Return the topology of a cluster, such as `4 × 4 A`: servers, GPUs in each of them, and the paper's letter.

    The preprint's servers have one V100 each (`8 × 1 V100`), joined by 10 Gbit/s.
    """
    count, _, _, letter = cluster.split(maxsplit=3)
    if letter == "C":
        return topology("cluster-c")
    if letter in PREPRINT_SERVERS:
        name, bandwidth = PREPRINT_SERVERS[letter]
        return Topology.flat(int(count), bandwidth).model_copy(update={"device": topology(name).device})
    return servers(f"cluster-{letter.lower()}", int(count), SHARED_PCIE if shared_pcie else None)


def profile_on(model: str, where: Topology, rows: int = 0) -> Profile:
    """Return the profile of Cluster-A's device with times scaled to the FLOP/s of the machine's device.

    Args:
        model: its name in the paper.
        where: the cluster.
        rows: of a microbatch; 0: as many as in the paper.
    """
    return stages.scaled(
        pipedream_profile(model, rows) if rows else pipedream_profile(model),
        stages.rate(topology("cluster-a").device) / stages.rate(where.device),
    )


def replicas_of(model: str, cluster: str, paper: str) -> tuple[int, ...]:
    """Return the replicas of each stage of the paper's configuration."""
    if paper == STRAIGHT:
        return (1,) * DEPTHS.get((model, cluster), machine(cluster).num_devices)
    return tuple(map(int, paper.split("-")))


def problem_on(model: str, where: Topology, rows: int = 0) -> Problem:
    """Return the search for stages of a model on a machine."""
    return stages.problem_of(profile_on(model, where, rows), where)


def table_1(models: Sequence[str] = ()) -> list[Table]:
    """Compare plans with the paper's, and derive from the paper's speed-ups the rate of its gradient sums.

    Args:
        models: only these; by default all.
    """
    head = ("model", "cluster", "paper", "planned", "the paper's stages", "DP: sum ÷ compute", "planned, PCIe shared", "the paper's stages")
    cases = [case for case in TABLE_1 if not models or case[0] in models]
    tables = [Table("table 1", head, [_row(*case) for case in cases])]
    if waits := [_sums_row(*case, rows) for case in cases if not case[2].isdecimal() for rows in ROWS.get(case[0], (0,))]:
        slow = ("model", "cluster", "paper", "sums overlap", "sums wait", "link", "rate for the paper's speed-up", "share of the link")
        tables.append(Table("table 1, sums", slow, waits))
    return tables


def _row(model: str, cluster: str, paper: str, speed_up: str) -> tuple[str, ...]:
    cells = [model, cluster, f"{paper} ({speed_up})"]
    for shared in (False, True) if cluster.endswith("A") else (False,):
        problem = problem_on(model, machine(cluster, shared))
        cells += [cell(problem, search_pipedream(problem)), cell(problem, stages.best_cuts(problem, replicas_of(model, cluster, paper)))]
        if not shared:
            cells.append(f"{stages.sum_share(problem):.2f}")
    return (*cells, *[""] * (8 - len(cells)))


def cell(problem: Problem, partition: Partition | None) -> str:
    """Format the stages, with their speed-up over data parallelism in brackets.

    Args:
        problem: the costs and the devices.
        partition: the stages; not None.
    """
    assert partition is not None, "fewer layers than stages"
    name = stages.name_of(partition)
    if name == STRAIGHT and partition.devices < problem.topology.num_devices:
        name += f", {len(partition.stages)} stages"
    return f"{name} ({stages.data_parallel(problem).seconds / partition.seconds:.2f})"


ROWS = {"AWD-LM": (80, 20)}
"""The rows of each GPU under data parallelism where the text leaves it open: 80, or 80 of four GPUs together."""


def _sums_row(model: str, cluster: str, paper: str, speed_up: str, rows: int) -> tuple[str, ...]:
    """Return the speed-up of the paper's stages with and without overlapping sums, and the rate of the sums that gives the paper's."""
    problem, replicas = problem_on(model, machine(cluster)), replicas_of(model, cluster, paper)
    fastest, devices = stages.best_cuts(problem, replicas), problem.topology.num_devices
    assert fastest is not None, "fewer layers than stages"
    often = PIPEDREAM[model].rows // rows if rows else 1  # how many sums data parallelism has in place of one
    share = stages.sum_share(problem)
    overlap = stages.data_parallel(problem).seconds / fastest.seconds * max(1.0, often * share) / max(1.0, share)
    waiting = stages.waiting_speed_up(problem, replicas, often)
    slower, link = stages.slowness(problem, replicas, float(speed_up)), problem.ranges.kind(0, devices - 1).link.bandwidth
    rates = (f"{often * link / slower / 1e9:.2f} GB/s", f"{often / slower:.0%}") if slower else ("none", "")
    name = f"{model}, {rows} rows a GPU" if rows else model
    return (name, cluster, f"{paper} ({speed_up})", f"{overlap:.2f}", f"{waiting:.2f}", f"{link / 1e9:.2f} GB/s", *rates)


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
    """Compare the bytes that all devices send per sample with the paper's claims."""
    head = ("model", "data parallelism", "fastest pipeline", "difference", "fewest bytes", "difference")
    head += ("the paper's stages", "fastest cuts", "fewest bytes", "paper")
    rows = []
    for model, (cluster, paper, says) in FIGURE_17.items():
        problem, size = problem_on(model, machine(cluster)), PIPEDREAM[model].rows
        alone = stages.bytes_per_sample(problem, stages.data_parallel(problem), size)
        cells = list[str]()
        for partition in (stages.best_pipeline(problem), stages.least_bytes(problem)):
            cells += [stages.name_of(partition), _difference(problem, partition)]
        cells += [paper, *_both(problem, replicas_of(model, cluster, paper))] if paper else ["", "", ""]
        rows.append((model, f"{alone / 1e6:.1f} MB", *cells, says))
    claims_head = ("model", "cluster", "stages", "rows of a GPU under data parallelism", "fastest cuts", "fewest bytes", "paper")
    return [Table("figure 17", head, rows), Table("figure 17, claims", claims_head, [_claim(*claim) for claim in CLAIMS])]


CLAIMS = (
    ("VGG-16", "1 × 4 A", "3-1", 64, 64, "more than 85% less"),
    ("VGG-16", "4 × 4 A", "15-1", 64, 64, "more than 85% less"),
    ("VGG-16", "8 × 1 V100", "7-1", 32, 32, "95% less (preprint)"),
    ("AWD-LM", "1 × 4 A", STRAIGHT, 80, 80, "88% less"),
    ("AWD-LM", "1 × 4 A", STRAIGHT, 20, 80, "88% less"),
    ("S2VT", "4 × 1 C", "2-1-1", 80, 80, "85% less; 95% less (preprint)"),
)
"""Model, cluster, stages, rows of each GPU under data parallelism, rows of a microbatch, and what the text says of the bytes."""


def _claim(model: str, cluster: str, paper: str, rows: int, microbatch: int, says: str) -> tuple[object, ...]:
    problem = problem_on(model, machine(cluster), microbatch)
    return model, cluster, paper, rows, *_both(problem, replicas_of(model, cluster, paper), microbatch // rows), says


def _both(problem: Problem, replicas: tuple[int, ...], more: int = 1) -> tuple[str, str]:
    """Return the differences of the fastest cuts and of those with the fewest bytes."""
    fastest = stages.best_cuts(problem, replicas)
    assert fastest is not None, "fewer layers than stages"
    return _difference(problem, fastest, more), _difference(problem, stages.least_bytes(problem, replicas), more)


def _difference(problem: Problem, partition: Partition, more: int = 1) -> str:
    """Compare the bytes per sample with those of data parallelism, which sums `more` times as often."""
    alone = more * stages.bytes_per_sample(problem, stages.data_parallel(problem), 1)
    return f"{stages.bytes_per_sample(problem, partition, 1) / alone - 1:+.0%}"


FIGURE_1 = ("AlexNet", "VGG-16", "ResNet-50", "GNMT-8", "GNMT-16", "AWD-LM")
SERVERS = {"8 × 1080Ti": ("gtx-1080ti-32", 4), "4 × V100, PCIe": ("cluster-a", 8), "8 × V100, NVLink": ("cluster-b", 4)}
"""By name: the topology, and how many servers have 32 GPUs."""


def figure_1() -> list[Table]:
    """Compute the share of time that data parallelism waits, from fully overlapping sums to sums after the computation."""
    columns = [(name, *cluster, count) for name, cluster in SERVERS.items() for count in (1, cluster[1])]
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


def _throughput(profile: Profile, problem: Problem, partition: Partition, schedule: str = "pipedream") -> float:
    """Simulate microbatches per second."""
    return partition.plan(profile.ids, problem).microbatches / stages.simulate(profile, problem, partition, schedule).batch_seconds


SECTION_5_4 = {"4 × 4 A": ("-55%", "-35%"), "2 × 8 B": ("-71%", "-42%")}
"""GPipe's throughput relative to PipeDream's in the paper, with NOAM microbatches and with as many as fit."""


def section_5_4() -> list[Table]:
    """Simulate GPipe beside PipeDream: GNMT-16 on 16 GPUs with the stages of table 1, and 1F1B with the same flushes."""
    rows = []
    for cluster, says in SECTION_5_4.items():
        profile, problem = profile_on("GNMT-16", where := machine(cluster)), problem_on("GNMT-16", where)
        straight = stages.best_cuts(problem, replicas_of("GNMT-16", cluster, STRAIGHT))
        assert straight is not None, "fewer layers than stages"
        alone = _throughput(profile, problem, straight)
        noam, most = len(straight.stages), _most_microbatches(profile, problem, straight)
        cells = list[str]()
        for m, paper in zip((noam, most), says, strict=True):
            flushing = [stages.simulate(profile, problem, straight, name, microbatches=m) for name in ("gpipe", "pipedream_flush")]
            cells += [str(m), *(f"{m / one.batch_seconds / alone - 1:+.0%}" for one in flushing), paper]
        rows.append((cluster, f"{noam} stages", f"{alone * PIPEDREAM['GNMT-16'].rows:.0f} samples/s", *cells))
    each = ("GPipe", "1F1B with a flush", "paper: GPipe")
    return [Table("section 5.4", ("cluster", "straight", "PipeDream", "NOAM", *each, "most that fit", *each), rows)]


def _most_microbatches(profile: Profile, problem: Problem, partition: Partition) -> int:
    """Return the most microbatches between two flushes of GPipe that fit into the memory of all devices."""
    limit, most = problem.topology.device.memory or 0.0, 1
    while max(stages.simulate(profile, problem, partition, "gpipe", microbatches=most + 1).peak_bytes) <= limit:
        most += 1
    return most


FIGURE_15 = ("16", "15-1", "14-2", "12-4", "8-8", "14-1-1", "12-3-1", "8-4-4", "4-4-4-4", STRAIGHT)
"""Replicas of the stages of VGG-16 on 16 GPUs."""


def figure_15() -> list[Table]:
    """Compare the predicted throughput of partitions of VGG-16 on 16 GPUs with the simulated one."""
    where = machine("4 × 4 A")
    profile, problem, size = profile_on("VGG-16", where), problem_on("VGG-16", where), PIPEDREAM["VGG-16"].rows
    pairs = dict[str, tuple[float, float]]()
    for name in FIGURE_15:
        partition = stages.best_cuts(problem, replicas_of("VGG-16", "4 × 4 A", name))
        assert partition is not None, "fewer layers than stages"
        pairs[name] = size / partition.seconds, size * _throughput(profile, problem, partition)
    rows = [(name, f"{one:.0f}", f"{other:.0f}", f"{other / one - 1:+z.0%}") for name, (one, other) in pairs.items()]
    predicted, simulated = zip(*pairs.values(), strict=True)
    rows.append(("correlation", "", "", f"{statistics.correlation(predicted, simulated):.3f}"))
    return [Table("figure 15", ("stages", "predicted: samples/s", "simulated: samples/s", "difference"), rows)]


def figure_16() -> list[Table]:
    """Simulate the peak memory of each of 4 GPUs under straight pipelines, and compare it with data parallelism."""
    where = machine("1 × 4 A")
    rows = []
    for model in ("VGG-16", "GNMT-8", "GNMT-16"):
        profile, problem = profile_on(model, where), problem_on(model, where)
        straight = stages.best_cuts(problem, (1, 1, 1, 1))
        assert straight is not None
        peaks = stages.simulate(profile, problem, straight).peak_bytes
        alone = max(stages.simulate(profile, problem, stages.data_parallel(problem)).peak_bytes)
        rows.append((model, *map(_gigabytes, peaks), _gigabytes(alone), f"{max(peaks) / alone:.2f}", "on par"))
    head = ("model", *(f"stage {n}" for n in range(4)), "data parallelism", "worst stage ÷ data parallelism", "paper")
    return [Table("figure 16", head, rows)]


def figure_18() -> list[Table]:
    """Simulate GNMT-8 as four stages on 4 GPUs: throughput and memory by the microbatches in flight at the first stage."""
    where = machine("1 × 4 A")
    profile, problem = profile_on("GNMT-8", where), problem_on("GNMT-8", where)
    straight = stages.best_cuts(problem, (1, 1, 1, 1))
    assert straight is not None
    rows = []
    for n in (1, 2, 3, 4, 7):
        run = stages.simulate(profile, problem, straight, **({"extra_in_flight": 1} if n == 7 else {"max_in_flight": n}))
        rows.append((n, f"{PIPEDREAM['GNMT-8'].rows / run.batch_seconds:.0f} samples/s", *map(_gigabytes, run.peak_bytes)))
    return [Table("figure 18", ("in flight", "throughput", *(f"stage {n}" for n in range(4))), rows)]


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
