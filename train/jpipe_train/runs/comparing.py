"""Compare the configs and losses of runs, in the terminal, on a page and in a picture (`jpipe compare`)."""

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jpipe import InputError
from jpipe.checkpoints import Checkpoint
from jpipe.files import expanded, open_to_read, shown, write_atomically, writing
from jpipe_train.checkpoint.history import RunPart
from jpipe_train.checkpoint.run_folder import METRICS
from jpipe_train.config.config_file import load_resolved
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count, duration, printable, shortened
from jpipe_train.data import data
from jpipe_train.report import loss_curve, page
from jpipe_train.runs import differences, picture
from jpipe_train.runs.listing import SWEEP, folders
from jpipe_train.runs.reading import CONFIG, Run, read, saved_steps

_MARK = (
    f'content="{picture.CREATOR}"'.encode(),
    f">{picture.CREATOR}<".encode(),
)  # the text that marks a page, and the text that marks a picture
_MARKED = 2**12  # the mark is in this many bytes at the beginning of a file
_PAGE_WIDTH = 90  # characters; if a table with one column per run is wider, it has one row per run
_LONG_FROM = 1e6  # losses from this value on are written with an exponent
_LONGEST_VALUE, _LONGEST_CELL = 40, 300  # the longest value in characters, in the terminal and on the page


@dataclass(frozen=True)
class Comparison:
    """A comparison of several runs."""

    names: tuple[str, ...]  # the names of the runs, all different and printable
    runs: tuple[Run, ...]  # the runs with all their rows
    differences: dict[str, list[str]]  # for each config key that differs, its value in each run
    results: dict[str, list[str]]  # for each kind of result, its value in each run
    # the lowest loss of each run: the validation loss if all runs have one, otherwise the training loss; infinite without one
    losses: list[float]
    unit: str  # the unit of the losses; "" if it is unknown or differs between runs
    best: tuple[int, ...]  # the indices of the runs with the lowest of these losses; empty if the units of the losses differ


def main(runs: Sequence[str], out: str, reporter: Reporter) -> None:
    """Compare the runs in at least two folders; see `compare`.

    The folder of a sweep stands for the runs in it; its other files are ignored.
    """
    paths = [path for run in runs for path in _with_sweeps(expanded(run, "compare"))]
    if len(paths) < 2:
        raise InputError(
            f"compare: expected at least two run folders, found {len(paths)}; write, for example, jpipe compare runs/0001 runs/0002"
        )
    repeated = [path for number, path in enumerate(paths) if path.resolve() in [other.resolve() for other in paths[:number]]]
    if repeated:
        raise InputError(where="compare", expected="each run once", found=f"'{shown(repeated[0])}' twice", change="remove one of them")
    compare(paths, expanded(out, "--out"), reporter)


def compare(paths: Sequence[Path], out: Path, reporter: Reporter) -> None:
    """Print how the configs of runs differ, and their losses, and write both as the page `out` and a picture ending in `.svg`.

    Raise InputError if a folder is not a run, or an output file exists and is not a comparison, or cannot be written.
    """
    drawing = out.with_suffix(".svg")
    if out.suffix != ".html":
        raise InputError(f"--out: expected the name of a page, such as compare.html, found '{shown(out)}'; end it with .html")
    for path in (out, drawing):
        _check_replaceable(path)
    comparison = gather([read(path, whole=True) for path in paths])
    for table in (comparison.differences, comparison.results):
        if table:
            short = {name: [shortened(value, _LONGEST_VALUE) for value in values] for name, values in table.items()}
            reporter.table(*_oriented(comparison.names, short, reporter.width), words=comparison.names)
    if not comparison.differences and len(paths) > 1:
        reporter.say("the configs do not differ")
    drawn, unit = _drawn(comparison), comparison.unit
    curves = [_curve(comparison.names[number], comparison.runs[number]) for number in drawn]
    svg, wide = (picture.to_svg(picture.draw(curves, unit, wide=wide)) for wide in (False, True))
    with writing("--out", shown(out)):
        write_atomically(drawing, svg)
        write_atomically(out, _page(comparison, svg, wide, unit, drawn))
    reporter.say(f"the comparison is in {shown(out)}; its picture is {shown(drawing)}")


def _with_sweeps(path: Path) -> list[Path]:
    """Return the run folders of a sweep, nothing for a file that a sweep writes, or otherwise `path` itself."""
    if (path / SWEEP).is_file():
        return [inner for inner in folders(str(path)) if (inner / METRICS).is_file()]
    is_of_sweep = path.name in (SWEEP, "compare.html", "compare.svg") and path.is_file() and (path.parent / SWEEP).is_file()
    return [] if is_of_sweep else [path]


def gather(runs: Sequence[Run]) -> Comparison:
    """Compare the configs of runs, and collect their results."""
    names, results = _names([run.path for run in runs]), [_results(run) for run in runs]
    table = differences.without_missing_plans(differences.table([run.config for run in runs]))
    if len({run.plan for run in runs}) > 1 and not any(key.startswith("plan.") and key != "plan.file" for key in table):
        table |= {"the plan": [run.plan for run in runs]}
    each = [[_lowest(run, name)[1] for run in runs] for name in ("val_loss", "loss")]
    losses = next((kind for kind in each if all(map(math.isfinite, kind))), each[1])
    best = tuple(number for number, loss in enumerate(losses) if loss == min(losses))
    units = {_unit(run) for run, loss in zip(runs, losses, strict=True) if math.isfinite(loss)}
    return Comparison(
        names=names,
        runs=tuple(runs),
        differences={printable(key): [printable(value) for value in values] for key, values in table.items()},
        results={name: [result[name] for result in results] for name in results[0]},
        losses=losses,
        unit=min(units) if len(units) == 1 else "",
        best=best if len(units) == 1 else (),
    )


def _check_replaceable(path: Path) -> None:
    """Check that there is no file at `path`, or that an earlier comparison wrote it."""
    is_ours = not os.path.lexists(path)
    if not is_ours and not path.is_symlink():
        with contextlib.suppress(OSError), open_to_read(path) as file:
            beginning = file.read(_MARKED)
            is_ours = any(mark in beginning for mark in _MARK)
    if not is_ours:
        raise InputError(f"--out: expected a new file or an earlier comparison, found another file '{shown(path)}'; choose another name")


def _names(paths: Sequence[Path]) -> tuple[str, ...]:
    """Return a name for each run: the last parts of its path, as many as are needed to make all names different."""
    parts = [path.resolve().parts for path in paths]
    depth = next(n for n in range(1, max(map(len, parts)) + 1) if len({each[-n:] for each in parts}) == len(parts))
    return tuple(printable("/".join(each[-depth:])) for each in parts)


def _results(run: Run) -> dict[str, str]:
    seconds = run.last("seconds")
    results = {"state": run.state.name, "steps": f"{run.done:,} of {run.steps:,}" if run.steps else f"{run.done:,}"}
    for name, words in (("val_loss", "validation loss"), ("loss", "training loss")):
        step, lowest = _lowest(run, name)
        last = run.last(name)
        results[f"{words}, last"] = "–" if last is None else _loss(last)
        results[f"{words}, lowest"] = f"{_loss(lowest)} at step {step:,}" if math.isfinite(lowest) else "–"
    return results | {"time": "–" if seconds is None else duration(seconds)}


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < _LONG_FROM else f"{value:.4g}"


def _lowest(run: Run, name: str) -> tuple[int, float]:
    """Return the first step with the lowest value of `name`, and this value; (0, inf) if no row has one."""
    return min(((int(row["step"]), float(row[name])) for row in run.rows if name in row), key=lambda pair: pair[1], default=(0, math.inf))


def _drawn(comparison: Comparison) -> list[int]:
    """Return the indices of the runs to draw: all, or the `MOST_DRAWN` runs with the lowest losses."""
    best = sorted(range(len(comparison.runs)), key=comparison.losses.__getitem__)[: picture.MOST_DRAWN]
    return sorted(best)


def _curve(name: str, run: Run) -> picture.Curve:
    tokens = examples = None
    try:
        config = load_resolved(run.path / CONFIG)
        (amount, what), examples = data.portion(config), config.train.batch_size
        tokens = amount if what == "tokens" else None
    except InputError:  # of another version of jpipe
        section = run.config.get("train")
        size = section.get("batch_size") if isinstance(section, dict) else None
        examples = size if type(size) is int and size > 0 else None
    return picture.Curve(name, run.rows, tokens, examples, _earlier_sizes(run))


def _earlier_sizes(run: Run) -> list[tuple[int, int, int]]:
    """Return (first step, end, batch size) for each part of a run up to its newest checkpoint, if the batch size is known."""
    steps = saved_steps(run.path)
    try:
        known = Checkpoint(run.path, steps[-1]).facts if steps else {}
        parts = [RunPart.model_validate(part) for part in known.get("history", [])] if isinstance(known, dict) else []
    except (InputError, OSError, ValueError, TypeError):  # damaged, or of another version of jpipe
        return []
    return [(part.first, part.end, part.batch_size) for part in parts if part.batch_size is not None]


def _unit(run: Run) -> str:
    """Return the unit of the losses of a run; "" if it is unknown."""
    try:
        return data.loss_unit(load_resolved(run.path / CONFIG)).strip()
    except InputError:  # of another version of jpipe
        return ""


def _oriented(names: Sequence[str], table: dict[str, list[str]], width: int) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table. It has one column per run or, if that is wider than `width`, one row per run."""
    columns = [[*table], *([name, *values] for name, *values in zip(names, *table.values(), strict=True))]
    if sum(max(map(len, column)) + 2 for column in columns) <= width:
        return ["", *names], [[key, *values] for key, values in table.items()]
    return ["", *table], [[name, *values] for name, *values in zip(names, *table.values(), strict=True)]


def _page(comparison: Comparison, svg: str, wide: str, unit: str, drawn: Sequence[int]) -> str:
    def table(values: dict[str, list[str]]) -> str:
        short = {name: [shortened(value, _LONGEST_CELL) for value in row] for name, row in values.items()}
        return page.scrolling(page.table("numbers runs", *_oriented(comparison.names, short, _PAGE_WIDTH)))

    title, values = f"Comparison of {count(len(comparison.runs), 'run')}", {}
    if comparison.best:
        number, *equal = comparison.best
        names = "equal in all runs" if len(equal) + 1 == len(comparison.runs) else ", ".join(comparison.names[n] for n in comparison.best)
        values = {"lowest loss": shortened(names, _LONGEST_CELL) if equal else comparison.names[number]} | {
            f"{name}, {unit}" if unit else name: comparison.results[name][number]
            for name in ("validation loss, lowest", "training loss, lowest")
            if comparison.results[name][number] != "–"
        }
    left_out = len(comparison.runs) - len(drawn)
    has_means = any(picture.is_smoothed(comparison.runs[number].rows) for number in drawn)
    caption = (
        "Lines are training losses"
        + (f", as running means where there are {loss_curve.SMOOTHED_FROM} or more" if has_means else "")
        + "; points are validation losses. The panels show the same losses against steps, data and time."
        + (f" The {len(drawn)} runs with the lowest losses are drawn; {left_out} are left out." if left_out else "")
    )
    lowest = zip(comparison.names, comparison.results["validation loss, lowest"], comparison.results["training loss, lowest"], strict=True)
    alt = "Losses of the runs. " + " ".join(f"{name}: validation {valid}, training {train}." for name, valid, train in lowest)
    sections = {
        "Losses": page.figure(svg.encode(), "narrow", alt, caption, "svg+xml", wide=wide.encode()),
        "Results": table(comparison.results),
        "What differs in the configs": table(comparison.differences) if comparison.differences else page.note("The configs do not differ."),
    }
    return page.document(title, page.results(values), sections, picture.CREATOR)
