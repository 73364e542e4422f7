"""Find the fastest cuts for given replicas, and evaluate partitions: speed-up over data parallelism, bytes, simulation."""

import itertools
import math
from collections.abc import Callable
from typing import Literal

import jpipe
from benchmarks.papers.partition import Partition, Placed, Problem, cut_seconds, evaluate_partition, placed_seconds
from jpipe_planner import Device, Profile, Topology
from jpipe_planner.cost.price import all_reduce_seconds
from jpipe_planner.cost.simulated import Simulated, simulate_plan


def scaled(profile: Profile, seconds: float) -> Profile:
    """Return the same model with scaled times.

    Args:
        profile: with one microbatch size.
        seconds: the factor of all times.
    """
    layers = []
    for layer in profile.layers:
        (one,) = layer.at
        times = {"forward": one.forward * seconds, "backward": one.backward * seconds}
        layers.append(layer.model_copy(update={"update": layer.update * seconds, "at": (one.model_copy(update=times),)}))
    return profile.model_copy(update={"layers": tuple(layers)})


def rate(device: Device) -> float:
    """Return the FLOP/s that large matrix products reach in float32."""
    return device.flops["float32"] * device.efficiency


def problem_of(profile: Profile, topology: Topology, microbatches: int | Literal["replicas"] = "replicas") -> Problem:
    """Return the partition problem at the only microbatch size, without a limit of memory.

    Args:
        profile: with one microbatch size.
        topology: the devices.
        microbatches: between two updates of all stages; "replicas": each stage updates after one of each of its replicas, as in the paper.
    """
    costs: list[jpipe.programs.LayerCost] = list(profile.costs(profile.sizes[0]).values())
    return Problem(costs, topology, microbatches, inputs=profile.inputs[0], labels=profile.labels[0])


Seconds = Callable[[Problem, Placed], float]
"""Seconds per microbatch of a stage."""


def waiting(slower: float) -> Seconds:
    """Return a function that times a stage whose gradient sums start only after its computation, slowed down by a factor."""

    def seconds(problem: Problem, stage: Placed) -> float:
        layers = problem.layers[stage.start : stage.stop]
        link = problem.kind(stage).link
        summed = slower * float(all_reduce_seconds(sum(layer.summed for layer in layers), stage.replicas, link))
        return (sum(layer.forward + layer.backward + layer.update for layer in layers) + summed) / stage.replicas

    return seconds


def best_cuts(problem: Problem, replicas: tuple[int, ...], seconds_of: Seconds = placed_seconds) -> Partition | None:
    """Find the fastest stages with these replicas by dynamic programming over the cuts.

    Args:
        problem: the costs and the devices.
        replicas: of each stage.
        seconds_of: of a stage; by default its sums overlap with its computation.

    Returns:
        None if there are fewer layers than stages.
    """
    count, firsts = len(problem.layers), [0, *itertools.accumulate(replicas)]
    best: dict[int, tuple[float, tuple[Placed, ...]]] = {0: (0.0, ())}
    for s, copies in enumerate(replicas):
        last = s == len(replicas) - 1
        longer: dict[int, tuple[float, tuple[Placed, ...]]] = {}
        for start, (before, placed) in best.items():
            cut = 0.0
            if s:
                link = problem.ranges.kind(firsts[s - 1], firsts[s + 1] - 1).link
                cut = float(cut_seconds(problem.layers[start - 1].outputs, link))
            for stop in range(count if last else start + 1, count + 1):
                stage = Placed(start, stop, firsts[s], copies)
                seconds = max(before, cut, seconds_of(problem, stage)) if start < stop else math.inf
                if seconds < longer.get(stop, (math.inf, ()))[0]:
                    longer[stop] = seconds, (*placed, stage)
        best = longer
    return evaluate_partition(problem, best[count][1]) if count in best else None


def waiting_speed_up(problem: Problem, replicas: tuple[int, ...], slower: float = 1.0) -> float:
    """Divide the throughput of the fastest stages with these replicas by that of data parallelism, without overlapping sums.

    Args:
        problem: the costs and the devices.
        replicas: of each stage; there are as many layers.
        slower: how many times as long as on the link all sums take.
    """
    seconds = waiting(slower)
    fastest = best_cuts(problem, replicas, seconds)
    assert fastest is not None, f"too few layers for {replicas}"
    links = [problem.ranges.kind(one.first, after.first + after.replicas - 1).link for one, after in itertools.pairwise(fastest.stages)]
    cuts = [cut_seconds(problem.layers[one.stop - 1].outputs, link) for one, link in zip(fastest.stages, links, strict=False)]
    (whole,) = data_parallel(problem).stages
    return seconds(problem, whole) / max(*cuts, *(seconds(problem, stage) for stage in fastest.stages))


def slowness(problem: Problem, replicas: tuple[int, ...], speed_up: float) -> float | None:
    """Find by what factor all sums must be slower than the link for this `waiting_speed_up`, or None if no factor gives it.

    Args:
        problem: the costs and the devices.
        replicas: of each stage.
        speed_up: to be reached.
    """
    low, high = 0.0, 1.0
    while waiting_speed_up(problem, replicas, high) < speed_up:
        low, high = high, 2 * high
        if high > 1000:
            return None
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if waiting_speed_up(problem, replicas, middle) >= speed_up else (middle, high)
    return high


def data_parallel(problem: Problem) -> Partition:
    """Return the partition with all layers on every device."""
    return evaluate_partition(problem, [Placed(0, len(problem.layers), 0, problem.topology.num_devices)])


def configurations(devices: int, depth: int | None = None) -> list[tuple[int, ...]]:
    """Yield all ways to distribute the devices over at least two stages, as the replicas of each stage."""
    depths = range(2, devices + 1) if depth is None else (depth,)
    return [split for d in depths for split in itertools.product(range(1, devices + 1), repeat=d) if sum(split) == devices]


def best_pipeline(problem: Problem) -> Partition:
    """Find the fastest partition of at least two stages, by trying all replicas, which takes long for many devices."""
    partitions = [best_cuts(problem, replicas) for replicas in configurations(problem.topology.num_devices)]
    return min((one for one in partitions if one), key=lambda one: (one.seconds, len(one.stages)))


def least_bytes(problem: Problem, replicas: tuple[int, ...] | None = None) -> Partition:
    """Find the partition of at least two stages that sends the fewest bytes, by trying all cuts.

    Args:
        problem: the costs and the devices.
        replicas: of each stage; None: tries all, which takes too long for more than a few devices.
    """
    count = len(problem.layers)
    summed = [0, *itertools.accumulate(layer.summed for layer in problem.layers)]
    best: tuple[float, list[Placed]] = math.inf, []
    for split in configurations(problem.topology.num_devices) if replicas is None else [replicas]:
        firsts = (0, *itertools.accumulate(split))
        for cuts in itertools.combinations(range(1, count), len(split) - 1):
            ends = zip((0, *cuts), (*cuts, count), firsts, split, strict=False)
            placed = [Placed(start, stop, first, copies) for start, stop, first, copies in ends]
            sums = sum(2 * (one.replicas - 1) / one.replicas * (summed[one.stop] - summed[one.start]) for one in placed)
            sent = sums + sum(2 * problem.layers[cut - 1].outputs for cut in cuts)  # of a microbatch
            best = min(best, (sent, placed), key=lambda candidate: candidate[0])
    return evaluate_partition(problem, best[1])


def name_of(partition: Partition) -> str:
    """Format the replicas of each stage, such as `15-1`, or `straight` for several stages without replicas."""
    replicas = [stage.replicas for stage in partition.stages]
    return "straight" if len(replicas) > 1 and max(replicas) == 1 else "-".join(map(str, replicas))


def sum_share(problem: Problem) -> float:
    """Divide the seconds of summing all gradients over all devices by those of a microbatch's forward and backward."""
    devices = problem.topology.num_devices
    summed = all_reduce_seconds(sum(layer.summed for layer in problem.layers), devices, problem.ranges.kind(0, devices - 1).link)
    return float(summed) / sum(layer.forward + layer.backward for layer in problem.layers)


def bytes_per_sample(problem: Problem, partition: Partition, rows: int) -> float:
    """Return the bytes that all devices send per sample: outputs, their gradients, and sums of weight gradients."""
    plan, sent = partition.plan([str(n) for n in range(len(problem.layers))], problem), 0.0
    for stage in partition.stages:
        layers = problem.layers[stage.start : stage.stop]
        updates = plan.microbatches // problem.microbatches_per_update(stage.replicas)
        sent += updates * 2 * (stage.replicas - 1) * sum(layer.summed for layer in layers)
        sent += plan.microbatches * 2 * layers[-1].outputs if stage.stop < len(problem.layers) else 0
    return sent / (rows * plan.microbatches)


def simulate(profile: Profile, problem: Problem, partition: Partition, schedule: str = "pipedream", **options: int) -> Simulated:
    """Simulate a partition under a schedule.

    Args:
        profile: of the model.
        problem: which the partition solves.
        partition: the stages.
        schedule: another than `pipedream` takes as many microbatches a batch as the replicas can share evenly.
        **options: fields of the plan, such as `extra_in_flight`.
    """
    plan = partition.plan(profile.ids, problem)
    if schedule != plan.schedule:
        plan = jpipe.Plan(schedule=schedule, microbatches=plan.microbatches, stages=[stage.model_dump() for stage in plan.stages])
    if options:
        plan = jpipe.Plan(**{**plan.model_dump(), **options})
    result = simulate_plan(plan, profile.stage_costs(plan, profile.sizes[0]), problem.topology)
    assert result is not None, "too long to simulate"
    return result
