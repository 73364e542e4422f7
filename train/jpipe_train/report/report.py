"""Write the report of a run: pictures of losses, metrics, timeline and memory, trace.json for Perfetto, and report.html."""

import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jpipe
from jpipe.files import write_atomically
from jpipe_train.assemble.slices import numbers_words
from jpipe_train.checkpoint import history
from jpipe_train.checkpoint.history import RunPart
from jpipe_train.console.terminal import count, duration
from jpipe_train.report import loss_curve, page
from jpipe_train.report.performance import stage_times
from jpipe_train.report.performance.comparison import (
    WITHOUT_TEMPORARIES,
    Comparison,
    bytes_text,
    compare,
    share_text,
    temporary_words,
    time_text,
    why_slower,
)
from jpipe_train.report.performance.stage_times import Stage

if TYPE_CHECKING:
    import matplotlib.figure

_MOST_PARTS = 50  # at most this many parts of a resumed run, the last ones, are listed
_MOST_METRICS, _MOST_RESULTS = 24, 4  # the most validation metrics that are drawn, and that are shown at the top of the page


@dataclass(frozen=True)
class Report:
    """The data of a report."""

    title: str  # the title of the page
    # names and values of facts about the run, as text (`{"schedule": "pipedream_2bw", …}`), in the order of the page
    facts: Mapping[str, str]
    # the rows of `metrics.jsonl`: `step`, `loss`, and after a validation `val_loss` and `val_NAME` for each metric
    rows: Sequence[Mapping[str, int | float]]
    predicted: jpipe.programs.Window | None = None  # simulated batches of the run
    measured: jpipe.programs.Window | None = None  # the same batches, traced
    unit: str = "nats per byte"  # the unit of the losses; may be empty
    processes: int = 1  # the number of processes
    plan: jpipe.Plan | None = None  # the plan of the run; without it the pictures do not label stages and replicas
    stages: Sequence[Stage] = ()  # the stages in order; may be empty
    parts: Sequence[RunPart] = ()  # the parts of a resumed run; may be empty
    temporary: Sequence[int | None] = ()  # the result of `temporary_bytes`; may be empty
    slow: str = ""  # a sentence that names slow ranks; may be empty

    @property
    def windows(self) -> dict[str, jpipe.programs.Window]:
        """The windows that are not None; the keys are "predicted" and "measured"."""
        both = {"predicted": self.predicted, "measured": self.measured}
        return {name: window for name, window in both.items() if window is not None}


def write_report(folder: Path, report: Report) -> None:
    """Write the pictures, the trace and the page into an existing folder, each file completely or not at all, or raise OSError.

    Without losses there is no `loss.png`, and without windows there is no `timeline.png`, `memory.png` or `trace.json`; the page says so.
    Without `eval.metrics` there is no `metrics.png`.
    """
    timelines = {name: window.timeline for name, window in report.windows.items()}
    memories = {name: window.memory for name, window in report.windows.items() if any(window.memory)}
    seconds = {name: window.seconds for name, window in report.windows.items()}
    transfers = {name: window.transfers for name, window in report.windows.items()}
    pictures: dict[str, bytes] = {}
    if any(len(loss_curve.finite(report.rows, name)[0]) for name in ("loss", "val_loss")):
        pictures["loss"] = _png(loss_curve.draw_losses(report.rows, report.unit, history.changes_of_plan(report.parts)))
    if names := _metrics_to_draw(report):
        pictures["metrics"] = _png(loss_curve.draw_metrics(report.rows, names))
    if timelines:
        titles = {name: _panel_title(report, name) for name in timelines}
        pictures["timeline"] = _png(
            jpipe.draw_timeline(
                {titles[name]: timeline for name, timeline in timelines.items()},
                {titles[name]: moved for name, moved in transfers.items()},
                seconds={titles[name]: length for name, length in seconds.items()},
                plan=report.plan,
            )
        )
        write_atomically(folder / "trace.json", jpipe.to_perfetto(timelines, transfers))
    if memories:
        pictures["memory"] = _png(jpipe.draw_memory(memories, seconds=seconds, plan=report.plan))
    for name, picture in pictures.items():
        write_atomically(folder / f"{name}.png", picture)
    write_atomically(folder / "report.html", _page(report, pictures))


def _panel_title(report: Report, name: str) -> str:
    """Return the title of a timeline. The title says if only the other timeline has rows of transfers."""
    lacks = not report.windows[name].transfers and any(window.transfers for window in report.windows.values())
    return f"{name} (transfers are not {name})" if lacks else name


def _page(report: Report, pictures: Mapping[str, bytes]) -> str:
    sections = {
        "What ran": page.table("facts", [], report.facts.items()) + _history(report),
        "Loss": _loss(report, pictures.get("loss")) + _metrics(report, pictures.get("metrics")),
        "Predicted against measured": _comparison_table(report),
        "Timeline": _stages(report) + _timeline(report, pictures.get("timeline")),
        "Memory": _memory(report, pictures.get("memory")),
    }
    return page.document(report.title, _results(report), sections, "jpipe", beside="Loss")


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
        results[f"time of a step, {kind}"] = time_text(window.step_seconds)
        results[f"bubble, {kind}"] = share_text(window.bubble)
        if any(window.memory):
            peaks = [size + more for size, more in zip(window.held_bytes, report.temporary, strict=False) if size and more is not None]
            if len(peaks) == sum(map(bool, window.held_bytes)):
                results[f"peak memory, {kind}"] = bytes_text(max(peaks))
            results[f"{WITHOUT_TEMPORARIES}, {kind}"] = bytes_text(max(window.held_bytes))
    results |= _progress(report)
    return page.results(results)


def _progress(report: Report) -> dict[str, str]:
    """Return the duration, speed and learning rate, as far as they are known."""
    rows, results = report.rows, {}
    if seconds := [part.seconds for part in report.parts if part.seconds is not None]:
        results["duration"] = duration(sum(seconds))
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
    """Return a table of the parts of a resumed run."""
    if len(report.parts) < 2:
        return ""
    shown = report.parts[-_MOST_PARTS:]
    earlier = f" The {len(report.parts) - len(shown):,} parts before these are left out." if len(shown) < len(report.parts) else ""
    note = "The run was resumed. Each line is a part of the run. If a part was killed, its duration does not include the lost work. "
    note += "A pause lasts from the last step of the previous part to the first new step; steps in between were repeated." + earlier
    return f"<h3>History</h3>{page.scrolling(page.table('parts', *history.table(shown)))}{page.note(note)}"


def _stages(report: Report) -> str:
    if not report.stages:
        return ""
    kind, window = list(report.windows.items())[-1] if report.windows else ("", None)
    each = "microbatches" if report.plan is None or report.plan.counted.row_slices == 1 else "slices of microbatches"
    note = f"Times are medians over the {kind} {each}; busy is the share of time in which a stage computes or updates weights."
    return page.scrolling(page.table("numbers", *stage_times.table(report.stages, window))) + (page.note(note) if window else "")


def _loss(report: Report, picture: bytes | None) -> str:
    steps, losses = loss_curve.finite(report.rows, "loss")
    values = loss_curve.finite(report.rows, "val_loss")[1]
    missing = sum("loss" in row for row in report.rows) - len(losses)
    note = f" {missing} training losses were not finite and are left out." if missing else ""
    if picture is None:
        return page.note(f"No step of this run has a finite loss, so there is no curve.{note}")
    alt = "Losses over the steps."
    if len(losses):
        last = f"{losses[-1]:.3g} {report.unit}".strip()
        alt += f" Training: from {losses[0]:.3g} at step {steps[0]} to {last} at step {steps[-1]}."
    if len(values):
        alt += f" Validation: from {values[0]:.3g} to {values[-1]:.3g}."
    smoothed = len(losses) >= loss_curve.SMOOTHED_FROM
    of = "each batch" if loss_curve.logs_every_batch(report.rows) else "the batches that were logged"
    caption = f"The thin line is the loss of {of}, the thick one its running mean" if smoothed else f"The line is the loss of {of}"
    caption += "; the points are validation losses." if len(values) else "; there was no validation."
    if changes := history.changes_of_plan(report.parts)[-loss_curve.MOST_CHANGES :]:
        caption += " Dashed lines mark the steps at which the run continued with another plan."
        alt += " The plan changed at " + "; ".join(f"step {step}: {words}" for step, words in changes) + "."
    return page.figure(picture, "small", alt, f"{caption}{note}")


def _metrics_to_draw(report: Report) -> list[str]:
    """Return the validation metrics that have a finite value, at most `_MOST_METRICS`."""
    names = [name for name in loss_curve.metric_names(report.rows) if len(loss_curve.finite(report.rows, f"val_{name}")[0])]
    return names[:_MOST_METRICS]


def _metrics(report: Report, picture: bytes | None) -> str:
    names, drawn = loss_curve.metric_names(report.rows), _metrics_to_draw(report)
    if not names:
        return ""
    title = "<h3>Metrics of validation</h3>"
    if picture is None:
        return title + page.note("No metric of this run has a finite value.")
    values = {name: loss_curve.finite(report.rows, f"val_{name}")[1] for name in drawn}
    missing = sum(f"val_{name}" in row for row in report.rows for name in drawn) - sum(map(len, values.values()))
    note = f" {count(missing, 'value')} {'was' if missing == 1 else 'were'} not finite and left out." if missing else ""
    undrawn = len(names) - len(drawn)
    note += f" {count(undrawn, 'metric')} more {'is' if undrawn == 1 else 'are'} in metrics.jsonl." if undrawn else ""
    alt = "Metrics over the steps. " + " ".join(f"{name}: from {each[0]:.4g} to {each[-1]:.4g}." for name, each in values.items())
    caption = f"Each panel is a metric (eval.metrics) or the loss of a source, on validation data.{note}"
    return title + page.figure(picture, "small", alt, caption)


def _comparison_table(report: Report) -> str:
    if not report.windows:
        return page.note("No batches of this run were simulated or traced, so there is nothing to compare.")
    table = page.table("numbers", ("", *Comparison._fields[1:]), compare(report.predicted, report.measured, report.temporary))
    words = temporary_words(report.temporary)
    note = page.note(
        "The prediction simulates the schedule with the median times of each stage's computations in the same batches, and computes sizes "
        "from shapes; a ratio (measured / predicted) of 1 means an exact prediction. "
        + (f"{words[0].upper()}{words[1:]}. " if words else "")
        + " ".join(f"{name.capitalize()}: {count(window.batches, 'batch', 'es')}." for name, window in report.windows.items())
        + (f" {why}" if (why := why_slower(report.predicted, report.measured, report.processes)) else "")
        + (f" {report.slow}" if report.slow else "")
    )
    return f'<div class="beside">{table}{note}</div>'


def _timeline(report: Report, picture: bytes | None) -> str:
    if picture is None:
        return page.note("No batches of this run were simulated or traced, so there is no timeline.")
    caption = (
        "Each row is a rank, and time runs to the right. Grey means idle. The number in a box is the microbatch: a microbatch moves down "
        "through the forwards and up again through the backwards. The file trace.json next to this page shows the same in ui.perfetto.dev."
    ) + ("" if report.plan is None else numbers_words(report.plan))
    which = " and ".join(f"{name}, with a bubble of {share_text(window.bubble)}" for name, window in report.windows.items())
    return page.figure(picture, "wide", f"What each rank did, over time: {which}.", f"{_only(report)}{caption}")


def _memory(report: Report, picture: bytes | None) -> str:
    if picture is None:
        return page.note("The memory of the ranks was neither predicted nor measured, so there is no picture of it.")
    caption = "Each panel shows the memory that one rank holds over time, stacked by kind; the dashed line marks the maximum."
    most = "; ".join(f"rank {row.quantity.split()[-1]} {row.predicted} predicted, {row.measured} measured"
                     for row in compare(report.predicted, report.measured)[2:])  # fmt: skip
    return page.figure(picture, "wide", f"What each rank held in memory, over time, at most: {most}.", f"{_only(report)}{caption}")


def _only(report: Report) -> str:
    if report.measured is None:
        return "This is the prediction alone: the run was not traced. "
    return "This was measured; there is no prediction. " if report.predicted is None else ""


def _png(figure: "matplotlib.figure.Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
