"""Start a run with random weights, with weights from a file, or from a checkpoint."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

import jpipe
from jpipe.files import shown
from jpipe_train.assemble.meshes import mesh_words
from jpipe_train.checkpoint.history import LastStep
from jpipe_train.checkpoint.resume import Resume, Resumed
from jpipe_train.checkpoint.run_folder import RunFolder
from jpipe_train.config.config import Config
from jpipe_train.config.run_settings import RunSettings
from jpipe_train.console import interrupt
from jpipe_train.console.progress import Reporter
from jpipe_train.data import data
from jpipe_train.data.position import Ordered
from jpipe_train.launch.local import reported_progress
from jpipe_train.launch.team import Team


def report_resumed(resumed: Resumed, record: Mapping[str, Any], plan: jpipe.Plan, batches: data.Data, reporter: Reporter) -> None:
    """Print the step at which the run resumes, and what has changed since the checkpoint."""
    changes = resumed.changes(record)
    reporter.say(f"resumes at step {resumed.step}" + (f", with changed values of {', '.join(changes)}" if changes else ""))
    if "data.sources" in changes:
        reporter.say("data.sources has changed: earlier validations do not count for train.stop and checkpoint.best")
    if batches.first:
        assert isinstance(batches.train, Ordered)
        reporter.say(f"the training data continue at row {batches.train.position(resumed.step).total:,}")
    then, now = mesh_words(resumed.plan), mesh_words(plan)
    if then != now:
        reporter.say(f"meshes: {then} in the checkpoint, {now} now: numbers may differ by rounding")
    if versions := resumed.other_versions():
        reporter.say(f"the checkpoint was written with {' and '.join(versions)}: numbers may differ")


def initial_params(
    config: Config, pipe: jpipe.Pipeline, batches: data.Data, team: Team, resumed: Resumed | None, reporter: Reporter
) -> dict[str, Any] | None:
    """Return the parameters that `warm_start` names, or None for random parameters.

    Raise jpipe.InputError if they cannot be read, or do not match the model.
    """
    if config.warm_start.file is None:
        return None
    if resumed is not None:
        reporter.say("warm_start is ignored, because it is for new runs and this run resumes")
        return None
    from jpipe_train.checkpoint import warm_start

    return warm_start.load(config, pipe, batches.like, team, reporter.say)


def make_folder(settings: RunSettings, plan: jpipe.Plan, resume: Resume, resumed: Resumed | None, reporter: Reporter) -> RunFolder:
    """Create the run folder, or open the folder of a resumed run, and report it to the launcher.

    Ctrl-C waits meanwhile, so a folder is never half created.
    """

    def prepare(path: Path) -> None:
        if resumed is None:
            _start_checkpoints(settings, path, None)
        else:
            resumed.check_unchanged()

    with interrupt.delayed():
        folder = RunFolder(settings, plan, resumes=resumed is not None, anew=resume == "auto", prepare=prepare)
    reported_progress.begin(shown(folder.path), None if resumed is None else resumed.step, saves=settings.checkpoint.every is not None)
    if folder.begun_anew:
        reporter.say(f"the run in '{shown(folder.path)}' ended before its first checkpoint, so it starts again")
    return folder


def continue_folder(settings: RunSettings, folder: RunFolder, resumed: Resumed, say: Callable[[str], None]) -> LastStep | None:
    """Remove the rows of later steps from the folder of a resumed run, and rename the checkpoints of later steps.

    Return the last step that was logged before the run resumed; None if it is unknown.
    """
    with interrupt.delayed():
        rows = resumed.rows()
        last = folder.last_logged()
        renamed = _start_checkpoints(settings, folder.path, resumed.step)  # first: an unfinished checkpoint may have filled the disk
        folder.go_on(rows)
    if renamed:
        say(f"checkpoints of later steps are kept as {', '.join(renamed)} in '{shown(folder.path / 'checkpoints')}'")
    return None if last is None else LastStep(*last)


def check_shared(settings: RunSettings, folder: Path, team: Team, limit: float = 60.0) -> None:
    """Check that this process sees the run folder of process 0, into which all processes write, within `limit` seconds.

    A network file system may show new folders late. All processes call this.
    """
    checkpoints, end = folder / "checkpoints", time.monotonic() + limit
    with team.working("the run folder"):
        while settings.checkpoint.every is not None and not os.path.isdir(checkpoints):
            if time.monotonic() > end:
                raise jpipe.InputError(
                    f"run.dir: process {team.index} does not find '{checkpoints}', which process 0 has created; "
                    "choose a folder that all processes share"
                )
            time.sleep(0.1)


def _start_checkpoints(settings: RunSettings, folder: Path, step: int | None) -> list[str]:
    if settings.checkpoint.every is None:
        return []
    from jpipe.checkpoints import folders

    return folders.begin(folder, step)


def read_checkpoint(
    pipe: jpipe.Pipeline, batches: data.Data, team: Team, resumed: Resumed, *, fresh_optimizer: bool
) -> tuple[dict[str, Any] | None, str]:
    """Read the layers of this process's workers from the checkpoint; return them and "".

    If a process finds damage, all return None and a description of it. Raise jpipe.InputError if the checkpoint belongs to another model or
    optimizer.
    """
    from jpipe import checkpoints
    from jpipe.checkpoints.records import Damaged

    def read() -> dict[str, Any]:
        try:
            stand_ins = checkpoints.stand_ins(pipe, resumed.folder, resumed.step)
            pipe.check_layers(batches.like, stand_ins, resumed.step, fresh_optimizer=fresh_optimizer)
            return checkpoints.read(pipe, resumed.folder, resumed.step)  # the shapes are checked against the model first
        except Damaged as error:
            raise error.with_change("") from None  # the caller knows what the user can do

    resumed.check_precision(pipe.precision.params)
    resumed.check_bottlenecks(pipe.plan)
    return team.attempt(f"the layers of the checkpoint of step {resumed.step}", read, Damaged)


def begin(
    seed: int,
    pipe: jpipe.Pipeline,
    batches: data.Data,
    resumed: Resumed | None,
    initial: dict[str, Any] | None = None,
    state: jpipe.State | None = None,
    *,
    fresh_optimizer: bool = False,
) -> jpipe.State:
    """Compile the pipeline and return its state. A new run has random weights, or the parameters `initial`.

    If the run resumes, `initial` are the layers of its checkpoint. A new run with a `state` starts with it, and is already compiled. Raise
    jpipe.InputError if the checkpoint belongs to another model or optimizer.
    """
    if resumed is None and state is not None:
        return state
    key = jax.random.key(seed)
    if resumed is None:
        return pipe.init(key, batches.like, initial, buckets=batches.shapes)
    assert initial is not None
    return pipe.restore(key, batches.like, initial, resumed.step, fresh_optimizer=fresh_optimizer, buckets=batches.shapes)


def finish_labels(
    pipe: jpipe.Pipeline, batches: data.Data, state: jpipe.State | None, folder: Path, reporter: Reporter, *, writes: bool
) -> None:
    """Add the numbers of the initial model to labels that need them. A new run computes them, a resumed run reads them.

    Args:
        pipe: the compiled pipeline.
        batches: the data of the run.
        state: the initial state of a new run; None in a run that resumes.
        folder: the folder of the run.
        reporter: prints the progress.
        writes: whether this process writes into the folder.

    Raises:
        jpipe.InputError: a run that resumes has not kept the numbers of its rows.
    """
    for rows in batches.unfinished:
        if state is not None:
            rows.compute(pipe, state, len(jax.tree.leaves(batches.like)[0]), folder if writes else None, reporter)
        elif not rows.read(folder):
            raise jpipe.InputError(
                where="data",
                expected=f"the rows with which the run in '{shown(folder)}' began, with numbers of its initial model for them",
                found="other rows, or a folder without these numbers",
                change="restore the data, or start a new run with another run.dir",
            )
