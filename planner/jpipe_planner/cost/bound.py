"""Bounds on the speed of a plan: no simulation of it in steady state is faster, and a bound takes much less time to compute.

Every port has to carry all messages and sums that go through it, one after the other. And every computation waits for what it needs: its
worker, the messages with their latencies, the sum for the weight version that it reads. The bounds ignore that messages wait for each
other, and how long updates wait for other stages: for the norm of the gradients with clipping, and for gradients of shared parameters.
`rank_seconds`, `flush_seconds` and `port_seconds` hold for all plans, `order_seconds` for those that flush, the other bounds for plans with
one stage on each rank, where a worker has the number of its rank.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, chain, pairwise, permutations
from math import lcm
from typing import NamedTuple

import jpipe
from jpipe.schedules import PlainShape
from jpipe_planner.cost.shape import is_planned

_MOST_KEPT = 20_000  # forwards of a walk that is kept for other plans of its shape
_SAME = 1e-9  # relative difference of times that are equal but for rounding


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
    return _sending_seconds(cost, stage, ring, part) + (1 if cost.gathered else 2) * _latency(ring) if ring else 0.0


def _sending_seconds(cost: jpipe.programs.StageCost, stage: jpipe.Stage, ring: Sequence[jpipe.Link], part: int = 0) -> float:
    """Return the seconds to send a sum around a ring: once what each replica gives to all, otherwise shares and then their sums."""
    if cost.gathered:
        return (len(ring) - 1) * sum(cost.gathered[part:]) * _seconds_per_byte(ring)
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
    for group, stages in enumerate(jpipe.programs.uses_by_costs(costs).get("shared_parameters", ())):
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
    entries = _entries(plan, costs, link, first + batches + 1)
    return (entries[first + batches] - entries[first]) / batches


def order_seconds(
    plan: jpipe.Plan,
    costs: Sequence[jpipe.programs.StageCost],
    link: jpipe.programs.Network,
    first: int,
    batches: int,
    global_norm: bool = False,
) -> float:
    """Return the seconds per batch of a plan that flushes if messages never wait for each other, with any stages on its ranks.

    One of its pipelines is walked through, in the order of its schedule. Its sums begin once it has computed their gradients. A stage
    updates after its last gradients, or at the end of the batch if its update needs a sum, the norm, or gradients of other stages; the wait
    for other stages is not counted.

    Args:
        plan: the plan.
        costs: the costs of its stages.
        link: the links between its ranks.
        first: the first batch to measure.
        batches: the number of batches to measure.
        global_norm: whether updates wait for the norm of the gradients of all stages.

    Returns:
        The bound; 0 without a flush, or where stages differ in their replicas.
    """
    if not jpipe.schedules.SCHEDULES[plan.schedule].flushes or len(set(plan.replicas)) > 1:
        return 0.0
    steps = _steps(plan, costs, link)
    clocks, summed = [0.0] * len(plan.pipeline_ranks), [0.0] * plan.depth
    known, starts = [0.0] * (2 * plan.depth * plan.microbatches), list[float]()
    rings = [_ring(plan, s, link) for s in range(plan.depth)]
    sharing = set(chain.from_iterable(jpipe.programs.uses_by_costs(costs).get("shared_parameters", ())))
    at_end = {s for s in range(plan.depth) if rings[s] or global_norm or s in sharing}
    for _ in range(first + batches + 1):
        starts.append(clocks[0])
        before = [*clocks, *(summed[s] for s in at_end)]
        for step in steps:
            ends = max(clocks[step.rank], known[step.needs]) + step.seconds if step.needs >= 0 else clocks[step.rank] + step.seconds
            clocks[step.rank] = ends
            for place, delay in step.sends:
                known[place] = ends + delay
            if step.ends_batch:
                s = step.stage
                if s in at_end:
                    summed[s] = ends + _summed_after(costs[s], plan.stages[s], step.op, rings[s])
                else:
                    clocks[step.rank] += costs[s].update
        for p, stages in enumerate(plan.pipeline_ranks):
            late = [s for s in stages if s in at_end]
            updated = clocks[p] + sum(costs[s].update for s in late)
            clocks[p] = max(updated, *(summed[s] + costs[s].update for s in late)) if late else updated
        later = [now - then for now, then in zip([*clocks, *(summed[s] for s in at_end)], before, strict=True)]
        if max(later) - min(later) <= _SAME * max(later):  # so is everything in all following batches
            return later[0]
    return (starts[first + batches] - starts[first]) / batches


class _OrderStep(NamedTuple):
    """A computation of the walk through a batch.

    Attributes:
        rank: the pipeline rank.
        op, stage: what is computed.
        seconds: how long it takes.
        needs: the place of the message that it waits for; -1: none.
        sends: the places of the messages that it makes, and the seconds that they take.
        ends_batch: whether it is the last one that adds to the gradients of its stage.
    """

    rank: int
    op: str
    stage: int
    seconds: float
    needs: int
    sends: tuple[tuple[int, float], ...]
    ends_batch: bool


def _steps(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], link: jpipe.programs.Network) -> list[_OrderStep]:
    """Return the computations of the first pipeline in a batch, each after those that it needs."""
    rules, depth, count = jpipe.schedules.SCHEDULES[plan.schedule], plan.depth, plan.microbatches
    ranks = [plan.rank_of[workers[0]] for workers in plan.stage_workers]
    there = [0.0 if a == b else _message_seconds(costs[s].outputs, link(a, b)) for s, (a, b) in enumerate(pairwise(ranks))]
    back = [0.0 if a == b else _message_seconds(costs[s + 1].gradient, link(b, a)) for s, (a, b) in enumerate(pairwise(ranks))]
    orders = [list(rules.computations(plan, p, 0, 0, 1)) for p in range(len(plan.pipeline_ranks))]
    last = {(p, s): n for p, order in enumerate(orders) for n, (op, s, _) in enumerate(order) if jpipe.ops.OPS[op].finishes}
    steps, known, positions, waiting = list[_OrderStep](), set[int](), [0] * len(orders), dict[int, int]()
    ready = deque(range(len(orders)))
    while ready:
        p = ready.popleft()
        for n in range(positions[p], len(orders[p])):
            name, s, k = orders[p][n]
            op, sends = jpipe.ops.OPS[name], list[tuple[int, float]]()
            needs = s * count + k if op.reads == "inputs" and s > 0 else -1
            needs = (depth + s) * count + k if op.reads == "residuals" and s < depth - 1 else needs
            if needs >= 0 and needs not in known:
                waiting[needs] = p
                break
            if "output" in op.leaves and s < depth - 1:
                sends.append(((s + 1) * count + k, there[s]))
            if op.gives_gradient and s > 0:
                sends.append(((depth + s - 1) * count + k, back[s - 1]))
            steps.append(_OrderStep(p, name, s, costs[s].seconds(name), needs, tuple(sends), n == last[p, s]))
            known.update(place for place, _ in sends)
            ready.extend(waiting.pop(place) for place, _ in sends if place in waiting)
            positions[p] = n + 1
    return steps


_NOBODY: Sequence[int] = ()
_Step = tuple[int, int, int, bool, Sequence[int], bool, int, bool]


class _Walk:
    """The computations of a pipeline whose messages never wait for each other, each after those that it needs.

    They do not depend on how long anything takes, so that plans of one shape share them. Each step has its worker, stage and microbatch;
    whether it is a forward; the updates that its worker makes before, which wait for sums; whether worker 0 begins a batch with it; the
    update whose gradients its worker has with it, or -1; and whether all replicas have them then.
    """

    def __init__(self, shape: PlainShape, sums: Sequence[bool], batches: int) -> None:
        rules, self._shape, self._sums = jpipe.schedules.SCHEDULES[shape.schedule], shape, sums
        self.steps: list[_Step] = []
        self.counts = [batches * shape.microbatches // shape.microbatches_per_update(s) for s in range(shape.depth)]
        workers = [(s, replica) for s, count in enumerate(shape.replicas) for replica in range(count)]
        self._first = [0, *accumulate(shape.replicas)]
        # All replicas have the same order and versions, each for its own microbatches.
        self._orders = [
            [(op == "F", entry.microbatch // count) for entry in rules.computations(shape, s, 0, 0, batches) for op in _pieces(entry.op)]
            for s, count in enumerate(shape.replicas)
        ]
        number = batches * shape.microbatches
        self._versions = [
            [rules.version(shape, s, k) for k in range(0, number, count)] if sums[s] else [] for s, count in enumerate(shape.replicas)
        ]
        self._inputs = [[s == 0] * number for s in range(shape.depth)]
        self._gradients = [[s == shape.depth - 1] * number for s in range(shape.depth)]
        self._workers_of = [[(self._first[s] + j,) for j in range(count)] for s, count in enumerate(shape.replicas)]
        self._each = [shape.microbatches_per_update(s) // count for s, count in enumerate(shape.replicas)]
        self._missing = [[count] * self.counts[s] for s, count in enumerate(shape.replicas)]
        self._updates, self._finished, positions = [0] * len(workers), [0] * len(workers), [0] * len(workers)
        ready = deque(range(len(workers)))
        while ready:
            w = ready.popleft()
            s, replica = workers[w]
            order = self._orders[s]
            while positions[w] < len(order) and (woken := self._step(w, s, replica, *order[positions[w]])) is not None:
                positions[w] += 1
                ready.extend(woken)

    def _step(self, w: int, s: int, replica: int, is_forward: bool, microbatch: int) -> Sequence[int] | None:
        """Note a computation and return the workers that may wait for it; None if its inputs are not known."""
        shape, replicas = self._shape, self._shape.replicas
        k, known = microbatch * replicas[s] + replica, self._inputs if is_forward else self._gradients
        if not known[s][k]:
            return None
        first, needed = self._updates[w], 0
        if self._sums[s]:  # at most one update waits
            needed = max(self._versions[s][microbatch] if is_forward else 0, self._finished[w] - 1)
            while self._updates[w] < needed and not self._missing[s][self._updates[w]]:
                self._updates[w] += 1
            if self._updates[w] < needed:
                self._updates[w] = first
                return None
        to, woken, gradients, completes = s + 1 if is_forward else s - 1, _NOBODY, -1, False
        if 0 <= to < len(replicas):
            known[to][k] = True
            woken = self._workers_of[to][k % replicas[to]]
        if not is_forward and (microbatch + 1) % self._each[s] == 0:
            gradients = microbatch // self._each[s]
            self._finished[w] += 1
            self._missing[s][gradients] -= 1
            completes = not self._missing[s][gradients]
            woken = [*woken, *range(self._first[s], self._first[s + 1])] if completes and self._sums[s] else woken
        entered = is_forward and w == 0 and k % shape.microbatches == 0
        self.steps.append((w, s, k, is_forward, range(first, needed) if first < needed else (), entered, gradients, completes))
        return woken


@cache
def _pieces(op: str) -> tuple[str, ...]:
    return jpipe.ops.OPS[op].pieces


_known_walk = lru_cache(maxsize=16)(_Walk)


def _entries(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], link: jpipe.programs.Network, batches: int) -> list[float]:
    """Return when worker 0 begins each batch."""
    shape = PlainShape(plan.schedule, plan.microbatches, plan.replicas, plan.options)
    sums = tuple(map(plan.sums_gradients, range(plan.depth)))
    walk = (_known_walk if batches * plan.microbatches * plan.depth <= _MOST_KEPT else _Walk)(shape, sums, batches)
    clocks, starts, number = [0.0] * len(plan.workers), list[float](), batches * plan.microbatches
    arrived, returned = ([[0.0] * number for _ in costs] for _ in range(2))
    summed = [[0.0] * count for count in walk.counts]
    after = [_summed_after(cost, plan.stages[s], "B", _ring(plan, s, link)) for s, cost in enumerate(costs)]
    there = [_delays(plan, s, s + 1, cost.outputs, link) for s, cost in enumerate(costs)]
    back = [_delays(plan, s, s - 1, cost.gradient, link) for s, cost in enumerate(costs)]
    for w, s, k, is_forward, updates, entered, gradients, completes in walk.steps:
        cost, begins, available = costs[s], clocks[w], arrived[s][k] if is_forward else returned[s][k]
        for update in updates:
            begins = max(begins, summed[s][update]) + cost.update
        begins = max(begins, available)
        if is_forward:
            if entered:
                starts.append(begins)
            clocks[w] = ends = begins + cost.forward
            if delays := there[s]:
                arrived[s + 1][k] = ends + delays[k % len(delays)]
            continue
        clocks[w] = ends = begins + cost.backward
        if delays := back[s]:
            returned[s - 1][k] = ends + delays[k % len(delays)]
        if gradients >= 0 and not sums[s]:
            clocks[w] += cost.update
        elif gradients >= 0:
            summed[s][gradients] = max(summed[s][gradients], ends) + (after[s] if completes else 0.0)
    return starts


def _delays(plan: jpipe.Plan, source: int, target: int, size: int, link: jpipe.programs.Network) -> list[float]:
    """Return the seconds of the messages from a stage to a neighbour, for one period of microbatches; empty without a neighbour."""
    if not 0 <= target < plan.depth:
        return []
    links = [link(plan.worker(source, k), plan.worker(target, k)) for k in range(lcm(plan.replicas[source], plan.replicas[target]))]
    return [_message_seconds(size, crossed) for crossed in links]
