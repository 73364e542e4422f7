"""Make tables from results of `python -m benchmarks.peers`: medians, or their range where several runs are given."""

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jpipe
from benchmarks.papers.document import Table
from benchmarks.peers.entries import ENTRIES, Entry

RESULTS = Path(__file__).parent
MICROBATCHES = (8, 2)
SHARES, AGAINST_TORCH = "shares of the ceiling", "throughput against PyTorch"
_NAMES = {"jpipe DP": "jpipe, DP", "jpipe DP, 4 sum parts": "jpipe, DP in 4 parts", "jpipe DP, shared optimizer": "jpipe, DP with ZeRO-1"}

Runs = Mapping[int, Sequence[Mapping[str, float]]]
"""For each number of microbatches, the runs as {name of an entry: median of its rounds' shares}."""


def tables(folder: Path) -> list[Table]:
    """Return both tables, or none where the folder has no results.

    Args:
        folder: with one or several files, each of one run or of several.
    """
    runs = read(sorted(folder.glob("*.json")))
    return [shares_table(runs), against_torch(runs)] if any(runs.values()) else []


def read(files: Iterable[Path]) -> Runs:
    """Read the median share of each program in each run.

    Args:
        files: that `python -m benchmarks.peers` wrote.

    Raises:
        jpipe.InputError: a file has something else.
    """
    runs: dict[int, list[dict[str, float]]] = {m: [] for m in MICROBATCHES}
    for file in files:
        try:
            for run in json.loads(file.read_text(encoding="utf-8"))["runs"]:
                shares = {row["name"]: statistics.median(row["shares"]) for row in run["rows"] if "shares" in row}
                runs[run["microbatches"]].append(shares)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise jpipe.InputError(f"'{file}': expected results of python -m benchmarks.peers, found {error!r}") from None
    return runs


def shares_table(runs: Runs) -> Table:
    """Return each program's share of the ceiling, with its goal.

    Args:
        runs: as `read` returns them.
    """
    rows = []
    for entry in ENTRIES:
        cells = []
        for m in MICROBATCHES:
            values, goal = [run[entry.name] for run in runs[m] if entry.name in run], entry.goal(m)
            missed = sum(value < goal for value in values) if goal else 0
            verdict = "" if not missed else ", missed" if missed == len(values) else f", missed in {missed} of {len(values)} runs"
            cells += [_range(values), f"{goal:.2f}{verdict}" if goal and values else ""]
        if any(cells):
            rows.append([shown(entry), *cells])
    return Table(SHARES, ["share of the ceiling", *(cell for m in MICROBATCHES for cell in (f"m = {m}", "goal"))], rows)


def against_torch(runs: Runs) -> Table:
    """Return the throughput of each program divided by that of PyTorch's with the same task.

    Args:
        runs: as `read` returns them.
    """
    by_name, rows = {entry.name: entry for entry in ENTRIES}, []
    for entry in ENTRIES:
        if (rival := entry.rival) is None:
            continue
        cells = [_range([run[entry.name] / run[rival] for run in runs[m] if {entry.name, rival} <= run.keys()]) for m in MICROBATCHES]
        if any(cells):
            rows.append([shown(entry).removeprefix("jpipe").strip(", "), shown(by_name[rival]).removeprefix("PyTorch "), *cells])
    return Table(AGAINST_TORCH, ["jpipe", "PyTorch", *(f"m = {m}" for m in MICROBATCHES)], rows)


def shown(entry: Entry) -> str:
    """Return the name of a program on the page: "jpipe `zb_h1`", "jpipe `pipedream`+1", "PyTorch 1F1B".

    Args:
        entry: the program.
    """
    name = re.sub(r"^torch\b", "PyTorch", _NAMES.get(entry.name, entry.name))
    return re.sub(r"^jpipe (\w+)", r"jpipe `\1`", name) + (", 2 chunks" if (entry.kind or "").endswith("/2") else "")


def _range(values: Sequence[float]) -> str:
    """Format the smallest and the largest value, which may be the same."""
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values)))) if values else ""
