"""The tables of docs/explanation/gpu.md from the results of `make check-gpu`."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.papers.document import Table

RESULTS = Path(__file__).parent / "results.json"
_DISPATCH = re.compile(r"dispatch, (\w+): µs per (microbatch|instruction)")
_PROCESSES = "two-processes", "four-processes", "killed-process", "resume"
_THROUGHPUT, _MEMORY, _HOST_MEMORY = "throughput", "memory", "host-memory"


def tables(file: Path = RESULTS) -> list[Table]:
    """Return a table for each kind of part that has figures; none if there are no results.

    Args:
        file: what `make check-gpu` has written.
    """
    if not file.exists():
        return []
    parts: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))["parts"]
    figures = {name: part["figures"] for name, part in parts.items() if "figures" in part}
    result = [_processes({name: part for name, part in parts.items() if name.startswith(_PROCESSES)})]
    if of_schedules := [part for name, part in figures.items() if name.startswith(_THROUGHPUT)]:
        result.append(_throughput(of_schedules))
    if "dispatch" in figures:
        result.append(_dispatch(figures["dispatch"]))
    if _MEMORY in figures:
        result.append(_memory(figures[_MEMORY], figures.get(_HOST_MEMORY, {})))
    return result


def _processes(parts: Mapping[str, Any]) -> Table:
    rows = []
    for name, part in parts.items():
        counts = ", ".join(f"{count} {outcome}" for outcome, count in part.get("counts", {}).items())
        rows.append([name, part["outcome"], f"{part['seconds']:.0f}", counts])
    return Table("processes on a GPU", ["part", "outcome", "seconds", "cases and tests"], rows)


def _throughput(of_schedules: list[Mapping[str, Any]]) -> Table:
    rows = []
    for programs in of_schedules:
        for name, of_program in programs.items():
            share, ratio = of_program.get("model FLOPs utilization"), of_program.get("of the jitted step")
            shown = "" if share is None else f"{share:.1%}", "" if ratio is None else f"{ratio:.2f}"
            rows.append([name, f"{of_program['sequences/s']:.1f}", *shown])
    return Table("throughput on a GPU", ["program", "sequences/s", "model FLOPs utilization", "of the jitted step"], rows)


def _dispatch(figures: Mapping[str, float]) -> Table:
    of_schedules: dict[str, dict[str, float]] = {}
    other = []
    for figure, micros in figures.items():
        if match := _DISPATCH.match(figure):
            of_schedules.setdefault(match[1], {})[match[2]] = micros
        else:
            other.append([figure.removeprefix("dispatch: µs of "), "", f"{micros:.1f} µs"])
    rows = [[f"`{name}`", f"{each['microbatch']:,.0f} µs", f"{each['instruction']:.1f} µs"] for name, each in of_schedules.items()]
    return Table("dispatch on a GPU", ["schedule", "per microbatch", "per instruction"], rows + other)


def _memory(on_device: Mapping[str, float], in_host: Mapping[str, float]) -> Table:
    rows = [[name, *(f"{of.get(name, 0):.4g}" if name in of else "" for of in (on_device, in_host))] for name in {**on_device, **in_host}]
    return Table("memory on a GPU", ["figure", "on the GPU", "optimizer and versions in host memory"], rows)
