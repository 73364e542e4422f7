"""Bounds on the speed of a plan: no simulation of it in steady state is faster, and a bound takes much less time to compute.

Every port has to carry all messages and sums that go through it, one after the other. And every computation waits for what it needs: its
worker, the messages with their latencies, the sum for the weight version that it reads. The bound ignores that messages wait for each
other, and with clipping the wait for the norm of the gradients.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import permutations
from math import lcm

import jpipe
from jpipe_planner.cost.shape import is_planned


def has_bounds(plan: jpipe.Plan) -> bool:
    """Whether the bounds hold for a plan: one stage on each rank, and whole backwards."""
    return is_planned(plan.schedule) and plan.depth == len(plan.rank_stages) and plan.split_backward == "joint"


def busy_seconds(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], cores: float | None) -> float:
    """Seconds per batch for which the busiest worker computes, or all workers on their shared cores if that is longer.

    With a flush the stages before a worker's stage have to be filled and drained as well.
    """
    before = busiest = 0.0
    for s, (cost, replicas) in enumerate(zip(costs, plan.replicas, strict=True)):
        updates, own = plan.updates_per_batch(s), cost.forward + cost.backward
        busiest = max(busiest, before + plan.microbatches / replicas * own + (0.0 if before else updates * cost.update))
        before += own if jpipe.schedules.SCHEDULES[plan.schedule].flushes else 0.0
    return max(busiest, computing_seconds(plan, costs) / (cores or len(plan.workers)))


def computing_seconds(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost]) -> float:
    """Seconds per batch that all workers together compute."""
    seconds = 0.0
    for s, cost in enumerate(costs):
        seconds += plan.microbatches * (cost.forward + cost.backward) + plan.updates_per_batch(s) * plan.replicas[s] * cost.update
    return seconds


def port_seconds(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], link: jpipe.programs.Network) -> float:
    """Seconds per batch that the busiest port sends."""
    loads: defaultdict[Hashable, float] = defaultdict(float)
    for s in range(plan.depth - 1):
        pairs = lcm(*plan.replicas[s : s + 2])
        for k in range(pairs):
            ends = plan.worker(s, k), plan.worker(s + 1, k)
            for source, target, size in ((*ends, costs[s].outputs), (*ends[::-1], costs[s + 1].gradient)):
                crossed = link(source, target)
                for port in crossed.ports:
                    loads[port] += plan.microbatches / pairs * size / crossed.bandwidth
    for s in range(plan.depth):
        ring = _ring(plan, s, link)
        seconds = plan.updates_per_batch(s) * _sending(costs[s].accumulators, ring) if ring else 0.0
        for port in {port for crossed in ring for port in crossed.ports}:
            loads[port] += seconds
    for source, target, size in _exchange(plan, costs):
        crossed = link(source, target)
        for port in crossed.ports:
            loads[port] += size / crossed.bandwidth
    return max(loads.values(), default=0.0)


def _exchange(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost]) -> Iterator[tuple[int, int, int]]:
    """(sender, receiver, bytes) of the gradients of shared parameters for each update: one replica sends to each worker of other stages."""
    for group, stages in enumerate(jpipe.programs.shared_stages(costs)):
        for s, other in permutations(stages, 2):
            for replica, target in enumerate(plan.stage_workers[other]):
                yield plan.stage_workers[s][replica % plan.replicas[s]], target, costs[s].shared[group]


def _ring(plan: jpipe.Plan, s: int, link: jpipe.programs.Network) -> list[jpipe.Link]:
    """The links between neighbouring replicas of a stage; none for one replica."""
    workers = plan.stage_workers[s]
    return [link(worker, workers[n - 1]) for n, worker in enumerate(workers)] if len(workers) > 1 else []


def _sending(size: int, ring: Sequence[jpipe.Link]) -> float:
    """Seconds to send a sum."""
    return 2 * (len(ring) - 1) / len(ring) * size / min(link.bandwidth for link in ring)


def unhindered_seconds(
    plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], link: jpipe.programs.Network, first: int, batches: int
) -> float:
    """Seconds per batch if messages never wait for each other.

    Args:
        plan: the plan, without vertical sync.
        costs: the costs of its stages.
        link: the links between its workers.
        first: the first batch to measure.
        batches: how many batches to measure.
    """
    entries = _Pipeline(plan, costs, link, first + batches + 1).entries()
    return (entries[first + batches] - entries[first]) / batches


class _Stage:
    """A stage of a pipeline whose messages never wait for each other, and the known times of its microbatches."""

    def __init__(self, plan: jpipe.Plan, s: int, cost: jpipe.programs.StageCost, link: jpipe.programs.Network, batches: int) -> None:
        rules, count = jpipe.schedules.SCHEDULES[plan.schedule], batches * plan.microbatches
        self.forward, self.backward, self.update, self.replicas = cost.forward, cost.backward, cost.update, plan.replicas[s]
        self.workers, every = plan.stage_workers[s], plan.microbatches_per_update(s)
        self.own = every // self.replicas  # microbatches per update at each replica
        # All replicas have the same order and versions, each for its own microbatches.
        order = rules.computations(plan, s, 0, 0, batches)
        self.order = [(op == "F", entry.microbatch // self.replicas) for entry in order for op in jpipe.ops.OPS[entry.op].pieces]
        self.versions = [rules.version(plan, s, k) for k in range(0, count, self.replicas)] if self.replicas > 1 else []
        self.arrived: list[float | None] = [None if s else 0.0] * count  # the inputs of each microbatch
        self.returned: list[float | None] = [None if s < plan.depth - 1 else 0.0] * count  # its output gradients
        self.summed = [0.0] * (count // every)
        self.missing = [self.replicas] * (count // every)
        ring = _ring(plan, s, link)
        self.summing = _sending(cost.accumulators, ring) + 2 * (len(ring) - 1) * max(one.latency for one in ring) if ring else 0.0
        self.on = self._delays(plan, s, s + 1, cost.outputs, link)
        self.back = self._delays(plan, s, s - 1, cost.gradient, link)

    @staticmethod
    def _delays(plan: jpipe.Plan, source: int, target: int, size: int, link: jpipe.programs.Network) -> list[float]:
        """Seconds of the messages to a neighbour, for one period of microbatches; empty without a neighbour."""
        if not 0 <= target < plan.depth:
            return []
        links = [link(plan.worker(source, k), plan.worker(target, k)) for k in range(lcm(plan.replicas[source], plan.replicas[target]))]
        return [size / crossed.bandwidth + crossed.latency for crossed in links]


class _Worker:
    """The position of a replica in the order of its stage."""

    def __init__(self, stage: int, replica: int) -> None:
        self.stage, self.replica = stage, replica
        self.position = self.ended = self.updated = 0  # in the order; batches whose backwards are done; updates made
        self.clock = 0.0


class _Pipeline:
    """A pipeline whose messages never wait for each other."""

    def __init__(self, plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], link: jpipe.programs.Network, batches: int) -> None:
        self.microbatches = plan.microbatches
        self.stages = [_Stage(plan, s, cost, link, batches) for s, cost in enumerate(costs)]
        self.workers = [_Worker(s, replica) for s, replica in plan.workers]
        self.ready = deque(range(len(self.workers)))
        self.entered: list[float] = []

    def entries(self) -> list[float]:
        """When worker 0 begins each batch."""
        while self.ready:
            worker = self.workers[self.ready.popleft()]
            stage, s = self.stages[worker.stage], worker.stage
            while worker.position < len(stage.order) and self._step(worker, stage, s):
                worker.position += 1
        return self.entered

    def _step(self, worker: _Worker, stage: _Stage, s: int) -> bool:
        """Do the next computation of a worker, if the times of all its inputs are known; a new time wakes the worker that waits for it."""
        is_forward, own = stage.order[worker.position]
        k = own * stage.replicas + worker.replica
        there = stage.arrived[k] if is_forward else stage.returned[k]
        if there is None:
            return False
        if stage.replicas > 1:
            due = max(stage.versions[own] if is_forward else 0, worker.ended - 1)  # at most one update waits
            while worker.updated < due:
                if stage.missing[worker.updated]:
                    return False
                worker.clock = max(worker.clock, stage.summed[worker.updated]) + stage.update
                worker.updated += 1
        begins = max(worker.clock, there)
        if is_forward:
            if s == 0 and worker.replica == 0 and k % self.microbatches == 0:
                self.entered.append(begins)
            worker.clock = ends = begins + stage.forward
            if stage.on:
                after = self.stages[s + 1]
                after.arrived[k] = ends + stage.on[k % len(stage.on)]
                self.ready.append(after.workers[k % after.replicas])
            return True
        worker.clock = ends = begins + stage.backward
        if stage.back:
            before = self.stages[s - 1]
            before.returned[k] = ends + stage.back[k % len(stage.back)]
            self.ready.append(before.workers[k % before.replicas])
        if (own + 1) % stage.own == 0:
            self._end_batch(worker, stage, own // stage.own)
        return True

    def _end_batch(self, worker: _Worker, stage: _Stage, batch: int) -> None:
        """A worker has the gradients of an update: it updates, or the last of the replicas sums them."""
        worker.ended += 1
        if stage.replicas == 1:
            worker.clock += stage.update
            return
        stage.summed[batch] = max(stage.summed[batch], worker.clock)
        stage.missing[batch] -= 1
        if not stage.missing[batch]:
            stage.summed[batch] += stage.summing
            self.ready.extend(stage.workers)
