"""End a run: mark its end in the run folder, print its summary, compare it with its plan, or report an error in one line."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jpipe
from jpipe.files import shown
from jpipe_train.checkpoint.run_folder import FolderChanged, RunFolder
from jpipe_train.config.run_settings import RunSettings
from jpipe_train.console.terminal import first_line, shortened
from jpipe_train.data import data
from jpipe_train.data.rows import Batch
from jpipe_train.launch.local import reported_progress
from jpipe_train.report.metrics_log import MetricsLog, NonFiniteLoss
from jpipe_train.report.performance import comparison
from jpipe_train.report.summary import Summary, name_of

_LONGEST_PLACES = 200  # characters that an error may use to name rows


def complete(
    summary: Summary, settings: RunSettings, plan: jpipe.Plan, sizes: Sequence[jpipe.programs.StageCost], folder: RunFolder
) -> Summary:
    """Mark in the run folder that the run has ended, or was saved at a signal.

    Return the summary, with the planner's prediction, if there is one; the folder then also has it beside the measurement.
    """
    if summary.stopped_by is not None:
        with contextlib.suppress(OSError):  # the checkpoint, which matters more, is written already
            folder.mark_end(summary.steps, settings.train.length, None, name_of(summary.stopped_by))
    else:
        early = None if summary.steps >= settings.train.length else summary.remarks.get("stopped early", f"at step {summary.steps}")
        folder.mark_end(summary.steps, settings.train.length, early)
    if summary.measured is None or plan.predicted is None:
        return summary
    measured = comparison.as_predicted(plan, summary.measured, sizes)
    folder.keep_planned(plan.predicted, measured)
    return dataclasses.replace(summary, planned=tuple(comparison.compare_with_plan(plan, plan.predicted, measured)))


@contextlib.contextmanager
def nonfinite_data_named(log: MetricsLog, batches: data.Batches, first: int) -> Iterator[None]:
    """If a `NonFiniteLoss` is the first loss of a run, name in the error the first batch's rows that are not finite."""
    try:
        yield
    except NonFiniteLoss as error:
        words = _nonfinite_words(batches[0]) if first == 0 and log.last_step < 0 else ""
        raise NonFiniteLoss(f"{error}{words}") from None


def _nonfinite_words(batch: Batch) -> str:
    """Return the end of a message that names, for each array of a batch, its first row with a nonfinite number; "" if all are finite."""
    places = []
    for name, tree in zip(("inputs", "targets"), batch, strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.inexact):
                finite = np.isfinite(np.asarray(leaf[: len(leaf)])).reshape(len(leaf), -1).all(axis=1)
                places += [] if finite.all() else [f"row {int(np.argmin(finite))} of {name}{jax.tree_util.keystr(path)}"]
    return f"; in the first batch, {shortened(' and '.join(places), _LONGEST_PLACES)} has such values" if places else ""


def left_words(folder: RunFolder, settings: RunSettings) -> str:
    """Return the end of a message about a failed run: what is saved and how to continue; "" if `jpipe launch` prints it itself."""
    words = f"; the steps logged so far are in {shown(folder.path)}"
    if reported_progress.VARIABLE in os.environ:
        return words
    saves = settings.checkpoint.every is not None
    return f"{words}; {reported_progress.goes_on(shown(folder.path), _newest(folder), saves=saves, in_python=settings.in_python)}"


def _newest(folder: RunFolder) -> int | None:
    """Return the step of the newest checkpoint in a run folder; None if there is no checkpoint, or the folder cannot be read."""
    from jpipe.checkpoints import steps

    try:
        return max(steps(folder.path), default=None)
    except (jpipe.InputError, OSError):
        return None


def _describe_newest(folder: RunFolder | None) -> str:
    """Return the end of a message about a changed run folder: its newest remaining checkpoint, or "" if the folder is unknown."""
    if folder is None:
        return ""
    newest = _newest(folder)
    return "; no checkpoint is left there" if newest is None else f"; its newest checkpoint is of step {newest}; the run resumes from it"


def reason(error: Exception, folder: RunFolder | None = None) -> str:
    """Return a one-line message for a device or disk error."""
    if isinstance(error, FolderChanged):
        return f"{error.strerror}{_describe_newest(folder)}"
    if isinstance(error, OSError):
        file = error.filename if isinstance(error.filename, str) else None
        if file is not None and (folder is None or not Path(file).is_relative_to(folder.path)):
            return f"'{file}' cannot be read or written: {error.strerror or error}"
        return f"the run folder cannot be written: {error.strerror or error}"
    message = first_line(error)
    if isinstance(error, jpipe.runtime.CopiesDiffer):
        return message
    hint = "; use more stages, recomputation or smaller microbatches" if "RESOURCE_EXHAUSTED" in message else ""
    return f"a device failed: {message}{hint}"
