"""Kill one of the four processes of a run at a random moment: the run must end like one without a kill."""

import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

from benchmarks.faults.runs import KINDS, LIMIT, STEPS, End, config_of, difference, end_of, last_words, launched
from benchmarks.planner.markdown import print_table
from jpipe.checkpoints.records import MARKER

PROCESSES = 4
MOMENTS = "before the first", "during a save", "between saves"
_EARLY = 1 / 8  # of the kills come while the processes start, which is most of the time of such a short run
_LOOK = 0.002  # seconds between two looks at the folder


class Kill(NamedTuple):
    """The result of a kill.

    Attributes:
        process: which one was killed.
        moment: one of `MOMENTS`.
        rows: that were logged by then.
        resumed: the step at which the run resumed; None: it started from step 0.
        wrong: the difference from the run without a kill, if any.
    """

    process: int
    moment: str
    rows: int
    resumed: int | None
    wrong: str | None


class _Pace(NamedTuple):
    """Seconds of the run without a kill: from the start of its processes to the first row, and from there to the last checkpoint."""

    starting: float
    training: float


def main(folder: Path, runs: int, seed: int, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Kill, print and return the figures.

    Args:
        folder: where the runs are written.
        runs: of each kind.
        seed: of the moments and of who is killed.
        names: kinds; none: all.
    """
    results = []
    for name in names or KINDS:
        config = config_of(folder / "alone", KINDS[name])
        expected, pace = _alone(config, folder / "alone")
        kills = []
        for number in range(runs):
            chance = random.Random(f"{seed} {name} {number}")  # noqa: S311 - moments, not secrets
            kills.append(_killed(name, folder / "killed", expected, pace, chance))
            print(f"{name} {number}: {_described(kills[-1])}", flush=True)
        results.append({"kind": name, "runs": len(kills), "identical": sum(kill.wrong is None for kill in kills)})
        results[-1] |= {moment: sum(kill.moment == moment for kill in kills) for moment in MOMENTS}
        results[-1] |= {"resumed at": _steps(kills), "wrong": [_described(kill) for kill in kills if kill.wrong]}
        shutil.rmtree(folder / "alone")
    head = ("kind", "runs", *MOMENTS, "resumed at", "identical")
    print_table(head, [[row[column] for column in head] for row in results])
    return results


def moment_of(run: Path) -> str:
    """Return what the run in the folder `run` is doing, one of `MOMENTS`."""
    folders = list((run / "checkpoints").glob("[0-9]*"))
    if any(not (folder / MARKER).exists() for folder in folders):
        return "during a save"
    return "between saves" if folders else "before the first"


def _alone(config: dict[str, Any], folder: Path) -> tuple[End, _Pace]:
    run = Path(config["run"]["dir"])
    with launched(config, folder, PROCESSES) as process:
        times = []
        for happened in (lambda: _started(process.pid), lambda: _rows(run), lambda: _is_done(run)):
            if not _wait(happened, process):
                raise _failed(folder)
            times.append(time.monotonic())
        if process.wait(LIMIT):
            raise _failed(folder)
    return end_of(run), _Pace(times[1] - times[0], times[2] - times[1])


def _killed(name: str, folder: Path, expected: End, pace: _Pace, chance: random.Random) -> Kill:
    """Kill a run; runs that end before the kill are not counted."""
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        early, share = chance.random() < _EARLY, chance.random()
        pause = share * (pace.starting if early else pace.training)
        config = config_of(folder, KINDS[name])
        if (kill := _kill(config, folder, chance.randrange(PROCESSES), early, pause)) is None:
            continue
        log = (folder / "log").read_text(encoding="utf-8", errors="replace")
        if resumed := re.search(r"resumes at step (\d+)", log):
            kill = kill._replace(resumed=int(resumed[1]))
        return kill._replace(wrong=kill.wrong or difference(end_of(Path(config["run"]["dir"])), expected, "end"))


def _kill(config: Mapping[str, Any], folder: Path, victim: int, early: bool, pause: float) -> Kill | None:
    """Start a run, kill one process some seconds after the start (`early`) or the first row, and wait for the end.

    Returns:
        The result, or None if the run ended first.
    """
    run = Path(config["run"]["dir"])
    with launched(config, folder, PROCESSES, restarts=1) as process:
        begun: Callable[[], object] = (lambda: _started(process.pid)) if early else (lambda: _rows(run))
        if not _wait(begun, process):
            raise _failed(folder)
        time.sleep(pause)
        moment, rows, numbers = moment_of(run), _rows(run), _started(process.pid)
        if _is_done(run):
            return None
        if numbers is None:
            raise _failed(folder)
        os.kill(numbers[victim], signal.SIGKILL)
        code = process.wait(LIMIT)
    return Kill(victim, moment, rows, None, f"exit code {code}: {last_words(folder)}" if code else None)


def _failed(folder: Path) -> RuntimeError:
    return RuntimeError(f"bench-faults: a run that nobody had killed failed: {last_words(folder)}")


def _wait(happened: Callable[[], object], process: Popen[bytes]) -> bool:
    """Wait until a condition holds.

    Returns:
        False if the launcher ended first.
    """
    end = time.monotonic() + LIMIT
    while not happened():
        if process.poll() is not None:
            return False
        if time.monotonic() > end:
            raise TimeoutError(f"bench-faults: waited {LIMIT:g} s")
        time.sleep(_LOOK)
    return True


def _started(launcher: int) -> list[int] | None:
    """Return the process ids by the number of the process, or None if not all have started."""
    children = {}
    try:
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"--process-id" in arguments:
                children[int(arguments[arguments.index(b"--process-id") + 1])] = int(child)
    except (FileNotFoundError, ProcessLookupError):  # one of them has just ended
        return None
    return [children[number] for number in range(PROCESSES)] if len(children) == PROCESSES else None


def _rows(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _is_done(run: Path) -> bool:
    return (run / "checkpoints" / str(STEPS) / MARKER).exists()


def _described(kill: Kill) -> str:
    resumed = "begins anew" if kill.resumed is None else f"resumes at step {kill.resumed}"
    where = f"process {kill.process} killed {kill.moment}, after {kill.rows} of {STEPS} rows"
    return f"{where}; {resumed}; {kill.wrong or 'identical'}"


def _steps(kills: Sequence[Kill]) -> str:
    """Format steps with their counts, such as `0 (2), 6 (5), 9`."""
    counted = sorted(Counter(kill.resumed or 0 for kill in kills).items())
    return ", ".join(str(step) if often == 1 else f"{step} ({often})" for step, often in counted)
