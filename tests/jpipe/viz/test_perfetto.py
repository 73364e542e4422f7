"""Traces for Perfetto follow its format and contain every span."""

import json
from collections import defaultdict

import pytest

import jpipe
from jpipe import Plan
from jpipe.programs import Span, StageCost

COSTS = [StageCost(forward=0.1 / (3 + s), backward=0.7 / (9 + s), update=0.01 / 7) for s in range(3)]  # no round number anywhere


SCHEDULES = sorted({*jpipe.schedules.SCHEDULES} - {"auto_zero_bubble"})


def timeline_of(schedule, costs=COSTS):
    """Simulate four batches of three microbatches on three ranks, or of four on two ranks of two stages for schedules with chunks."""
    if jpipe.schedules.SCHEDULES[schedule].layout == "straight" or not jpipe.schedules.SCHEDULES[schedule].flushes:
        program = jpipe.lower(Plan.even("abc", num_stages=3, schedule=schedule, microbatches=3), batches=4)
    else:
        program = jpipe.lower(Plan.even("abcd", num_stages=4, schedule=schedule, microbatches=4, chunks_per_rank=2), batches=4)
    return jpipe.simulate(program, [costs[s % 3] for s in range(program.plan.depth)]).timeline


def events_of(timelines, phases="X"):
    return [event for event in json.loads(jpipe.to_perfetto(timelines))["traceEvents"] if event["ph"] in phases]


def read_back(events):
    """Return the timelines of each process from the slices, with times in whole nanoseconds."""
    timelines = defaultdict(lambda: defaultdict(list))
    for event in events:
        row = timelines[event["pid"]][event["tid"]]
        start, end = round(event["ts"] * 1000), round(event["ts"] * 1000) + round(event["dur"] * 1000)
        if event["name"] == "update":
            k, chunk = event["args"]["after_microbatch"], event["args"]["chunk"]
            place = max(n for n, span in enumerate(row) if (span.microbatch, span.chunk) == (k, chunk))
            row[place] = row[place]._replace(updates=True, update_time=end - start, update_wait=start - row[place].end)
        else:
            microbatch, version = event["args"]["microbatch"], event["args"]["version"]
            chunk = event["args"]["chunk"]
            op = event["name"].removesuffix(f"/{chunk}" if chunk else "").removesuffix(f"{microbatch}.{version}")
            row.append(Span(op, microbatch, version, start, end, chunk=chunk))
    return [tuple(tuple(rows[tid]) for tid in sorted(rows)) for _, rows in sorted(timelines.items())]


def in_nanoseconds(timeline):
    def rounded(span):
        start, end, update, updated = (round(time * 1e9) for time in (span.start, span.end, span.update_start, span.update_end))
        waited = update - end if span.updates else 0
        return span._replace(start=start, end=end, update_wait=waited, update_time=updated - update)

    return tuple(tuple(map(rounded, spans)) for spans in timeline)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_span_is_found_again(schedule):
    predicted, measured = timeline_of(schedule), timeline_of(schedule, [StageCost(forward=0.3, backward=0.31)] * 3)
    assert read_back(events_of({"predicted": predicted, "measured": measured})) == [in_nanoseconds(predicted), in_nanoseconds(measured)]


def test_processes_and_threads_have_names_and_an_order():
    named = defaultdict(dict)
    for event in events_of({"predicted": timeline_of("gpipe"), "measured": timeline_of("gpipe")}, "M"):
        (value,) = event["args"].values()
        named[event["pid"], event.get("tid")][event["name"]] = value
    assert named[1, None] == {"process_name": "predicted", "process_sort_index": 1}
    assert named[2, None] == {"process_name": "measured", "process_sort_index": 2}
    for pid in (1, 2):
        assert [named[pid, tid]["thread_name"] for tid in (1, 2, 3)] == ["rank 0", "rank 1", "rank 2"]
        assert [named[pid, tid]["thread_sort_index"] for tid in (1, 2, 3)] == [0, 1, 2]
    assert len(named) == 8


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slices_follow_one_another_as_perfetto_reads_them(schedule):
    late = tuple(tuple(s._replace(start=s.start + 1 / 3e3, end=s.end + 1 / 3e3) for s in spans) for spans in timeline_of(schedule))
    free = defaultdict(int)
    events = events_of({"late": late})
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    for event in events:
        start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
        assert length >= 0
        assert start >= free[event["tid"]], "Perfetto drops slices that overlap"
        free[event["tid"]] = start + length


def test_arrows_follow_each_microbatch():
    timeline = timeline_of("pipedream_2bw")
    events = events_of({"predicted": timeline, "measured": timeline}, "stf")
    flows = defaultdict(list)
    for event in events:
        flows[event["id"]].append(event)
    assert len(flows) == 2 * 12  # two timelines of four batches of three microbatches
    starts = {(pid, w + 1, round(span.start * 1e9)) for pid in (1, 2) for w, spans in enumerate(timeline) for span in spans}
    for flow in flows.values():
        assert [event["ph"] for event in flow] == ["s", "t", "t", "t", "f"]
        assert [event["tid"] for event in flow] == [1, 2, 3, 2, 1]
        assert len({(event["pid"], event["name"], event["cat"]) for event in flow}) == 1
        assert {(event["pid"], event["tid"], round(event["ts"] * 1000)) for event in flow} <= starts
        assert flow[-1]["bp"] == "e"


def test_arrows_leave_out_backwards_for_weights():
    timeline = timeline_of("zb_h1")
    starts = {(rank + 1, round(span.start * 1e9)) for rank, spans in enumerate(timeline) for span in spans if span.op == "W"}
    assert starts
    assert not starts & {(event["tid"], round(event["ts"] * 1000)) for event in events_of({"a": timeline}, "stf")}


def test_a_microbatch_with_one_slice_has_no_arrow_and_a_trace_may_be_empty():
    assert events_of({"cut": ((Span("F", 7, 2, 0.0, 1.0),), ())}, "stf") == []
    assert json.loads(jpipe.to_perfetto({}))["traceEvents"] == []
