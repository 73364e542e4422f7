"""Timelines as a file for ui.perfetto.dev, in the trace-event JSON of chrome://tracing."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from jpipe.errors import InputError, short
from jpipe.ops import OPS
from jpipe.programs._timeline import Span, Timeline, cell_of
from jpipe.programs._transfers import Transfer, in_rows

_Event = dict[str, Any]


def to_perfetto(timelines: Mapping[str, Timeline], transfers: Mapping[str, Sequence[Transfer]] | None = None) -> str:
    """Return timelines as trace-event JSON, which ui.perfetto.dev opens.

    Each timeline is a process, and each rank a thread. Each span is a slice that is named as in the text grid (`F3.1`), and each update is
    a slice `update` after its span. Arrows follow each microbatch through its forwards and backwards, except backwards for weights only.

    Args:
        timelines: the timelines by name (`predicted`, `measured`), in seconds; the spans of a rank do not overlap.
        transfers: the transfers to show, by the same names, such as `Prediction.transfers`. There is a thread below the ranks for each
            direction between two ranks, or between a rank and its host, and for each set of replicas that sum. A slice lasts as long as the
            transfer occupies its links.

    Raises:
        InputError: `transfers` is not a mapping, or names an unknown timeline.
    """
    rows_by_name = rows_of("to_perfetto", timelines, transfers)
    events: list[_Event] = []
    flows = count(1)
    for pid, (name, timeline) in enumerate(timelines.items(), start=1):
        rows = rows_by_name[name]
        events += _names(pid, name, [*(f"rank {rank}" for rank in range(len(timeline))), *rows])
        slices = [*_slices(pid, timeline), *_flows(pid, timeline, flows), *_of_transfers(pid, len(timeline) + 1, rows)]
        events += sorted(slices, key=lambda event: event["ts"])
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)


def rows_of(
    where: str, timelines: Mapping[str, Timeline], transfers: Mapping[str, Sequence[Transfer]] | None
) -> dict[str, dict[str, list[Transfer]]]:
    """Return the transfers of each timeline in rows; raise `InputError` if `transfers` names an unknown timeline."""
    transfers = {} if transfers is None else transfers
    if not isinstance(transfers, Mapping) or not set(transfers) <= set(timelines):
        names = ", ".join(map(repr, timelines))
        raise InputError(where=where, key="transfers", expected=f"a mapping of names of timelines ({names})", found=short(transfers))
    return {name: in_rows(transfers.get(name, ())) for name in timelines}


def _names(pid: int, name: str, rows: Sequence[str]) -> Iterator[_Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, row in enumerate(rows, start=1):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": row}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid - 1}}


def _slices(pid: int, timeline: Timeline) -> Iterator[_Event]:
    for tid, spans in enumerate(timeline, start=1):
        for span in spans:
            name = cell_of(span)
            facts = {"microbatch": span.microbatch, "version": span.version, "chunk": span.chunk}
            yield _slice(pid, tid, name, span.start, span.end) | {"args": facts}
            if span.updates:
                facts = {"after_microbatch": span.microbatch, "chunk": span.chunk}
                yield _slice(pid, tid, "update", span.update_start, span.update_end) | {"args": facts}


def _of_transfers(pid: int, first: int, rows: Mapping[str, Sequence[Transfer]]) -> Iterator[_Event]:
    for tid, transfers in enumerate(rows.values(), start=first):
        for transfer in transfers:
            latency = transfer.arrival - transfer.end
            facts = {"what": transfer.what, "number": transfer.number, "bytes": transfer.size, "latency": latency}
            yield _slice(pid, tid, transfer.label, transfer.start, transfer.end) | {"args": facts}


def _slice(pid: int, tid: int, name: str, start: float, end: float) -> _Event:
    # Perfetto drops overlapping slices. Lengths are differences of rounded times, so that neighbouring slices do not overlap.
    begin = _nanoseconds(start)
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": "jpipe", "ts": begin / 1000, "dur": (_nanoseconds(end) - begin) / 1000}


def _flows(pid: int, timeline: Timeline, ids: Iterator[int]) -> Iterator[_Event]:
    stops_of: dict[int, list[tuple[int, Span]]] = defaultdict(list)
    for tid, spans in enumerate(timeline, start=1):
        for span in spans:
            if OPS[span.op].reads != "stash" and not span.part:  # no other stage waits for other spans
                stops_of[span.microbatch].append((tid, span))
    for microbatch, stops in stops_of.items():
        stops.sort(key=lambda stop: stop[1].start)
        flow = {"pid": pid, "name": f"microbatch {microbatch}", "cat": "jpipe", "id": next(ids)}
        for i, (tid, span) in enumerate(stops if len(stops) > 1 else ()):
            kind = {"ph": "s"} if i == 0 else {"ph": "f", "bp": "e"} if i == len(stops) - 1 else {"ph": "t"}
            # An arrow belongs to the slice that is open at its time; at a slice's start, to that slice.
            yield flow | kind | {"tid": tid, "ts": _nanoseconds(span.start) / 1000}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
