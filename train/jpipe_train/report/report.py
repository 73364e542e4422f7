"""The report of a run: pictures of losses, metrics, timeline and memory, trace.json for Perfetto, and report.html, which needs no other."""

import base64
import html
import io
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, NamedTuple

import jpipe
from jpipe.files import write_atomically
from jpipe_train.checkpoint import history
from jpipe_train.checkpoint.history import Part
from jpipe_train.console.terminal import count, duration
from jpipe_train.report import loss_curve, stage_times
from jpipe_train.report.stage_times import Stage

if TYPE_CHECKING:
    import matplotlib.figure

_PAGE = Path(__file__).with_name("report_page.html")
_MUCH_SLOWER = 1.5  # times the prediction
_SHORT = 2e-3  # seconds
_MOST_RANKS = 8  # whose temporaries are listed
HELD = "held memory"
_MOST_PARTS = 50  # the last parts of a resumed run
_MOST_METRICS, _MOST_RESULTS = 24, 4  # metrics of validation that are drawn, and those that the top of the page shows


@dataclass(frozen=True)
class Report:
    """The data of a report.

    Attributes:
        title: title of the page.
        facts: facts about the run, as text (`{"schedule": "pipedream_2bw", …}`), in order.
        rows: as in `metrics.jsonl`: `step`, `loss`, and if evaluated `val_loss` and `val_NAME` for each metric.
        predicted: simulated batches of the run.
        measured: the same batches, traced.
        unit: unit of the losses; may be empty.
        processes: number of processes.
        plan: by which it ran; None: the rows of the pictures tell no stages and replicas.
        stages: the stages in order; may be empty.
        parts: the parts of a resumed run; may be empty.
        temporary: by rank, as from `temporary_bytes`; may be empty.
    """

    title: str
    facts: Mapping[str, str]
    rows: Sequence[Mapping[str, int | float]]
    predicted: jpipe.programs.Window | None = None
    measured: jpipe.programs.Window | None = None
    unit: str = "nats per byte"
    processes: int = 1
    plan: jpipe.Plan | None = None
    stages: Sequence[Stage] = ()
    parts: Sequence[Part] = ()
    temporary: Sequence[int | None] = ()

    @property
    def windows(self) -> dict[str, jpipe.programs.Window]:
        """The existing windows, by name."""
        both = {"predicted": self.predicted, "measured": self.measured}
        return {name: window for name, window in both.items() if window is not None}


class Comparison(NamedTuple):
    """One quantity, predicted and measured, as text; `ratio` is measured / predicted. Unknown values are `–`."""

    quantity: str
    predicted: str
    measured: str
    ratio: str


def compare(
    predicted: jpipe.programs.Window | None, measured: jpipe.programs.Window | None, temporary: Sequence[int | None] = ()
) -> list[Comparison]:
    """Step time, bubble, and what each rank holds and its peak memory, predicted and measured.

    Args:
        predicted: the prediction.
        measured: the measurement.
        temporary: by rank, as from `temporary_bytes`; the peak memory of a rank is shown only with its number.
    """
    windows = predicted, measured
    ranks = max((len(window.memory) for window in windows if window), default=0)
    rows = [
        _comparison("time of a step", _time, [None if window is None else window.step_seconds for window in windows]),
        _comparison("bubble (idle share)", _share, [None if window is None else window.bubble for window in windows]),
    ]
    for rank in range(ranks):
        held = [window.held_bytes[rank] if window and len(window.memory) > rank and window.memory[rank] else None for window in windows]
        if any(held):
            rows.append(_comparison(f"{HELD}, rank {rank}", _bytes, held))
            more = temporary[rank] if rank < len(temporary) else None
            if more is not None:
                peaks = [None if size is None else size + more for size in held]
                rows.append(_comparison(f"peak memory, rank {rank}", _bytes, peaks))
    return rows


def temporary_words(temporary: Sequence[int | None]) -> str:
    """What the peak memory has in addition to what is held, as a sentence; "" where nothing is known."""
    known = [f"{_bytes(size)} at rank {rank}" for rank, size in enumerate(temporary) if size is not None]
    if not known:
        return ""
    sizes = known[:_MOST_RANKS] + (["…"] if len(known) > _MOST_RANKS else [])
    others = "; those of other ranks are known in their processes only" if len(known) < len(temporary) else ""
    return f"peak memory is held memory and the temporaries of the largest program, as compiled: {', '.join(sizes)}{others}"


def as_predicted(plan: jpipe.Plan, measured: jpipe.programs.Window, costs: Sequence[jpipe.programs.StageCost]) -> jpipe.plan.Predicted:
    """The measurement of a plan, in the form of the planner's prediction.

    Args:
        plan: the plan of the run.
        measured: a window of the run.
        costs: for each stage the sizes that a window does not include, see `temporary_of_ranks`.
    """
    ranks = [[plan.rank_of[w] for w in plan.stage_workers[stages[0]]] for stages in plan.rank_stages]
    held = [max(measured.held_bytes[rank] for rank in replicas) for replicas in ranks]
    peaks = tuple(size + more for size, more in zip(held, temporary_of_ranks(plan, costs), strict=True))
    return jpipe.plan.Predicted(batch_seconds=measured.step_seconds, bubble=min(max(measured.bubble, 0.0), 1.0), peak_bytes=peaks)


def temporary_of_ranks(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost]) -> list[int]:
    """Bytes that each rank, counted without replicas, needs only while a program runs.

    These are scratch memory, and what a program that begins with a forward takes and leaves nothing of.
    """
    schedule = jpipe.schedules.SCHEDULES[plan.schedule]
    found = [cost.temporary for cost in costs]
    if schedule.begins_fused(plan, plan.depth - 1):
        found[-1] += costs[-1].inputs + costs[-1].labels
    return [max(found[s] for s in stages) for stages in plan.rank_stages]


def temporary_bytes(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], compiled: Collection[int]) -> tuple[int | None, ...]:
    """Bytes that each rank, replicas included, needs only while a program runs; None where its stages are not among the compiled ones."""
    found = temporary_of_ranks(plan, costs)
    return tuple(found[place] if set(plan.rank_stages[place]) <= set(compiled) else None for place, _ in plan.rank_places)


def compare_with_plan(plan: jpipe.Plan, predicted: jpipe.plan.Predicted, measured: jpipe.plan.Predicted) -> list[Comparison]:
    """The planner's prediction beside the measurement."""
    rows = [
        _comparison("time of a step", _time, [predicted.batch_seconds, measured.batch_seconds]),
        _comparison("bubble (idle share)", _share, [predicted.bubble, measured.bubble]),
    ]
    for stages, *peaks in zip(plan.rank_stages, predicted.peak_bytes, measured.peak_bytes, strict=True):
        named = f"stage {stages[0]}" if len(stages) == 1 else f"stages {' '.join(map(str, stages))}"
        rows.append(_comparison(f"peak memory, {named}", _bytes, peaks))
    return rows


def why_slower(predicted: jpipe.programs.Window | None, measured: jpipe.programs.Window | None, processes: int = 1) -> str | None:
    """Why the measured steps take much longer than predicted, as text; None if they do not."""
    if predicted is None or measured is None or measured.step_seconds <= _MUCH_SLOWER * predicted.step_seconds:
        return None
    median = statistics.median(span.end - span.start for spans in measured.timeline for span in spans)
    if median < _SHORT:
        return (
            f"Steps take longer than predicted: the computations are so short (median {_time(median)}) that starting them from the host "
            "takes longer than running them; with larger microbatches or a larger model the difference vanishes."
        )
    if processes > 1:
        return (
            "Steps take longer than predicted: the prediction ignores transfers between processes, and that processes of one machine "
            "share its cores; plan.extra_in_flight=1 hides transfers between stages by one more microbatch in flight."
        )
    return "Steps take longer than predicted: other programs used the cores at the same time."


def write_report(folder: Path, report: Report) -> None:
    """Write the pictures, the trace and the page into an existing folder, each file completely or not at all.

    A run without losses has no `loss.png`, one without windows no `timeline.png`, `memory.png` or `trace.json`; the page says so. One
    without `eval.metrics` has no `metrics.png`.

    Raises:
        OSError: the folder cannot be written.
    """
    timelines = {name: window.timeline for name, window in report.windows.items()}
    memories = {name: window.memory for name, window in report.windows.items() if any(window.memory)}
    seconds = {name: window.seconds for name, window in report.windows.items()}
    pictures: dict[str, bytes] = {}
    if any(len(loss_curve.finite(report.rows, name)[0]) for name in ("loss", "val_loss")):
        pictures["loss"] = _png(loss_curve.draw_losses(report.rows, report.unit))
    if names := _metrics_to_draw(report):
        pictures["metrics"] = _png(loss_curve.draw_metrics(report.rows, names))
    if timelines:
        pictures["timeline"] = _png(jpipe.draw_timeline(timelines, seconds=seconds, plan=report.plan))
        write_atomically(folder / "trace.json", jpipe.to_perfetto(timelines))
    if memories:
        pictures["memory"] = _png(jpipe.draw_memory(memories, seconds=seconds, plan=report.plan))
    for name, picture in pictures.items():
        write_atomically(folder / f"{name}.png", picture)
    write_atomically(folder / "report.html", _page(report, pictures))


# The page: everything from outside passes through `_escape`. ------------------------------------------------------------------


def _page(report: Report, pictures: Mapping[str, bytes]) -> str:
    parts = {
        "title": _escape(report.title),
        "results": _results(report),
        "facts": _table("facts", [], report.facts.items()) + _history(report),
        "loss": _loss(report, pictures.get("loss")) + _metrics(report, pictures.get("metrics")),
        "comparison": _comparison_table(report),
        "timeline": _stages(report) + _timeline(report, pictures.get("timeline")),
        "memory": _memory(report, pictures.get("memory")),
    }
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(parts)


def _results(report: Report) -> str:
    results: dict[str, str] = {}
    for key, words in (("val_loss", "validation loss"), ("loss", "training loss")):
        values = loss_curve.finite(report.rows, key)[1]
        if len(values) and not results:
            name = f"{words}, {report.unit}" if report.unit else words
            results[name] = f"{values[0]:.3f} → {values[-1]:.3f}" if len(values) > 1 else f"{values[0]:.3f}"
    for name in _metrics_to_draw(report)[:_MOST_RESULTS]:
        values = loss_curve.finite(report.rows, f"val_{name}")[1]
        results[f"{name}, validation"] = f"{values[0]:.4g} → {values[-1]:.4g}" if len(values) > 1 else f"{values[0]:.4g}"
    for kind, window in list(report.windows.items())[-1:]:  # the measurement, or else the prediction
        results[f"time of a step, {kind}"] = _time(window.step_seconds)
        results[f"bubble, {kind}"] = _share(window.bubble)
        if any(window.memory):
            peaks = [size + more for size, more in zip(window.held_bytes, report.temporary, strict=False) if size and more is not None]
            if len(peaks) == sum(map(bool, window.held_bytes)):
                results[f"peak memory, {kind}"] = _bytes(max(peaks))
            results[f"{HELD}, {kind}"] = _bytes(max(window.held_bytes))
    results |= _progress(report.rows)
    boxes = "".join(f"<div><dt>{_escape(name)}</dt><dd>{_escape(value)}</dd></div>" for name, value in results.items())
    return f'<dl class="results">{boxes}</dl>' if boxes else ""


def _progress(rows: Sequence[Mapping[str, int | float]]) -> dict[str, str]:
    """Time, speed and learning rate, if the rows have them."""
    results = {}
    if seconds := [row["seconds"] for row in rows if "seconds" in row]:
        results["duration"] = duration(seconds[-1])
    for unit in ("tokens", "samples"):
        if speeds := [row[f"{unit}_per_second"] for row in rows if f"{unit}_per_second" in row]:
            results[f"{unit} per second"] = f"{float(f'{statistics.median(speeds):.3g}'):,.10g}"
    if shares := [row["mfu"] for row in rows if "mfu" in row]:
        results["MFU"] = f"{statistics.median(shares):.1%}"
    if rates := [row["learning_rate"] for row in rows if "learning_rate" in row]:
        turns = [rates[0], *([max(rates)] if max(rates) > max(rates[0], rates[-1]) else []), rates[-1]]
        results["learning rate"] = " → ".join(dict.fromkeys(f"{rate:.3g}" for rate in turns))
    return results


def _history(report: Report) -> str:
    """The parts of a run that was resumed."""
    if len(report.parts) < 2:
        return ""
    shown = report.parts[-_MOST_PARTS:]
    earlier = f" The {len(report.parts) - len(shown):,} parts before these are left out." if len(shown) < len(report.parts) else ""
    note = "The run was resumed: each line is a part of it. Work that was lost when a part was killed is not in it." + earlier
    return f"<h3>History</h3>{_scrolling(_table('parts', *history.table(shown)))}{_note(note)}"


def _stages(report: Report) -> str:
    if not report.stages:
        return ""
    which, window = list(report.windows.items())[-1] if report.windows else ("", None)
    note = f"Medians over the microbatches that were {which}; busy is the share of the time in which a stage computes or updates."
    return _scrolling(_table("numbers", *stage_times.table(report.stages, window))) + (_note(note) if window else "")


def _scrolling(table: str) -> str:
    return f'<div class="scrolls" tabindex="0" role="region" aria-label="A table">{table}</div>'


def _loss(report: Report, picture: bytes | None) -> str:
    steps, losses = loss_curve.finite(report.rows, "loss")
    values = loss_curve.finite(report.rows, "val_loss")[1]
    missing = sum("loss" in row for row in report.rows) - len(losses)
    note = f" {missing} training losses were not finite and are left out." if missing else ""
    if picture is None:
        return _note(f"No step of this run has a finite loss, so there is no curve.{note}")
    alt = "Losses over the steps."
    if len(losses):
        last = f"{losses[-1]:.3g} {report.unit}".strip()
        alt += f" Training: from {losses[0]:.3g} at step {steps[0]} to {last} at step {steps[-1]}."
    if len(values):
        alt += f" Validation: from {values[0]:.3g} to {values[-1]:.3g}."
    smoothed = len(losses) >= loss_curve.SMOOTHED_FROM
    of = "each batch" if loss_curve.logs_every_batch(report.rows) else "the batches that were logged"
    how = f"The thin line is the loss of {of}, the thick one its running mean" if smoothed else f"The line is the loss of {of}"
    how += "; the points are of data that the model does not learn from." if len(values) else "; nothing was evaluated on other data."
    return _figure(picture, "small", alt, f"{how}{note}")


def _metrics_to_draw(report: Report) -> list[str]:
    """The metrics of validation that have a finite value, the first of very many."""
    names = [name for name in loss_curve.metric_names(report.rows) if len(loss_curve.finite(report.rows, f"val_{name}")[0])]
    return names[:_MOST_METRICS]


def _metrics(report: Report, picture: bytes | None) -> str:
    names, drawn = loss_curve.metric_names(report.rows), _metrics_to_draw(report)
    if not names:
        return ""
    title = "<h3>Metrics of validation</h3>"
    if picture is None:
        return title + _note("No metric of this run has a finite value.")
    values = {name: loss_curve.finite(report.rows, f"val_{name}")[1] for name in drawn}
    missing = sum(f"val_{name}" in row for row in report.rows for name in drawn) - sum(map(len, values.values()))
    note = f" {count(missing, 'value')} {'was' if missing == 1 else 'were'} not finite and left out." if missing else ""
    others = len(names) - len(drawn)
    note += f" {count(others, 'metric')} more {'is' if others == 1 else 'are'} in metrics.jsonl." if others else ""
    alt = "Metrics over the steps. " + " ".join(f"{name}: from {each[0]:.4g} to {each[-1]:.4g}." for name, each in values.items())
    return title + _figure(picture, "small", alt, f"Each panel is a metric (eval.metrics), of data that is not learned from.{note}")


def _comparison_table(report: Report) -> str:
    if not report.windows:
        return _note("No batches of this run were simulated or traced, so there is nothing to compare.")
    table = _table("numbers", ("", *Comparison._fields[1:]), compare(report.predicted, report.measured, report.temporary))
    words = temporary_words(report.temporary)
    return table + _note(
        "The prediction is the schedule simulated with the median times of each stage's own computations in the same batches, and with "
        "sizes from shapes alone; a ratio (measured / predicted) of 1 means an exact prediction. "
        + (f"{words[0].upper()}{words[1:]}. " if words else "")
        + " ".join(f"{name.capitalize()}: {count(window.batches, 'batch', 'es')}." for name, window in report.windows.items())
        + (f" {why}" if (why := why_slower(report.predicted, report.measured, report.processes)) else "")
    )


def _timeline(report: Report, picture: bytes | None) -> str:
    if picture is None:
        return _note("No batches of this run were simulated or traced, so there is no timeline.")
    how = (
        "A row is a rank, a device, and time runs to the right; grey is idle, and the number in a box is its microbatch: follow one down "
        "through the forwards and up again through the backwards. The file trace.json beside this page has the same for ui.perfetto.dev."
    )
    return _figure(picture, "wide", f"What each rank did, over time: {_which(report)}.", f"{_only(report)}{how}")


def _memory(report: Report, picture: bytes | None) -> str:
    if picture is None:
        return _note("What the ranks held was neither predicted nor measured, so there is no picture of their memory.")
    how = "Each panel is what one rank holds over time, by kind and on top of each other; the dashed line marks the most."
    most = "; ".join(f"rank {row.quantity.split()[-1]} {row.predicted} predicted, {row.measured} measured"
                     for row in compare(report.predicted, report.measured)[2:])  # fmt: skip
    return _figure(picture, "wide", f"What each rank held in memory, over time, at most: {most}.", f"{_only(report)}{how}")


def _which(report: Report) -> str:
    return " and ".join(f"{name}, with a bubble of {_share(window.bubble)}" for name, window in report.windows.items())


def _only(report: Report) -> str:
    if report.measured is None:
        return "This is the prediction alone: the run was not traced. "
    return "This was measured; there is no prediction. " if report.predicted is None else ""


def _figure(picture: bytes, size: str, alt: str, caption: str) -> str:
    # Wide content scrolls on a phone, and can be scrolled by keyboard.
    data = base64.b64encode(picture).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{_escape(alt)}">'
    scrolls = f' tabindex="0" role="region" aria-label="{_escape(alt)}"' if size == "wide" else ""
    return f'<figure><div class="picture {size}"{scrolls}>{image}</div><figcaption>{_escape(caption)}</figcaption></figure>'


def _table(kind: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    columns = "".join(f'<th scope="col">{_escape(name)}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{_escape(first)}</th>{"".join(f"<td>{_escape(cell)}</td>" for cell in cells)}</tr>' for first, *cells in rows
    )
    top = f"<thead><tr>{columns}</tr></thead>" if head else ""
    return f'<table class="{kind}">{top}<tbody>{lines}</tbody></table>'


def _note(words: str) -> str:
    return f'<p class="note">{_escape(words)}</p>'


def _escape(words: str) -> str:
    # A path may have bytes that are not UTF-8; Python represents them by surrogates, which cannot be written to a file.
    return html.escape(words.encode("utf-8", "replace").decode("utf-8"))


# Numbers in words ------------------------------------------------------------------------------------------------------------


def _comparison(quantity: str, words: Callable[[int | float], str], values: Sequence[int | float | None]) -> Comparison:
    predicted, measured = values
    first, second = ("–" if value is None else words(value) for value in values)
    return Comparison(quantity, first, second, "–" if not predicted or measured is None else f"{measured / predicted:.2f}")


def _time(seconds: int | float) -> str:
    return _scaled(seconds, {1.0: "s", 1e-3: "ms", 1e-6: "µs"})


def _bytes(size: int | float) -> str:
    return _scaled(size, {1e9: "GB", 1e6: "MB", 1e3: "kB", 1.0: "B"})


def _share(part: int | float) -> str:
    return f"{part:.1%}"


def _scaled(value: int | float, units: Mapping[float, str]) -> str:
    factor = next((factor for factor in units if abs(value) >= factor), list(units)[-1])
    return f"{value / factor:.3g} {units[factor]}"


def _png(figure: "matplotlib.figure.Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
