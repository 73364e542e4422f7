"""Where a run begins: at fresh weights, at given ones, or where a checkpoint left it."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jpipe
from jpipe.files import shown
from jpipe_train.assemble.meshes import mesh_words
from jpipe_train.checkpoint.resume import Resume, Resumed
from jpipe_train.checkpoint.run_folder import RunFolder
from jpipe_train.config.config import Config
from jpipe_train.console import interrupt
from jpipe_train.console.progress import Reporter
from jpipe_train.data import data
from jpipe_train.data.position import Ordered
from jpipe_train.launch.together import Together


def tell_resumed(resumed: Resumed, config: Config, plan: jpipe.Plan, batches: data.Data, reporter: Reporter) -> None:
    """Where the run goes on, and what is not as it was."""
    changes = resumed.changes(config)
    reporter.say(f"resumes at step {resumed.step}" + (f", with other values for {', '.join(changes)}" if changes else ""))
    if batches.first:
        assert isinstance(batches.train, Ordered)
        reporter.say(f"the training data go on at row {batches.train.position(resumed.step).total:,}")
    then, now = mesh_words(resumed.plan), mesh_words(plan)
    if then != now:
        reporter.say(f"meshes: {then} in the checkpoint, {now} now: numbers may differ by rounding")
    if others := resumed.other_versions():
        reporter.say(f"the checkpoint was written with {' and '.join(others)}: numbers may differ")


def starting_params(
    config: Config, pipe: jpipe.Pipeline, batches: data.Data, together: Together, resumed: Resumed | None, reporter: Reporter
) -> dict[str, Any] | None:
    """Those that the run begins with, if it is to begin with others than fresh ones.

    Raises:
        jpipe.InputError: they cannot be read, or do not fit.
    """
    if config.warm_start.file is None:
        return None
    if resumed is not None:
        reporter.say("warm_start is left aside: it is for a run that begins, and this one goes on")
        return None
    from jpipe_train.checkpoint import warm_start

    return warm_start.load(config.warm_start, pipe, batches.like, together, reporter.say)


def make_folder(config: Config, plan: jpipe.Plan, resume: Resume, resumed: Resumed | None, reporter: Reporter) -> RunFolder:
    """The run folder, whole or not at all, whenever Ctrl-C is pressed; that of a run that goes on as it is."""

    def prepare(path: Path) -> None:
        if resumed is None:
            _begin_checkpoints(config, path, None)
        else:
            resumed.check_unchanged()

    with interrupt.held():
        folder = RunFolder(config, plan, resumes=resumed is not None, anew=resume == "auto", prepare=prepare)
    if folder.begun_anew:
        reporter.say(f"the run in '{shown(folder.path)}' ended before its first checkpoint; it begins anew")
    return folder


def go_on(config: Config, folder: RunFolder, resumed: Resumed, say: Callable[[str], None]) -> None:
    """Take the run folder over, now that the checkpoint is read: what came after it will be written again."""
    with interrupt.held():
        rows = resumed.rows()
        kept = _begin_checkpoints(config, folder.path, resumed.step)  # first of all: an unfinished one may have filled the disk
        folder.go_on(rows)
    if kept:
        say(f"checkpoints of later steps are kept as {', '.join(kept)} in '{shown(folder.path / 'checkpoints')}'")


def check_shared(config: Config, folder: Path, together: Together, limit: float = 60.0) -> None:
    """Refuse a run folder that this process does not see, while process 0 has it: all write their checkpoints there.

    Args:
        config: of the run.
        folder: of the run.
        together: the processes of the run.
        limit: seconds to look for it; a file system of a network may take some to show what is new.

    Raises:
        jpipe.InputError: it does not exist.
    """
    place, end = folder / "checkpoints", time.monotonic() + limit
    with together.working("the run folder"):
        while config.checkpoint.every is not None and not os.path.isdir(place):
            if time.monotonic() > end:
                raise jpipe.InputError(
                    f"run.dir: process {together.index} finds no '{place}', which process 0 has made; "
                    "choose a folder that all processes share"
                )
            time.sleep(0.1)


def _begin_checkpoints(config: Config, folder: Path, step: int | None) -> list[str]:
    if config.checkpoint.every is None:
        return []
    from jpipe.checkpoints import files as checkpoint_files

    return checkpoint_files.begin(folder, step)


def read_checkpoint(
    config: Config, pipe: jpipe.Pipeline, batches: data.Data, together: Together, resumed: Resumed
) -> tuple[dict[str, Any] | None, str]:
    """The layers of this process's workers; or None and what is damaged, in all processes if one finds some of its layers damaged.

    Raises:
        jpipe.InputError: the checkpoint is of another model or optimizer.
    """

    def read() -> dict[str, Any]:
        pipe.check_layers(batches.like, resumed.stand_ins(pipe), resumed.step, fresh_optimizer=config.resume.optimizer == "reset")
        return resumed.layers(pipe)  # of the model's shapes, whoever wrote them

    from jpipe.checkpoints.records import Damaged

    resumed.check_precision(config)
    return together.attempt(f"the layers of the checkpoint of step {resumed.step}", read, Damaged)


def begin(
    config: Config,
    pipe: jpipe.Pipeline,
    batches: data.Data,
    resumed: Resumed | None,
    given: dict[str, Any] | None = None,
) -> jpipe.State:
    """Weights that are fresh, or those in `given`: parameters to begin with, or the layers of the checkpoint; everything compiled.

    Raises:
        jpipe.InputError: the checkpoint is of another model or optimizer.
    """
    key = jax.random.key(config.seed)
    if resumed is None:
        return pipe.init(key, batches.like, given, buckets=batches.shapes)
    assert given is not None
    fresh, layers = config.resume.optimizer == "reset", given
    return pipe.restore(key, batches.like, layers, resumed.step, fresh_optimizer=fresh, buckets=batches.shapes)
