"""The simulator beside plain computations of times and of bytes, each in one function."""

import dataclasses
from collections import Counter

import pytest

from jpipe import Plan, lower, simulate
from jpipe.capabilities.sums_in_parts.program import ComputePart
from jpipe.ops import OPS
from jpipe.programs._costs import OVERLAPS
from jpipe.programs._instructions import AllReduce, Compute, Load, Receive, Release, Send, Update
from jpipe.programs._verify import versions_before
from jpipe.schedules import SCHEDULES
from tests.jpipe.capabilities.sums_in_parts import part_summed
from tests.jpipe.programs.test_batches import costs_of, in_servers, plan_of
from tests.jpipe.programs.test_traffic import PortByPort

ORDERED = {"order": ["F0.0 F0.1 I0.0 W0.0 B0.1", "F1.0 B1.0 F1.1 I1.1 W1.1"]}
PLANS = {f"{name}, {replicas}": plan_of(name, replicas) for name in SCHEDULES if name != "auto_zero_bubble" for replicas in (1, 2)} | {
    "order": Plan.even("ab", 2, "auto_zero_bubble", 2, **ORDERED),
    "pipedream, 4 2 1": Plan.even("abc", 3, "pipedream", 8, replicas=[4, 2, 1]),
    "pipedream, 1 2, replicas": Plan.even("ab", 2, "pipedream", 4, replicas=[1, 2], update_every="replicas"),
    "pipedream, vertical sync": Plan.even("ab", 2, "pipedream", 4, vertical_sync=True),
    "2BW, early, flush first": Plan.even("abc", 3, "pipedream_2bw", 8, replicas=2, split_backward="early", flush_first=1),
    "flush, early": Plan.even("abc", 3, "pipedream_flush", 4, split_backward="early", extra_in_flight=1),
    "2BW, parts": Plan.even("abcd", 2, "pipedream_2bw", 8, replicas=2, sum_parts=2),
    "flush, parts": Plan.even("abcd", 1, "pipedream_flush", 8, replicas=4, sum_parts=3),
}


def starts_of(program, costs, link):
    """Return the starts of the computations of each rank: all ranks go on as far as they can, then the next message or sum begins."""
    plan, ports = program.plan, PortByPort()
    queues = [[i for i in program.instructions if plan.rank_of[i.worker] == rank] for rank in range(len(plan.rank_workers))]
    clocks, starts, there, events, begun, now = [0.0] * len(queues), [[] for _ in queues], {}, [], {}, 0.0

    def needs(i):
        s = plan.workers[i.worker][0]
        if isinstance(i, Update) and plan.sums_gradients(s):
            return [(i.worker, part, i.batch) for part in [*range(len(plan.stages[s].sum_parts))] or [None]]
        if (
            not isinstance(i, Compute)
            or getattr(i, "part", 0)
            or OPS[i.op].reads == "stash"
            or s == (0 if OPS[i.op].begins else plan.depth - 1)
        ):
            return []
        return [(i.worker, "activation" if OPS[i.op].begins else "gradient", i.microbatch)]

    def execute(i):
        (s, _), rank = plan.workers[i.worker], plan.rank_of[i.worker]
        cost = costs[s]
        clocks[rank] = max(clocks[rank], *(there[key] for key in needs(i)), 0.0)
        match i:
            case Compute(op, worker, k, _):
                part = i.part if isinstance(i, ComputePart) else None
                starts[rank].append(clocks[rank])
                clocks[rank] += cost.seconds(op) if part is None else cost.seconds_of_part(op, part, plan.stages[s])
                made = ["activation"] * ("output" in OPS[op].leaves) + ["gradient"] * OPS[op].gives_gradient
                there.update({(worker, "made", message, k): clocks[rank] for message in made})
                there[worker, "made", part, k // plan.microbatches_per_update(s)] = clocks[rank]
            case Send(worker, k, message, to):
                made, ranks = there[worker, "made", message, k], [rank, plan.rank_of[to]]
                size = cost.outputs if message == "activation" else cost.gradient
                if rank == plan.rank_of[to]:
                    there[to, message, k] = made
                else:
                    events.append((made, (0, worker, to, message, k), [link(*ranks)], size, 1, [(to, message, k)]))
            case AllReduce(worker, batch):
                part = part_summed(plan, i)
                begun.setdefault((s, batch, part), []).append(clocks[rank] if part is None else there[worker, "made", part, batch])
                if len(begun[s, batch, part]) == (count := plan.replicas[s]):
                    ranks = [plan.rank_of[w] for w in plan.stage_workers[s]]
                    links = [link(one, ranks[n - 1]) for n, one in enumerate(ranks)]
                    size = cost.accumulators if part is None else cost.accumulators_of_part(part, plan.stages[s])
                    order = 1, s, "sum" if part is None else f"sum of part {part}", batch
                    keys = [(w, part, batch) for w in plan.stage_workers[s]]
                    events.append((max(begun[s, batch, part]), order, links, 2 * (count - 1) / count * size, 2 * (count - 1), keys))
            case Update():
                clocks[rank] += cost.update

    while any(queues):
        for queue in queues:
            while queue and all(key in there for key in needs(queue[0])):
                execute(queue.pop(0))
        if not events:
            break
        ready, _, links, size, latencies, keys = event = min(events, key=lambda event: (max(event[0], now), event[1]))
        events.remove(event)
        now, seconds = max(ready, now), size / links[0].bandwidth
        used = {port for one in links for port in one.ports}
        there.update(dict.fromkeys(keys, (ports.send(used, ready, seconds) if seconds else ready) + latencies * links[0].latency))
    return starts


def most_bytes(program, costs):
    """Return the most bytes that each rank holds, and its peak memory: one update in a batch, no sums in parts."""
    plan, flushes = program.plan, SCHEDULES[program.plan.schedule].flushes
    held, most, peak = ([Counter() for _ in plan.rank_workers], [0] * len(plan.rank_workers), [0] * len(plan.rank_workers))
    pending = {w: set() for w in range(len(plan.workers))}  # the updates whose gradients a worker has begun to add up

    def gradients(worker, size):
        held[plan.rank_of[worker]][worker, "gradients"] = size * max(len(pending[worker]), 1)

    for worker, (s, _) in enumerate(plan.workers):
        gradients(worker, costs[s].accumulators)
        held[plan.rank_of[worker]][worker, "always"] = costs[s].optimizer + costs[s].frozen + costs[s].state
        held[plan.rank_of[worker]] += Counter({(worker, "version", v): costs[s].trained for v in versions_before(plan, worker, 0)})
    for i in program.instructions:
        (s, _), rank, w = plan.workers[i.worker], plan.rank_of[i.worker], i.worker
        cost, arrays, last = costs[s], held[rank], s == plan.depth - 1
        most[rank] = max(most[rank], arrays.total())
        match i:
            case Load(data=data, microbatch=k):
                arrays[w, data, k] = getattr(cost, data)
            case Receive(message=message, microbatch=k):
                arrays[w, message, k] = cost.inputs if message == "activation" else cost.message
            case Send(message=message, microbatch=k):
                del arrays[w, "made", message, k]
            case Compute(op=name, microbatch=k):
                op = OPS[name]
                left = {kind: getattr(cost, kind) for kind in ("residuals", "stash", "gradient") if kind in op.leaves}
                output = cost.message if last else cost.outputs - cost.kept_outputs
                made = sum(left.values()) + (output if "output" in op.leaves else 0)
                peak[rank] = max(peak[rank], arrays.total() + made + cost.temporary)
                reads = {"inputs": ("inputs", "labels", "activation"), "residuals": ("residuals", "gradient"), "stash": ("stash",)}[
                    op.reads
                ]
                for kind in reads:
                    arrays.pop((w, kind, k), None)
                for kind, size in left.items():
                    arrays[(w, "made", kind, k) if kind == "gradient" else (w, kind, k)] = size
                if "output" in op.leaves:
                    arrays[(w, "gradient", k) if last else (w, "made", "activation", k)] = output
                most[rank] = max(most[rank], arrays.total())
                if op.finishes and program.separates_sums[s]:
                    pending[w].add(k // plan.microbatches_per_update(s))
                    gradients(w, cost.accumulators)
            case AllReduce():
                arrays[w, "mean of state"] = cost.state if flushes else 0
            case Update(batch=batch, retires=retires):
                arrays.pop((w, "mean of state"), None)
                arrays.pop((w, "version", retires), None)
                pending[w].discard(batch)
                gradients(w, cost.accumulators)
                arrays[w, "version", batch + 1] = cost.trained
            case Release(version=version):
                del arrays[w, "version", version]
        most[rank] = max(most[rank], arrays.total())
    return most, [max(pair) for pair in zip(most, peak, strict=True)]


@pytest.mark.parametrize("name", PLANS)
def test_times_and_bytes_are_those_of_a_plain_simulation(name):
    program, costs = lower(PLANS[name], 3), costs_of(PLANS[name])
    predicted = simulate(program, costs, in_servers)
    starts = starts_of(program, costs, in_servers)
    assert [[span.start for span in spans] for spans in predicted.timeline] == [pytest.approx(row, abs=1e-9) for row in starts]
    if PLANS[name].update_every == "batch" and not any(stage.sum_parts for stage in PLANS[name].stages):
        assert [list(predicted.held_bytes), list(predicted.peak_bytes)] == list(most_bytes(program, costs))


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_brief_simulation_leaves_out_memory_over_time_and_transfers_only(overlap):
    plan = plan_of("pipedream_2bw", 2, shard_optimizer=True)
    program, costs = lower(plan, 3), costs_of(plan)
    brief, full = (simulate(program, costs, in_servers, overlap, brief=is_brief) for is_brief in (True, False))
    assert full.transfers
    assert brief == dataclasses.replace(full, transfers=(), memory=((),) * len(full.memory))


def test_the_changes_of_an_agreement_under_way_count_in_a_part_in_which_it_neither_begins_nor_is_applied():
    plan = Plan.even("ab", 2, "pipedream_flush", 4, replicas=2, agree={"every": 4, "delay": 3})
    costs = costs_of(plan)
    first, later = (simulate(lower(plan, batch + 1, begin=batch, start=batch), costs).held_bytes for batch in (0, 5))
    assert later == tuple(size + costs[0].trained for size in first)
