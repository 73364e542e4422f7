"""Bounds on the speed of a plan: no simulation of it in steady state is faster, and a bound takes much less time to compute.

Every port has to carry all messages and sums that go through it, one after the other. And every computation waits for what it needs: its
worker, the messages with their latencies, the sum for the weight version that it reads. The bounds ignore that messages wait for each
other, and with clipping the wait for the norm of the gradients. `rank_seconds`, `flush_seconds` and `port_seconds` hold for all plans, the
other bounds for plans with one stage on each rank, where a worker has the number of its rank.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, permutations
from math import lcm

import jpipe
from jpipe_planner.cost.shape import is_planned


def has_bounds(plan: jpipe.Plan) -> bool:
    """Return whether the bounds hold for a plan: it has one stage on each rank, and whole backwards."""
    return is_planned(plan.schedule) and plan.depth == len(plan.pipeline_ranks) and plan.split_backward == "joint"


def busy_seconds(
    plan: jpipe.Plan,
    costs: Sequence[jpipe.programs.StageCost],
    cores: float | None,
    link: jpipe.programs.Network,
    overlap: jpipe.programs.Overlap,
) -> float:
    """Return the seconds per batch for which the busiest worker is busy, or all workers compute on their shared cores if that is longer.

    A worker is busy with its computations, and with transfers and sums that do not overlap them. With a flush the stages before a worker's
    stage have to be filled and drained as well.
    """
    before = busiest = 0.0
    moves = [_transfer_seconds(plan, costs, s, link) if overlap == "none" else 0.0 for s in range(plan.depth - 1)]
    for s, (cost, replicas) in enumerate(zip(costs, plan.replicas, strict=True)):
        ring = () if overlap == "transfers and sums" else _ring(plan, s, link)
        updating = plan.updates_per_batch(s) * (cost.update + _sum_seconds(cost, plan.stages[s], ring))
        each = cost.forward + cost.backward + sum(moves[max(s - 1, 0) : s + 1])
        busiest = max(busiest, before + plan.microbatches / replicas * each + (0.0 if before else updating))
        if jpipe.schedules.SCHEDULES[plan.schedule].flushes:
            before += cost.forward + cost.backward
    return max(busiest, computing_seconds(plan, costs) / (cores or len(plan.workers)))


def rank_seconds(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], cores: float | None) -> float:
    """Return the seconds per batch for which the busiest rank computes, or all ranks on their shared cores if that is longer.

    With a flush and whole backwards the stages before the first stage of a rank have to be filled and drained as well. It holds for plans
    with several stages on a rank and with split backwards, too, and counts no transfers.
    """
    rules, busiest = jpipe.schedules.SCHEDULES[plan.schedule], 0.0
    is_whole = plan.split_backward == "joint" and (is_planned(plan.schedule) or not any(rules.splits(plan, s) for s in range(plan.depth)))
    fills = rules.flushes and is_whole
    for stages in plan.pipeline_ranks:
        compute = sum(plan.microbatches / plan.replicas[s] * (costs[s].forward + costs[s].backward) for s in stages)
        before = sum(costs[s].forward + costs[s].backward for s in range(min(stages))) if fills else 0.0
        busiest = max(busiest, compute + (before or sum(plan.updates_per_batch(s) * costs[s].update for s in stages)))
    return max(busiest, computing_seconds(plan, costs) / (cores or len(plan.rank_workers)))


def flush_seconds(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], link: jpipe.programs.Network) -> float:
    """Return the longest time between the first forwards of a stage in two batches of a plan that flushes; 0 without a flush.

    In between its rank does all computations up to the last one of the stage, then the gradients of the stage are summed and it updates.
    """
    rules, longest = jpipe.schedules.SCHEDULES[plan.schedule], 0.0
    for p, stages in enumerate(plan.pipeline_ranks if rules.flushes else ()):
        order = list(rules.computations(plan, p, 0, 0, 1))
        ends = list(accumulate(costs[stage].seconds(op) for op, stage, _ in order))
        for s in stages:
            places = [n for n, (_, stage, _) in enumerate(order) if stage == s]
            computes = ends[places[-1]] - (ends[places[0] - 1] if places[0] else 0.0)
            summed = _summed_after(costs[s], plan.stages[s], order[places[-1]][0], _ring(plan, s, link))
            longest = max(longest, computes + summed + plan.updates_per_batch(s) * costs[s].update)
    return longest


def _transfer_seconds(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], s: int, link: jpipe.programs.Network) -> float:
    """Return the least seconds in which an output of a stage and its gradient move to the next stage and back."""
    pairs = [(plan.worker(s, k), plan.worker(s + 1, k)) for k in range(lcm(*plan.replicas[s : s + 2]))]
    there = min(_message_seconds(costs[s].outputs, link(source, target)) for source, target in pairs)
    return there + min(_message_seconds(costs[s + 1].gradient, link(target, source)) for source, target in pairs)


def _message_seconds(size: int, link: jpipe.Link) -> float:
    return size / link.bandwidth + link.latency


def _sum_seconds(cost: jpipe.programs.StageCost, stage: jpipe.Stage, ring: Sequence[jpipe.Link], part: int = 0) -> float:
    """Return the seconds of a sum over a ring, of the gradients of a part of the stage and of later parts, to its end; 0 without a ring."""
    return _sending_seconds(cost, stage, ring, part) + (1 if cost.compressed_sums else 2) * _latency(ring) if ring else 0.0


def _sending_seconds(cost: jpipe.programs.StageCost, stage: jpipe.Stage, ring: Sequence[jpipe.Link], part: int = 0) -> float:
    """Return the seconds to send a sum around a ring: once what each replica compresses, otherwise shares and then their sums."""
    if cost.compressed_sums:
        return (len(ring) - 1) * sum(cost.compressed_sums[part:]) * _seconds_per_byte(ring)
    later = [cost.accumulators_of_part(n, stage) for n in range(part, len(stage.sum_parts))] if part else [cost.accumulators]
    return 2 * (len(ring) - 1) / len(ring) * sum(later) * _seconds_per_byte(ring)


def _seconds_per_byte(ring: Sequence[jpipe.Link]) -> float:
    return 1 / min(link.bandwidth for link in ring)


def _latency(ring: Sequence[jpipe.Link]) -> float:
    """Return the seconds that it takes once around a ring in addition to sending."""
    return (len(ring) - 1) * max(link.latency for link in ring)


def _summed_after(cost: jpipe.programs.StageCost, stage: jpipe.Stage, op: str, ring: Sequence[jpipe.Link]) -> float:
    """Return the least seconds from the end of the last backward of an update, which `op` ends, to the end of the sum of its gradients."""
    if not stage.sum_parts or not ring:
        return _sum_seconds(cost, stage, ring)
    later, longest = 0.0, 0.0  # the backwards of the later parts
    for part in reversed(range(len(stage.sum_parts))):
        longest = max(longest, _sum_seconds(cost, stage, ring, part) - later)
        later += cost.seconds_of_part(op, part, stage)
    return longest


def sum_speed(plan: jpipe.Plan, s: int, link: jpipe.programs.Network) -> tuple[float, float]:
    """Return the seconds for each byte of an uncompressed sum over the replicas of a stage, and the seconds that it takes in addition."""
    ring = _ring(plan, s, link)
    return (2 * (len(ring) - 1) / len(ring) * _seconds_per_byte(ring), 2 * _latency(ring)) if ring else (0.0, 0.0)


def computing_seconds(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost]) -> float:
    """Return the seconds per batch that all workers together compute."""
    seconds = 0.0
    for s, cost in enumerate(costs):
        seconds += plan.microbatches * (cost.forward + cost.backward) + plan.updates_per_batch(s) * plan.replicas[s] * cost.update
    return seconds


def port_seconds(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], link: jpipe.programs.Network) -> float:
    """Return the seconds per batch that the busiest port sends."""
    loads: defaultdict[Hashable, float] = defaultdict(float)
    for s in range(plan.depth - 1):
        pairs = lcm(*plan.replicas[s : s + 2])
        for k in range(pairs):
            ends = plan.rank_of[plan.worker(s, k)], plan.rank_of[plan.worker(s + 1, k)]
            if ends[0] == ends[1]:
                continue
            for source, target, size in ((*ends, costs[s].outputs), (*ends[::-1], costs[s + 1].gradient)):
                crossed = link(source, target)
                for port in crossed.ports:
                    loads[port] += plan.microbatches / pairs * size / crossed.bandwidth
    for s in range(plan.depth):
        ring = _ring(plan, s, link)
        seconds = plan.updates_per_batch(s) * _sending_seconds(costs[s], plan.stages[s], ring) if ring else 0.0
        for port in {port for crossed in ring for port in crossed.ports}:
            loads[port] += seconds
    for source, target, size in _exchange(plan, costs):
        crossed = link(plan.rank_of[source], plan.rank_of[target])
        for port in crossed.ports:
            loads[port] += size / crossed.bandwidth
    return max(loads.values(), default=0.0)


def _exchange(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost]) -> Iterator[tuple[int, int, int]]:
    """Yield the messages with gradients of shared parameters for each update: one replica sends to each worker of the other stages.

    Yields:
        Sender, receiver, bytes.
    """
    for group, stages in enumerate(jpipe.programs.shared_stages(costs)):
        for s, other in permutations(stages, 2):
            for replica, target in enumerate(plan.stage_workers[other]):
                yield plan.stage_workers[s][replica % plan.replicas[s]], target, costs[s].shared[group]


def _ring(plan: jpipe.Plan, s: int, link: jpipe.programs.Network) -> list[jpipe.Link]:
    """Return the links between neighbouring replicas of a stage that sum for each update; none for one replica, or if they agree."""
    workers = [plan.rank_of[worker] for worker in plan.stage_workers[s]]
    return [link(worker, workers[n - 1]) for n, worker in enumerate(workers)] if len(workers) > 1 and plan.agree is None else []


def unhindered_seconds(
    plan: jpipe.Plan,
    costs: Sequence[jpipe.programs.StageCost],
    link: jpipe.programs.Network,
    first: int,
    batches: int,
) -> float:
    """Return the seconds per batch if messages never wait for each other.

    Args:
        plan: the plan, without vertical sync.
        costs: the costs of its stages.
        link: the links between its ranks.
        first: the first batch to measure.
        batches: the number of batches to measure.
    """
    entries = _Pipeline(plan, costs, link, first + batches + 1).entries()
    return (entries[first + batches] - entries[first]) / batches


class _Stage:
    """A stage of a pipeline whose messages never wait for each other, and the known times of its microbatches."""

    def __init__(self, plan: jpipe.Plan, s: int, cost: jpipe.programs.StageCost, link: jpipe.programs.Network, batches: int) -> None:
        rules, count = jpipe.schedules.SCHEDULES[plan.schedule], batches * plan.microbatches
        self.forward, self.backward, self.update, self.replicas = cost.forward, cost.backward, cost.update, plan.replicas[s]
        self.workers, every = plan.stage_workers[s], plan.microbatches_per_update(s)
        self.sums = self.replicas > 1 and plan.agree is None
        self.microbatches_per_update = every // self.replicas  # microbatches per update at each replica
        # All replicas have the same order and versions, each for its own microbatches.
        order = rules.computations(plan, s, 0, 0, batches)
        self.order = [(op == "F", entry.microbatch // self.replicas) for entry in order for op in jpipe.ops.OPS[entry.op].pieces]
        self.versions = [rules.version(plan, s, k) for k in range(0, count, self.replicas)] if self.replicas > 1 else []
        self.arrived: list[float | None] = [None if s else 0.0] * count  # the inputs of each microbatch
        self.returned: list[float | None] = [None if s < plan.depth - 1 else 0.0] * count  # its output gradients
        self.summed = [0.0] * (count // every)
        self.missing = [self.replicas] * (count // every)
        self.summed_after = _summed_after(cost, plan.stages[s], "B", _ring(plan, s, link))
        self.forward_delays = self._delays(plan, s, s + 1, cost.outputs, link)
        self.backward_delays = self._delays(plan, s, s - 1, cost.gradient, link)

    @staticmethod
    def _delays(plan: jpipe.Plan, source: int, target: int, size: int, link: jpipe.programs.Network) -> list[float]:
        """Return the seconds of the messages to a neighbour, for one period of microbatches; empty without a neighbour."""
        if not 0 <= target < plan.depth:
            return []
        links = [link(plan.worker(source, k), plan.worker(target, k)) for k in range(lcm(plan.replicas[source], plan.replicas[target]))]
        return [_message_seconds(size, crossed) for crossed in links]


class _Worker:
    """The position of a replica in the order of its stage."""

    def __init__(self, stage: int, replica: int) -> None:
        self.stage, self.replica = stage, replica
        self.position = self.finished_batches = self.updates = 0  # in the order of the stage
        self.clock = 0.0


class _Pipeline:
    """A pipeline whose messages never wait for each other."""

    def __init__(self, plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], link: jpipe.programs.Network, batches: int) -> None:
        self.microbatches = plan.microbatches
        self.stages = [_Stage(plan, s, cost, link, batches) for s, cost in enumerate(costs)]
        self.workers = [_Worker(s, replica) for s, replica in plan.workers]
        self.ready = deque(range(len(self.workers)))
        self.batch_starts: list[float] = []

    def entries(self) -> list[float]:
        """Return when worker 0 begins each batch."""
        while self.ready:
            worker = self.workers[self.ready.popleft()]
            stage, s = self.stages[worker.stage], worker.stage
            while worker.position < len(stage.order) and self._step(worker, stage, s):
                worker.position += 1
        return self.batch_starts

    def _step(self, worker: _Worker, stage: _Stage, s: int) -> bool:
        """Do the next computation of a worker if the times of all its inputs are known, and wake the worker that waits for it."""
        is_forward, microbatch = stage.order[worker.position]
        k = microbatch * stage.replicas + worker.replica
        available = stage.arrived[k] if is_forward else stage.returned[k]
        if available is None:
            return False
        if stage.sums:
            needed_updates = max(stage.versions[microbatch] if is_forward else 0, worker.finished_batches - 1)  # at most one update waits
            while worker.updates < needed_updates:
                if stage.missing[worker.updates]:
                    return False
                worker.clock = max(worker.clock, stage.summed[worker.updates]) + stage.update
                worker.updates += 1
        begins = max(worker.clock, available)
        if is_forward:
            if s == 0 and worker.replica == 0 and k % self.microbatches == 0:
                self.batch_starts.append(begins)
            worker.clock = ends = begins + stage.forward
            if stage.forward_delays:
                after = self.stages[s + 1]
                after.arrived[k] = ends + stage.forward_delays[k % len(stage.forward_delays)]
                self.ready.append(after.workers[k % after.replicas])
            return True
        worker.clock = ends = begins + stage.backward
        if stage.backward_delays:
            before = self.stages[s - 1]
            before.returned[k] = ends + stage.backward_delays[k % len(stage.backward_delays)]
            self.ready.append(before.workers[k % before.replicas])
        if (microbatch + 1) % stage.microbatches_per_update == 0:
            self._end_batch(worker, stage, microbatch // stage.microbatches_per_update)
        return True

    def _end_batch(self, worker: _Worker, stage: _Stage, batch: int) -> None:
        """Update a worker that has the gradients of an update; the last of several replicas sums them first."""
        worker.finished_batches += 1
        if not stage.sums:
            worker.clock += stage.update
            return
        stage.summed[batch] = max(stage.summed[batch], worker.clock)
        stage.missing[batch] -= 1
        if not stage.missing[batch]:
            stage.summed[batch] += stage.summed_after
            self.ready.extend(stage.workers)
