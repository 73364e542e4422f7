"""Train every run of a sweep, one after the other (`jpipe sweep`)."""

import fnmatch
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jpipe import InputError
from jpipe.files import TEMPORARY, expanded, shown, write_atomically
from jpipe_train.checkpoint.run_folder import METRICS, is_training
from jpipe_train.config import config_file
from jpipe_train.config.config import Config, TrainConfig
from jpipe_train.console import interrupt
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count, printable
from jpipe_train.launch.local import child
from jpipe_train.launch.local.launch import GRACE, JOB, JPIPE
from jpipe_train.runs import comparing, differences
from jpipe_train.runs.grid import Combination, combinations
from jpipe_train.runs.listing import SWEEP
from jpipe_train.runs.reading import Run, read, saved_steps
from jpipe_train.runs.sweep_request import Request

_FREE = frozenset({"train.steps", "train.epochs", "log", "compile_cache"})  # a later call may change these keys and still continue a run
_TICK = 0.05  # seconds between two checks of the process


@dataclass(frozen=True)
class _Run:
    """A run of a sweep: its combination, its folder and its config."""

    combination: Combination
    path: Path
    config: Config

    @property
    def overrides(self) -> list[str]:
        return [*self.combination.overrides, f"run.dir={json.dumps(str(self.path))}"]


def main(request: Request, task: int | None = None) -> int:
    """Train the incomplete runs of a sweep, and compare all runs. With `task`, train only this run and compare nothing.

    Return the exit code: 1 if a run failed, or 128 plus the number of the signal that ended the sweep. Raise InputError, before training,
    if a combination is not a valid config, or a run folder has other content.
    """
    chosen = combinations(request)
    _check_task(task, len(chosen))
    folder = _folder(request)
    runs = [_run(request, folder, combination) for combination in (chosen if task is None else [chosen[task]])]
    pending = [run for run in runs if _is_pending(run)]
    _claim(folder, request)
    _say(f"sweep: {count(len(chosen), 'run')} in {shown(folder)}" + (f", {len(runs) - len(pending)} complete" if task is None else ""))
    failed: list[str] = []
    with interrupt.recorded() as signals:
        for number, run in enumerate(pending, 1):
            _say(f"run {number} of {len(pending)}: {run.combination.name}")
            code = _train(request, run, signals)
            if signals:
                _say(f"sweep: stopped by {signal.Signals(signals[0]).name}; the same command continues with the incomplete runs")
                return 128 + signals[0]
            if code:
                failed.append(run.combination.name)
                _say(f"run {run.combination.name} failed with exit code {code}" + ("; the sweep goes on" if number < len(pending) else ""))
    if task is None and (written := [run.path for run in runs if (run.path / METRICS).is_file()]):
        comparing.compare(written, folder / "compare.html", Reporter(1, 1, "steps"))
    for name in failed:
        _say(f"sweep: {name} failed; the same command tries it again")
    return 1 if failed else 0


def slurm_script(request: Request, task: int | None = None) -> str:
    """Return the script of a SLURM job array with a task for each run. Raise the InputErrors of `main`, or one if `task` is set."""
    if task is not None:
        raise InputError(
            where="sweep", expected="--slurm or --task", found="both", change="remove --task; the script that --slurm prints sets it"
        )
    chosen = combinations(request)
    for combination in chosen:
        _run(request, _folder(request), combination)
    words = ["jpipe", "sweep", request.config]
    words += [word for item in request.grid for word in ("--grid", item)]
    words += [word for item in request.overrides for word in ("--set", item)]
    words += [] if request.folder is None else ["--dir", request.folder]
    words += ["--allow-code"] if request.allow_code else []
    command = shlex.join(words)
    return f"""#!/bin/bash
#SBATCH --job-name=jpipe-sweep
#SBATCH --array=0-{len(chosen) - 1}
# Add what a run needs here, such as --time, --gpus and --cpus-per-task. A task that is started again resumes its run.
# After all tasks have ended, the same command without --task writes the comparison.
{command} --task "$SLURM_ARRAY_TASK_ID"
"""


def _check_task(task: int | None, number: int) -> None:
    if task is not None and not 0 <= task < number:
        raise InputError(where="--task", expected=f"0 to {number - 1}, one of the {count(number, 'run')}", found=task)


def _folder(request: Request) -> Path:
    return expanded(str(Path("sweeps", Path(request.config).stem)) if request.folder is None else request.folder, "sweep --dir")


def _run(request: Request, folder: Path, combination: Combination) -> _Run:
    """Return a run of the sweep, with its config read and checked."""
    path = folder / combination.name
    overrides = (*request.overrides, *combination.overrides, f"run.dir={json.dumps(str(path))}")
    return _Run(combination, path, config_file.load(request.config, overrides, allow_code=request.allow_code))


def _is_pending(run: _Run) -> bool:
    """Return whether a run must be trained or resumed.

    Raise InputError if the folder has a run with another config, a run that cannot be read, a run that another process is training, or a
    run that has ended without a checkpoint to continue from.
    """
    if is_training(run.path):  # the process may not have written anything yet
        raise InputError(f"sweep: another process is training in '{shown(run.path)}'; wait until it ends, or stop it")
    if not _has_results(run.path):  # the folder is empty, or a run was killed at its start
        return True
    try:
        found = read(run.path, whole=False)
    except InputError as error:
        raise InputError(
            f"sweep: the run in '{shown(run.path)}' cannot be read; restore its files, move it away, or choose another --dir: {error}"
        ) from None
    changed = [key for key in differences.table([found.config, config_file.record(run.config)]) if key not in _FREE]
    if changed:
        raise InputError(
            f"sweep: expected a run of this config in '{shown(run.path)}', found a run with other values for {', '.join(changed[:5])}; "
            "choose another --dir, or restore the config"
        )
    if _is_complete(found, run.config.train):
        return False
    if found.state.name == "complete" and not saved_steps(run.path):
        raise InputError(
            f"sweep: the run in '{shown(run.path)}' has ended and has no checkpoint to continue from; choose another --dir, or restore "
            "train.steps and train.epochs"
        )
    return True


def _has_results(path: Path) -> bool:
    """Return whether a folder has rows or a checkpoint of a run."""
    try:
        return os.stat(path / METRICS).st_size > 0 or bool(saved_steps(path))
    except FileNotFoundError:
        return bool(saved_steps(path))
    except OSError:
        return True


def _is_complete(found: Run, wanted: TrainConfig) -> bool:
    """Return whether a run has stopped early, or has done all the steps or epochs of its config."""
    if found.state.name != "complete":
        return found.state.name == "stopped early"
    if wanted.steps is not None:
        return found.done >= wanted.steps
    section = found.config.get("train")
    epochs = section.get("epochs") if isinstance(section, dict) else None
    return wanted.epochs is not None and isinstance(epochs, int | float) and epochs >= wanted.epochs


def _claim(folder: Path, request: Request) -> None:
    """Mark a folder as the folder of a sweep. Several tasks may do so at the same time.

    Raise InputError if the folder has other content, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / SWEEP).is_file():
            return
        others = [name for name in os.listdir(folder) if not fnmatch.fnmatch(name, TEMPORARY)]
        if others and not (folder / SWEEP).is_file():  # another task may have written the mark meanwhile
            raise InputError(
                where="sweep --dir", expected="a new or empty folder, or the folder of a sweep", found=f"other files in '{shown(folder)}'"
            )
        write_atomically(folder / SWEEP, json.dumps({"format": "jpipe-sweep/1", "config": request.config}, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"sweep --dir: cannot write '{shown(folder)}': {error.strerror}; choose another folder") from None


def _train(request: Request, run: _Run, signals: Sequence[int]) -> int:
    """Train a run in a child process and return its exit code. The first signal is passed on to the child, and a second signal kills it.

    On Linux the child is also killed if this process is killed.
    """
    overrides = [word for override in (*request.overrides, *run.overrides) for word in ("--set", override)]
    command = [*JPIPE, "train", request.config, *overrides, *(["--allow-code"] if request.allow_code else [])]
    # A run with the same value of JOB may start again in its folder if it ended before its first checkpoint.
    variables = {JOB: f"sweep {run.combination.name}", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(  # noqa: S603 - jpipe itself
        child.command(command), stdin=subprocess.DEVNULL, env=os.environ | variables, start_new_session=True
    )
    passed_on, deadline = 0, float("inf")
    try:
        while (code := process.poll()) is None:
            if len(signals) > passed_on:
                os.killpg(process.pid, signal.SIGKILL if passed_on else signals[0])
                passed_on, deadline = len(signals), min(deadline, time.monotonic() + GRACE)
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(_TICK)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return 128 - code if code < 0 else code


def _say(words: str) -> None:
    print(printable(words), flush=True)
