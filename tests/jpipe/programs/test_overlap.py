"""Transfers and sums that do not overlap computations, by hand and against clocks that are moved instruction by instruction."""

import dataclasses
import json
import random

import pytest

from jpipe import Link, Plan, lower, simulate, to_perfetto
from jpipe.capabilities.agreement.program import SumChanges
from jpipe.capabilities.sums_in_parts.program import ComputePart
from jpipe.ops import OPS
from jpipe.programs import StageCost
from jpipe.programs._instructions import AllReduce, Compute, Send, Update
from jpipe.programs.prediction import Prediction
from tests.grid import parse_grid
from tests.jpipe.capabilities.sums_in_parts import part_summed

LINK = Link(bandwidth=2.0, latency=0.25)
PLANS = {
    "flush": Plan.even("abc", 3, "pipedream_flush", 4),
    "gpipe, replicas": Plan.even("ab", 2, "gpipe", 4, replicas=2),
    "pipedream, replicas": Plan.even("abc", 3, "pipedream", 4, replicas=[2, 1, 2]),
    "2BW, replicas": Plan.even("ab", 2, "pipedream_2bw", 4, replicas=2),
    "data parallelism in parts": Plan.even("abc", 1, "pipedream_flush", 4, replicas=2, sum_parts=3),
    "agreements that are applied late": Plan.even("ab", 2, "pipedream_flush", 4, replicas=2, agree={"every": 2, "delay": 1}),
    "interleaved": Plan.even("abcd", 4, "interleaved_1f1b", 4, chunks_per_rank=2),
    "split backward": Plan.even("abc", 3, "zb_h1", 4),
}


def costs_of(plan: Plan) -> list[StageCost]:
    last = plan.depth - 1
    sizes = [{"outputs": 3 * (s < last), "message": 3 * (s < last), "inputs": 3, "gradient": 3 * (s > 0)} for s in range(plan.depth)]
    times = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0, "update": 0.5, "accumulators": 4}
    return [StageCost(**times, **size, weights=4) for size in sizes]


def end_by_clocks(plan: Plan, batches: int) -> float:
    """Return when the last rank ends if each transfer and each sum occupies all ranks concerned; clocks move in the total order."""
    costs, rank_of, clocks, begun = costs_of(plan), plan.rank_of, [0.0] * len(plan.rank_workers), dict[object, list[int]]()
    for i in lower(plan, batches).instructions:
        s, _ = plan.workers[i.worker]
        if isinstance(i, Compute):
            stage = plan.stages[s]
            seconds = costs[s].seconds_of_part(i.op, i.part, stage) if isinstance(i, ComputePart) else costs[s].seconds(i.op)
            clocks[rank_of[i.worker]] += seconds
        elif isinstance(i, Update):
            clocks[rank_of[i.worker]] += 0.5
        elif isinstance(i, Send) and rank_of[i.worker] != rank_of[i.to]:
            both = rank_of[i.worker], rank_of[i.to]
            end = max(clocks[rank] for rank in both) + 3 / 2.0 + 0.25
            for rank in both:
                clocks[rank] = end
        elif isinstance(i, AllReduce | SumChanges):
            part = part_summed(plan, i)
            ranks = begun.setdefault((s, i.batch, part), [])
            ranks.append(rank_of[i.worker])
            size = 4 if part is None else costs[s].accumulators_of_part(part, plan.stages[s])
            if (count := len(ranks)) == plan.replicas[s]:
                end = max(clocks[rank] for rank in ranks) + 2 * (count - 1) / count * size / 2.0 + 2 * (count - 1) * 0.25
                for rank in ranks:
                    clocks[rank] = end
    return max(clocks)


def predict(plan: Plan, overlap: str, link: Link = LINK) -> Prediction:
    return simulate(lower(plan, 3), costs_of(plan), link, overlap)


@pytest.mark.parametrize("name", PLANS)
def test_without_overlap_every_transfer_and_sum_occupies_its_ranks(name):
    plan = PLANS[name]
    none, transfers, both = (predict(plan, overlap) for overlap in ("none", "transfers", "transfers and sums"))
    assert none.seconds == pytest.approx(end_by_clocks(plan, 3))
    assert both.seconds <= transfers.seconds <= none.seconds
    assert both.seconds < none.seconds
    assert (both.peak_bytes, both.moved_bytes) == (none.peak_bytes, none.moved_bytes)


def in_servers(source: int, target: int) -> Link:
    """Return a link between ranks of which two share the ports of a server."""
    return Link(bandwidth=2.0, latency=0.25, ports=(("out", source // 2), ("in", target // 2)))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("overlap", ["none", "transfers and sums"])
def test_how_the_instructions_of_ranks_are_interleaved_does_not_matter(name, overlap):
    program, costs = lower(PLANS[name], 3), costs_of(PLANS[name])
    rank_of, draw = program.plan.rank_of, random.Random(0)
    expected = simulate(program, costs, in_servers, overlap, brief=True)
    for _ in range(5):
        ranks = draw.sample([rank_of[i.worker] for i in program.instructions], len(program.instructions))
        following = {rank: iter([i for i in program.instructions if rank_of[i.worker] == rank]) for rank in set(ranks)}
        program = dataclasses.replace(program, instructions=tuple(next(following[rank]) for rank in ranks))
        assert simulate(program, costs, in_servers, overlap, brief=True) == expected


@pytest.mark.parametrize("name", ["flush", "gpipe, replicas", "pipedream, replicas", "2BW, replicas"])
def test_of_equal_messages_through_the_same_ports_the_one_that_is_made_first_is_sent_first(name):
    prediction = simulate(lower(PLANS[name], 3), costs_of(PLANS[name]), in_servers)
    times: dict[object, list[tuple[float, float]]] = {}
    for transfer in (one for one in prediction.transfers if one.what != "sum"):
        row = [(OPS[span.op], span) for span in prediction.timeline[transfer.ranks[0]] if span.microbatch == transfer.number]
        made = next(span.end for op, span in row if (op.begins if transfer.what == "activation" else op.gives_gradient))
        times.setdefault(in_servers(*transfer.ranks).ports, []).append((made, transfer.start))
    for made_and_started in times.values():
        starts = [start for _, start in sorted(made_and_started)]
        assert starts == sorted(starts)


def test_two_stages_by_hand():
    """A message takes one tick at both ranks; the input of rank 1's second microbatch waits until it has computed the first one."""
    plan = Plan.even("ab", 2, "pipedream_flush", 2)
    prediction = simulate(lower(plan, 1), costs_of(plan), Link(bandwidth=3.0), "none")
    assert prediction.grid(1.0).splitlines()[1:] == [
        "rank 0 | F0.0 .  F1.0 . . . .   B0.0 - .  . B1.0*  -",
        "rank 1 |    . . FB0.0 - - . . FB1.0* - -  .     .  .",
    ]


def test_only_sums_of_data_parallelism_by_hand():
    """Under 2BW the sum hides behind the next batch, if it overlaps: in the steady state a batch takes its computations and its update."""
    plan = Plan.even("a", 1, "pipedream_2bw", 2, replicas=2)
    seconds = {overlap: predict(plan, overlap).seconds for overlap in ("transfers", "transfers and sums")}
    each = 3 + 0.5  # a forward, a backward and an update
    summed = 4 / 2.0 + 2 * 0.25
    assert seconds == {"transfers": 3 * (each + summed), "transfers and sums": 3 * each + summed}


@pytest.mark.parametrize("overlap", ["none", "transfers and sums"])
def test_transfers_have_rows_of_their_own(overlap):
    """Messages take two ticks and a quarter, sums one and a half."""
    plan = PLANS["2BW, replicas"]
    prediction = predict(plan, overlap)
    grid = prediction.grid(transfers=True)
    assert parse_grid(grid) == parse_grid(prediction.grid())
    assert [line.partition("|")[0].strip() for line in grid.splitlines()[5:]] == [
        "0 to 2",
        "1 to 3",
        "2 to 0",
        "3 to 1",
        "sum 0,1",
        "sum 2,3",
    ]
    sums = [transfer for transfer in prediction.transfers if transfer.what == "sum"]
    assert sorted((transfer.ranks, transfer.number) for transfer in sums) == [((r, r + 1), batch) for r in (0, 2) for batch in range(3)]
    assert all(transfer.end - transfer.start == 4 / 2.0 and transfer.arrival - transfer.end == 2 * 0.25 for transfer in sums)
    sent = [
        sum(transfer.size for transfer in prediction.transfers if rank in transfer.ranks[: 1 + (transfer.what == "sum")])
        for rank in range(4)
    ]
    assert sent == list(prediction.moved_bytes)
    events = json.loads(to_perfetto({"predicted": prediction.timeline}, {"predicted": prediction.transfers}))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    shown = sorted((names[event["tid"]], event["name"], event["ts"] / 1e6) for event in events if event["ph"] == "X" and event["tid"] > 4)
    assert shown == sorted((transfer.row, transfer.label, transfer.start) for transfer in prediction.transfers)
