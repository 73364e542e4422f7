"""The end of a run: write its report and print its closing lines."""

import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

import jpipe
from jpipe.files import shown
from jpipe_train.assemble.build import param_specs
from jpipe_train.assemble.delay import correction_words, delay_words
from jpipe_train.assemble.meshes import device_kinds, has_meshes, mesh_words
from jpipe_train.assemble.slices import slices_words
from jpipe_train.checkpoint.history import RunPart, optimizer_words
from jpipe_train.checkpoint.run_folder import FolderChanged, RunFolder
from jpipe_train.config.config import TrainConfig
from jpipe_train.config.run_settings import RunSettings
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count, duration, first_line
from jpipe_train.data.data import Data
from jpipe_train.launch.local import reported_progress
from jpipe_train.report import report
from jpipe_train.report.performance import comparison
from jpipe_train.report.performance.measure import Measure
from jpipe_train.report.performance.stage_times import Stage, slow_ranks, slow_words


@dataclass(frozen=True)
class Summary:
    """The result of a run: validation losses, duration and final state; in process 0 also the run folder and the last measured window.

    The losses are None in a run without validation. If the signal `stopped_by` ended the run, there is no final loss, and `steps` is the
    step of the checkpoint from which the run resumes. `temporary` is the result of `comparison.temporary_bytes`: for each rank the bytes
    that its programs need while they run. The `state` is drained; after a signal it may be some steps ahead of the checkpoint.
    """

    steps: int
    val_loss_before: float | None
    val_loss_after: float | None
    seconds: float
    folder: Path | None
    predicted: jpipe.programs.Window | None
    measured: jpipe.programs.Window | None
    planned: tuple[comparison.Comparison, ...] = field(default=(), repr=False)  # the comparison with the planner's prediction
    stopped_by: int | None = None
    temporary: tuple[int | None, ...] = field(default=(), repr=False)
    slow: str = field(default="", repr=False)  # the result of `slow_of`
    remarks: Mapping[str, str] = field(default_factory=dict, repr=False)  # why the run stopped early, and its best checkpoint
    state: jpipe.State | None = field(default=None, repr=False, compare=False)


def slow_of(pipe: jpipe.Pipeline, measured: jpipe.programs.Window | None) -> str:
    """Return a sentence about ranks that are slower than the others for the same work; "" if there are none, or no measurements."""
    if measured is None:
        return ""
    numbers = {device: n for n, device in enumerate(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))}
    places = [pipe.places[workers[0]] for workers in pipe.plan.rank_workers]
    devices = [tuple(numbers.get(device, 0) for device in place.devices) for place in places]
    return slow_words(slow_ranks(pipe.plan, measured), devices, [place.process_index for place in places])


def name_of(number: int) -> str:
    """Return the name of a signal as users know it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def write_report(
    settings: RunSettings,
    pipe: jpipe.Pipeline,
    folder: RunFolder,
    measure: Measure,
    reporter: Reporter,
    batches: Data,
    stages: Sequence[Stage],
    parts: Sequence[RunPart],
    temporary: Sequence[int | None] = (),
    remarks: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write the pictures and the report. An error is printed and does not stop the run."""
    plan, kinds, processes = pipe.plan, device_kinds(pipe), jax.process_count()
    train, (per_step, unit) = settings.train, settings.items
    facts_of_run = {
        "command": command_line(),
        "data": f"{batches.source}; {batches.amount}",
        "parameters": f"{sum(stage.parameters for stage in stages):,}",
        "schedule": plan.schedule + (" with vertical sync" if plan.vertical_sync else ""),
        **(
            {"delay": f"{words}; correction: {correction_words(pipe.delay_factor)}"}
            if (words := delay_words(plan, settings.accumulate_batches))
            else {}
        ),
        "stages": "; ".join(" ".join(stage.layers) for stage in plan.stages),
        **({"ranks": _ranks(plan)} if len(plan.rank_workers) != plan.depth else {}),
        **({"meshes": mesh_words(plan)} if has_meshes(plan) else {}),
        "batch": f"{train.batch_size} in {count(plan.microbatches, 'microbatch', 'es')}"
        + (f"; {words}" if (words := slices_words(pipe, batches.like)) else ""),
        "recomputation": ", ".join(dict.fromkeys(stage.recompute for stage in plan.stages)),
        "optimizer": optimizer_words(settings.record["optimizer"]),
        "steps": f"{train.length:,}{epochs_words(train)} of {per_step:,} {unit} each",
        **remarks,
        **({"duration": _durations(parts)} if len(parts) > 1 else {}),  # if there is only one part, the results have its duration
        "devices": f"{len(kinds)} × {kinds[0]}" + (f" in {processes} processes" if processes > 1 else ""),
        "seed": str(settings.seed),
        "versions": f"jpipe {jpipe.__version__}, JAX {jax.__version__}",
    }
    unit = settings.loss_unit.strip()
    try:
        with reporter.phase("drawing the report"):
            title, windows = f"jpipe run {folder.path.name}", (measure.predicted, measure.measured)
            slow = slow_of(pipe, measure.measured)
            contents = report.Report(title, facts_of_run, folder.rows(), *windows, unit, processes, plan, stages, parts, temporary, slow)
            report.write_report(folder.path, contents)
    except FolderChanged as error:
        reporter.say(f"report: not written, because {error.strerror}")
    except OSError as error:
        reporter.say(
            f"report: cannot write in '{shown(folder.path)}': {error.strerror or error}; the other files of the run are not affected"
        )
    except Exception as error:
        reporter.say(f"report: could not be drawn: {type(error).__name__}: {first_line(error)}")


def epochs_words(config: TrainConfig) -> str:
    """Return a text such as " (3 epochs)" that follows the number of steps; "" if the config sets the number of steps."""
    return "" if config.epochs is None else f" ({config.epochs:g} {'epoch' if config.epochs == 1 else 'epochs'})"


def stages_of(pipe: jpipe.Pipeline, batch: Any) -> list[Stage]:
    """Return the stages of a pipeline, each with the number of parameters of one replica."""
    specs = param_specs(pipe.stack, pipe.plan, batch)
    counts = {layer_id: sum(leaf.size for leaf in jax.tree.leaves(params)) for layer_id, params in specs.items()}
    plan = pipe.plan
    positions = [tuple((plan.rank_of[w], plan.rank_workers[plan.rank_of[w]].index(w)) for w in workers) for workers in plan.stage_workers]
    return [
        Stage(tuple(stage.layers), sum(counts[layer_id] for layer_id in stage.layers), of_stage)
        for stage, of_stage in zip(plan.stages, positions, strict=True)
    ]


def command_line() -> str:
    """Return the command line of this process."""
    program = Path(sys.argv[0]).name
    is_jpipe = program in ("jpipe", "cli.py")
    return shlex.join(["jpipe" if is_jpipe else program, *sys.argv[1:]])


def _durations(parts: Sequence[RunPart]) -> str:
    """Return a text such as `1:02` or `3:04 in 2 parts; interrupted for 0:12`."""
    known = [part.seconds for part in parts if part.seconds is not None]
    words = duration(sum(known)) + (f" in {len(parts)} parts" if len(parts) > 1 else "")
    pauses = [part.pause for part in parts if part.pause is not None]
    words += f"; interrupted for {duration(sum(pauses))}" if pauses else ""
    return words + (f", {len(parts) - len(known)} of them for an unknown time" if len(known) < len(parts) else "")


def print_summary(summary: Summary, settings: RunSettings, reporter: Reporter) -> None:
    """Print the closing lines of a run."""
    if summary.measured is not None:
        reporter.table(("", *comparison.Comparison._fields[1:]), comparison.compare(summary.predicted, summary.measured, summary.temporary))
        if words := comparison.temporary_words(summary.temporary):
            reporter.say(words)
        if why := comparison.why_slower(summary.predicted, summary.measured, jax.process_count()):
            reporter.say(why)
        if summary.slow:
            reporter.say(summary.slow)
    if summary.planned:
        reporter.table(("", "planned", "measured", "ratio"), summary.planned)
    if summary.stopped_by is not None and summary.folder is not None:
        words = reported_progress.goes_on(shown(summary.folder), summary.steps, in_python=settings.in_python)
        reporter.say(f"stopped by {name_of(summary.stopped_by)}; {words}")
        return
    for name, words in summary.remarks.items():
        reporter.say(f"{name}: {words}")
    words = f"{count(summary.steps, 'step')} in {summary.seconds:.0f} s"
    if summary.val_loss_before is not None and summary.val_loss_after is not None:
        words += f": validation loss {summary.val_loss_before:.3f} → {summary.val_loss_after:.3f}{settings.loss_unit}"
    if summary.folder is not None:
        drawn = (summary.folder / "report.html").is_file()
        words += f"; the run is in {shown(summary.folder)}" + ("; open its report.html" if drawn else "")
    reporter.say(words)


def _ranks(plan: jpipe.Plan) -> str:
    """Return a text such as `0: stage 0, replica 0; …` or `0: stages 0 2; …`."""
    replicated, words = len(plan.workers) > plan.depth, []
    for rank, workers in enumerate(plan.rank_workers):
        stages = " ".join(str(plan.workers[w][0]) for w in workers)
        replica = f", replica {plan.workers[workers[0]][1]}" if replicated else ""
        words.append(f"{rank}: stage{'s' if len(workers) > 1 else ''} {stages}{replica}")
    return "; ".join(words)
