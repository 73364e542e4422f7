"""The transfers and sums of a trace: those that a plan has, when they begin and end, and what several processes know of them."""

import itertools
import math
from collections import Counter
from concurrent.futures import Future
from unittest.mock import NonCallableMock

import jax
import numpy as np
import optax
import pytest

from jpipe import Pipeline, Plan, Tracer, lower, simulate, to_perfetto
from jpipe.capabilities.agreement.program import Agree, SumChanges
from jpipe.processes import Processes
from jpipe.programs import Transfer
from jpipe.programs._instructions import Compute, Receive, Send
from jpipe.runtime import Event, WorkerState, join_transfers
from jpipe.runtime._transport import PendingTransfer
from jpipe.runtime.state import WeightVersions
from jpipe.runtime.timing._transfer_times import Moved, TransferWatcher
from tests.grid import parse_grid
from tests.jpipe import models

M = 4
STACK = models.rich_stack()
PLANS = [
    {"num_stages": 3, "schedule": "pipedream_2bw"},
    {"num_stages": 3, "schedule": "gpipe", "replicas": [2, 1, 2]},
    {"num_stages": 2, "schedule": "pipedream_flush", "replicas": 2, "agree": {"every": 2}},
    {"num_stages": 2, "schedule": "pipedream_flush", "replicas": 2, "agree": {"every": 2, "delay": 1}},
    {"num_stages": 2, "schedule": "pipedream_flush", "replicas": 2, "agree": {"every": 2, "bits": 2}},
    {"num_stages": 3, "schedule": "pipedream_2bw", "offload": dict.fromkeys(("optimizer", "versions", "residuals"), "all")},
    {"num_stages": 2, "schedule": "gpipe", "replicas": [2, 1], "links": {"sums": "int8"}},
    {"num_stages": 1, "schedule": "pipedream_flush", "replicas": 2, "sum_parts": 2, "links": {"sums": "bfloat16"}},
]

UNPRICED = ("norm", "squares")  # of so few bytes that a prediction counts none


@pytest.mark.thinned(most=4)
@pytest.mark.parametrize("options", PLANS)
def test_a_trace_has_the_transfers_of_the_plan_and_they_end_before_they_are_used(options):
    plan = Plan.even(STACK.ids, microbatches=M, **options)
    pipe = Pipeline(STACK, plan, models.masked_squares, optax.sgd(1e-2, momentum=0.9), clip_global_norm=1.0)
    batches = models.masked_batches(3, M)
    state, tracer = pipe.init(jax.random.key(0), batches[0]), Tracer(plan)
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=tracer)
    pipe.drain(state, observe=tracer)
    trace, predicted = tracer.finish(), simulate(lower(plan, 3, global_norm=True), pipe.costs(batches[0])).transfers
    expected, found = (Counter(transfer[:3] for transfer in transfers) for transfers in (predicted, trace.transfers))
    assert not found - expected, "nothing that the plan has not"
    measured, priced = ({(*t[:3], t.size) for t in transfers if t.what not in UNPRICED} for transfers in (trace.transfers, predicted))
    assert measured <= priced
    changes = {key for key in expected if key[0] == "changes"}
    assert bool(changes) == (plan.agree is not None)
    assert changes <= set(found), "no array of an agreement is left for the watching thread, but a computation reads its result"
    moves = tracer._transfers.moved
    posted = {(move.what, tuple(w if w < 0 else plan.rank_of[w] for w in move.workers), move.number) for move in moves}
    assert posted == set(expected)
    moved = {transfer.what for transfer in trace.transfers if transfer.is_move}
    assert moved == {what for what, stages in plan.offload or () if stages}
    ends = {(span.op, rank, span.microbatch): span.end for rank, row in enumerate(trace.timeline) for span in row}
    updated = [[span.end + span.update_wait + span.update_time for span in row if span.updates] for row in trace.timeline]
    for transfer in trace.transfers:
        assert 0 <= transfer.start <= transfer.end == transfer.arrival  # equal where the end of what made it was noted after its arrival
        assert transfer.size > 0
        if transfer.what == "changes":
            assert transfer.start >= max(updated[rank][transfer.number] for rank in transfer.ranks)
        if transfer.what == "activation":
            assert transfer.start >= ends["F", transfer.ranks[0], transfer.number]
            assert transfer.end <= max(ends.get((op, transfer.ranks[1], transfer.number), 0.0) for op in ("F", "FB"))
    assert parse_grid(trace.grid(transfers=True)) == parse_grid(trace.grid())
    to_perfetto({"measured": trace.timeline}, {"measured": trace.transfers})


def test_a_message_ends_at_the_latest_with_the_next_one_of_its_thread():
    """A thread may note an arrival late; what a transfer thread moves arrives in order."""
    watcher = TransferWatcher(Plan.even("ab", 2, "gpipe", 3), 0.0)
    for number, arrived in enumerate((9.0, math.nan, 3.0)):
        moved = watcher._of(("activation", (0, 1), number))
        moved.posted, moved.arrived = float(number), arrived
    found = watcher.transfers({}, {})
    assert [(found[0].end, found[2].end), math.isnan(found[1].end)] == [(3.0, 3.0), True]


def test_changes_that_nobody_saw_arrive_end_where_their_result_is_read():
    plan, clock = Plan.even("ab", 1, "gpipe", 2, replicas=2, agree={"every": 2, "delay": 1}), itertools.count(1.0)
    watcher = TransferWatcher(plan, 0.0)
    watcher.now = lambda: next(clock)
    state = WorkerState(WeightVersions({0: {}}), (), {}, None, jax.random.key(0))
    instructions = [SumChanges(0, 0), SumChanges(1, 0), Agree(0, 1, 0), Agree(1, 1, 0), Compute("F", 0, 2, 2), Compute("F", 1, 3, 2)]
    for instruction in instructions:
        watcher.note(Event(instruction, None, state))
    watcher.close()
    updates, readers = [(w, "U", 0, 0) for w in range(2)], [(0, "F", 2, 0), (1, "F", 3, 0)]
    starts, ends = dict(zip(readers, (6.0, 5.0), strict=True)), dict(zip([*updates, *readers], (3.5, 4.0, 8.0, 8.0), strict=True))
    assert watcher.transfers(starts, ends) == (Transfer("changes", (0, 1), 0, 4.0, 5.0, 5.0, 0.0),)


def test_changes_that_are_never_read_stay_in_the_trace_where_the_end_of_an_update_was_noted_late():
    plan = Plan.even("ab", 1, "gpipe", 2, replicas=2, agree={"every": 2, "delay": 1})
    moved = Moved("changes", (0, 1), 0, [(0, "U", 0, 0)], lasts=True, posted=1.0, arrived=2.0)
    (transfer,) = join_transfers([moved.transfer(plan, {}, {(0, "U", 0, 0): 3.0})])
    assert transfer[:3] == ("changes", (0, 1), 0)
    assert 3.0 == transfer.start < transfer.end == pytest.approx(3.0)


class Done:
    """A message of another process, whose future the test completes."""

    def __init__(self):
        self.future = Future()
        self.pending = PendingTransfer(
            self.future, "words", (1,), NonCallableMock(spec=Processes), lambda: jax.ShapeDtypeStruct((3,), np.float32)
        )


def test_a_message_of_another_process_ends_when_its_thread_says_so():
    plan, message, clock = Plan.even("ab", 2, "gpipe", 1), Done(), iter((2.0, 5.0))
    watcher = TransferWatcher(plan, 0.0)
    watcher.now = lambda: next(clock)
    state = WorkerState(WeightVersions({0: {}}), (), {}, None, jax.random.key(0), {0: {"inputs": message.pending}})
    watcher.note(Event(Send(0, 0, "activation", 1), None, state))
    watcher.note(Event(Receive(1, 0, "activation", 0), None, state))
    assert [transfer[:3] for transfer in watcher.transfers({}, {})] == [("activation", (0, 1), 0)]
    assert math.isnan(watcher.transfers({}, {})[0].end)
    message.future.set_result(())
    watcher.close()
    assert watcher.transfers({}, {}) == (Transfer("activation", (0, 1), 0, 2.0, 5.0, 5.0, 12.0),)
    late, reader = {(0, "F", 0, 0): 3.0}, (1, "FB", 0, 0)
    assert watcher.transfers({}, late)[0].start == 3.0, "what is sent has to be computed"
    assert watcher.transfers({reader: 3.5}, {reader: 4.0})[0].end == 4.0, "what was read has arrived"
    watcher.moved[0].arrived = math.nan
    assert watcher.transfers({reader: 3.5}, {reader: 4.0})[0].end == 3.5, "else it ends at its first use"


def test_what_several_processes_know_is_put_together():
    def transfer(what, ranks, number, start, end, size=8.0):
        return Transfer(what, ranks, number, start, end, end, size)

    unknown = math.nan
    first = [
        transfer("activation", (0, 1), 0, 1.0, unknown, 0.0),
        transfer("activation", (0, 1), 1, 2.0, unknown, 0.0),
        transfer("sum", (0, 1), 0, 3.0, 9.0),
        transfer("sum", (0, 1), 0, 4.0, 10.0),
        transfer("gradient", (1, 0), 0, unknown, 7.0),
    ]
    second = [
        transfer("activation", (0, 1), 1, unknown, 6.0),
        transfer("activation", (0, 1), 0, unknown, 5.0),
        transfer("sum", (0, 1), 0, 8.0, 9.5),
        transfer("sum", (0, 1), 0, 8.5, 12.0),
    ]
    assert join_transfers(first, second) == (
        transfer("activation", (0, 1), 0, 1.0, 5.0),
        transfer("activation", (0, 1), 1, 5.0, 6.0),
        transfer("sum", (0, 1), 0, 8.0, 9.5),
        transfer("sum", (0, 1), 0, 9.5, 12.0),
    )
