"""Timelines as a file for ui.perfetto.dev: the trace-event JSON that chrome://tracing introduced."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from jpipe.programs._timeline import Span, Timeline

_Event = dict[str, Any]


def to_perfetto(timelines: Mapping[str, Timeline]) -> str:
    """Timelines as trace-event JSON, to be opened in ui.perfetto.dev.

    Every timeline is a process, every worker a thread of it, every span a slice with the name that it has in the text grid (`F3.1`),
    every update a slice `update` behind it. Arrows follow each microbatch from worker to worker and back.

    Args:
        timelines: by name (`predicted`, `measured`); in seconds, the spans of a worker one after the other.
    """
    events: list[_Event] = []
    flows = count(1)
    for pid, (name, timeline) in enumerate(timelines.items(), start=1):
        events += _names(pid, name, len(timeline))
        events += sorted([*_slices(pid, timeline), *_flows(pid, timeline, flows)], key=lambda event: event["ts"])
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)


def _names(pid: int, name: str, workers: int) -> Iterator[_Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for w in range(workers):
        yield {"ph": "M", "pid": pid, "tid": w + 1, "name": "thread_name", "args": {"name": f"worker {w}"}}
        yield {"ph": "M", "pid": pid, "tid": w + 1, "name": "thread_sort_index", "args": {"sort_index": w}}


def _slices(pid: int, timeline: Timeline) -> Iterator[_Event]:
    for tid, spans in enumerate(timeline, start=1):
        for span in spans:
            name = f"{span.op}{span.microbatch}.{span.version}"
            yield _slice(pid, tid, name, span.start, span.end) | {"args": {"microbatch": span.microbatch, "version": span.version}}
            if span.updates:
                yield _slice(pid, tid, "update", span.update_start, span.update_end) | {"args": {"after_microbatch": span.microbatch}}


def _slice(pid: int, tid: int, name: str, start: float, end: float) -> _Event:
    # Perfetto drops slices that overlap: lengths are taken between rounded times, so that neighbours stay neighbours.
    begin = _nanoseconds(start)
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": "jpipe", "ts": begin / 1000, "dur": (_nanoseconds(end) - begin) / 1000}


def _flows(pid: int, timeline: Timeline, ids: Iterator[int]) -> Iterator[_Event]:
    places: dict[int, list[tuple[int, Span]]] = defaultdict(list)
    for tid, spans in enumerate(timeline, start=1):
        for span in spans:
            places[span.microbatch].append((tid, span))
    for microbatch, stops in places.items():
        stops.sort(key=lambda stop: stop[1].start)
        flow = {"pid": pid, "name": f"microbatch {microbatch}", "cat": "jpipe", "id": next(ids)}
        for i, (tid, span) in enumerate(stops if len(stops) > 1 else ()):
            kind = {"ph": "s"} if i == 0 else {"ph": "f", "bp": "e"} if i == len(stops) - 1 else {"ph": "t"}
            # An arrow ties to the slice that is open at its time; at the slice's own start that is this one.
            yield flow | kind | {"tid": tid, "ts": _nanoseconds(span.start) / 1000}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
