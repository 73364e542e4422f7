"""What a run came to: its report, and its last words."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import jax

import jpipe
from jpipe.files import shown
from train import data, report
from train.config import Config
from train.measure import Measure
from train.progress import Reporter
from train.run_folder import RunFolder
from train.terminal import count, first_line


@dataclass(frozen=True)
class Summary:
    """What a run came to: validation losses, the time it took; in process 0 where it was written, and the last measured window.

    Of a run that SIGTERM has ended there is no loss after it, and `steps` is that of the checkpoint with which it goes on.
    """

    steps: int
    val_loss_before: float
    val_loss_after: float | None
    seconds: float
    folder: Path | None
    predicted: jpipe.Window | None
    measured: jpipe.Window | None
    planned: tuple[report.Comparison, ...] = ()  # beside what the planner predicted


def write_report(config: Config, pipe: jpipe.Pipeline, folder: RunFolder, measure: Measure, reporter: Reporter) -> None:
    """Leave the pictures and the report of what there is; a run is worth more than its report, so nothing here stops it."""
    plan, devices, processes = pipe.plan, pipe.devices, jax.process_count()
    known = {
        "schedule": plan.schedule + (" with vertical sync" if plan.vertical_sync else ""),
        "stages": "; ".join(" ".join(stage.layers) for stage in plan.stages),
        **({"workers": _workers(plan)} if len(plan.workers) > plan.depth else {}),
        "batch": f"{config.train.batch_size} in {count(plan.microbatches, 'microbatch', 'es')}",
        "recomputation": ", ".join(dict.fromkeys(stage.recompute for stage in plan.stages)),
        "optimizer": config.optimizer.name,
        "steps": str(config.train.steps),
        "devices": f"{len(set(devices))} × {devices[0].device_kind}" + (f" in {processes} processes" if processes > 1 else ""),
        "seed": str(config.seed),
        "versions": f"jpipe {jpipe.__version__}, JAX {jax.__version__}",
    }
    unit = data.loss_unit(config).strip()
    try:
        with reporter.phase("drawing the report"):
            title = f"jpipe run {folder.path.name}"
            of_run = report.Report(title, known, folder.rows(), measure.predicted, measure.measured, unit, processes, plan.workers)
            report.write_report(folder.path, of_run)
    except OSError as error:
        reporter.say(
            f"report: cannot write in '{shown(folder.path)}': {error.strerror or error}; the run's own files are not touched by this"
        )
    except Exception as error:
        reporter.say(f"report: could not be drawn: {type(error).__name__}: {first_line(error)}")


def tell(summary: Summary, unit: str, reporter: Reporter) -> None:
    """The last words of a run."""
    if summary.measured is not None:
        reporter.table(("", *report.Comparison._fields[1:]), report.compare(summary.predicted, summary.measured))
        if why := report.why_slower(summary.predicted, summary.measured, jax.process_count()):
            reporter.say(why)
    if summary.planned:
        reporter.table(("", "planned", "measured", "ratio"), summary.planned)
    if summary.folder is None:
        return
    if summary.val_loss_after is None:
        reporter.say(
            f"stopped by SIGTERM; the checkpoint of step {summary.steps} is written, "
            f"and the same command with --set run.dir={shlex.quote(shown(summary.folder))} goes on there"
        )
        return
    drawn = (summary.folder / "report.html").is_file()
    reporter.say(
        f"{count(summary.steps, 'step')} in {summary.seconds:.0f} s: validation loss {summary.val_loss_before:.3f} → "
        f"{summary.val_loss_after:.3f}{unit}; the run is in {shown(summary.folder)}" + ("; open its report.html" if drawn else "")
    )


def _workers(plan: jpipe.Plan) -> str:
    """`0: stage 0, replica 0; …`."""
    return "; ".join(f"{w}: stage {s}, replica {replica}" for w, (s, replica) in enumerate(plan.workers))
