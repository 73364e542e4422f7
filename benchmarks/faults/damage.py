"""Truncate, delete or change files of the newest checkpoint: the run must name the file and resume from the checkpoint before."""

import contextlib
import io
import itertools
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.runs import EVERY, KINDS, End, config_of, difference, end_of
from benchmarks.planner.markdown import print_table
from jpipe.checkpoints import steps
from jpipe_train.config.config import Config
from jpipe_train.run import loop

HOW = "cut off", "deleted", "changed"
PLAN = KINDS["2BW"] | {"num_stages": 2}
STOPPED, END = 3 * EVERY, 4 * EVERY  # steps


def main(folder: Path, runs: int, seed: int) -> list[dict[str, Any]]:
    """Damage, print and return the figures.

    Args:
        folder: where the runs are written.
        runs: how many damages.
        seed: of where they are.
    """
    whole = trained(folder / "whole", END)
    expected = end_of(whole)
    stopped = trained(folder / "stopped", STOPPED)
    results = []
    drawn = damages(newest(stopped), random.Random(seed))  # noqa: S311 - places, not secrets
    for number, (name, how, at) in enumerate(itertools.islice(drawn, runs)):
        again = folder / "again"
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(stopped, again / "run")
        damage(newest(again / "run") / name, how, at)
        wrong = outcome(again, name, expected)
        results.append({"file": name, "how": how, "at": at, "wrong": wrong})
        place = "" if how == "deleted" else f" at byte {at:,}"
        print(f"{number}: {name} {how}{place}: {wrong or 'file named, checkpoint before used, identical'}", flush=True)
    rows = [(how, *_counts([row for row in results if row["how"] == how])) for how in HOW]
    print_table(("damage", "checkpoints", "files", "named, and identical"), rows)
    return results


def newest(run: Path) -> Path:
    """Return the folder of the newest complete checkpoint of a run."""
    return run / "checkpoints" / str(steps(run)[-1])


def damages(place: Path, chance: random.Random) -> Iterator[tuple[str, str, int]]:
    """Yield file, kind and place of damages of a checkpoint, endlessly; every file has each kind before any has one again.

    Args:
        place: its folder.
        chance: what decides.
    """
    files = sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)
    while True:
        for path, how in chance.sample(pairs := list(itertools.product(files, HOW)), len(pairs)):
            yield path.relative_to(place).as_posix(), how, chance.randrange(path.stat().st_size)


def damage(path: Path, how: str, at: int) -> None:
    """Damage a file.

    Args:
        path: the file.
        how: one of `HOW`; changed: one bit is another.
        at: the byte from which the file is cut off, or which is changed.
    """
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << at % 8
    if how == "deleted":
        path.unlink()
    else:
        path.write_bytes(content if how == "changed" else content[:at])


def trained(folder: Path, until: int) -> Path:
    """Train a run of this many steps in `folder`."""
    config = Config.model_validate(config_of(folder, PLAN, until))
    with contextlib.redirect_stdout(io.StringIO()):
        loop.main(config)
    return folder / "run"


def outcome(folder: Path, name: str, expected: End) -> str | None:
    """Return what is wrong with the resumed run in the damaged `folder`, or None."""
    config = Config.model_validate(config_of(folder, PLAN, END))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            loop.main(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    words = printed.getvalue()
    resumed = re.search(r"resumes at step (\d+)", words)
    if resumed is None or int(resumed[1]) != STOPPED - EVERY:
        return f"resumed at step {resumed and resumed[1]}"
    if Path(name).name not in words:
        return "the file was not named"
    return difference(end_of(folder / "run"), expected, "end")


def _counts(rows: list[dict[str, Any]]) -> tuple[int, int, int]:
    return len(rows), len({row["file"] for row in rows}), sum(row["wrong"] is None for row in rows)
