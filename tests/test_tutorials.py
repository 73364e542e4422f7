"""The commands of the tutorials, in order in an empty folder, print what the pages show; numbers and times may differ."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jpipe.schedules import SCHEDULES
from tests.packages import ROOT

LIMIT = 900  # seconds, of one command on a busy machine
PAGES = [ROOT / "docs" / "tutorials" / f"{name}.md" for name in ("first-run",)]
STEP = re.compile(
    r"^```yaml\n# (?P<file>\S+)\n(?P<content>.*?)^```\n"
    r"|^    (?P<command>jpipe (?:[^\n]*\\\n)*[^\n]*)\n(?:\n```\n(?P<shown>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


class Done(NamedTuple):
    """A command that ran."""

    command: str
    shown: list[str]
    printed: list[str]
    code: int
    seconds: float


def masked(line: str) -> str:
    """Return a line without what differs from run to run: numbers, units, schedules that were chosen, compiled programs that were kept."""
    line = re.sub(r" \(\d+ of \d+ programs from the cache\)", "", line)
    line = re.sub("|".join(sorted(SCHEDULES, key=len, reverse=True)) + "|data parallel", "@", line).replace("@ early", "@")
    line = re.sub(r"\d+(?:[.,:]\d+)*", "#", line)
    line = re.sub(r"# × # stages?|# stages?", "# stages", line)
    line = re.sub(r"# ([kMG]?B|ms|s|us|min|h)\b", "# unit", line)
    return " ".join(line.split())


def is_compared(command: str, line: str) -> bool:
    """Return whether a shown line is compared: rankings, the choice and generated text depend on the machine."""
    return line.startswith("jpipe: ") if "generate" in command else not re.match(r"\d+  |no pipeline pays here|chosen: |\^C|$", line)


def run(page: Path, folder: Path) -> Iterator[Done]:
    """Write the files of a page, and run its commands in order; where it shows ^C, press that once the line above it is printed."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200"}
    for step in STEP.finditer(page.read_text(encoding="utf-8")):
        if step["file"]:
            (folder / step["file"]).write_text(step["content"], encoding="utf-8")
            continue
        command, shown, began = step["command"].replace("\\\n", " "), (step["shown"] or "").splitlines(), time.monotonic()
        words = [sys.executable, "-m", "jpipe_train.cli", *shlex.split(command, comments=True)[1:]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "encoding": "utf-8"}
        with subprocess.Popen(words, cwd=folder, env=environment, **pipes) as process:
            printed = []
            last = shown[shown.index("^C") - 1] if "^C" in shown else None
            for line in process.stdout:
                printed.append(line.rstrip("\n"))
                if last is not None and line.split()[:2] == last.split()[:2]:  # such as: step 99
                    process.send_signal(signal.SIGINT)
                    last = None
            code = process.wait(LIMIT)
        yield Done(command, shown, printed, code, time.monotonic() - began)


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_tutorial_print_what_it_shows(page, tmp_path):
    total = 0.0
    for done in run(page, tmp_path):
        assert done.code == (130 if "^C" in done.shown else 0), "\n".join(done.printed)
        following = iter(masked(line) for line in done.printed)
        for line in done.shown:
            if is_compared(done.command, line):
                assert masked(line) in following, f"{done.command}: {line!r} is not next in\n" + "\n".join(done.printed)
        total += done.seconds
        print(f"{done.seconds:6.1f} s  {done.command}")
    print(f"{total:6.1f} s  {page.stem}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_shows_what_its_commands_print(page):
    steps = list(STEP.finditer(page.read_text(encoding="utf-8")))
    assert sum(1 for step in steps if step["command"]) >= 7
    named = {word for step in steps if step["command"] for word in shlex.split(step["command"]) if word.endswith(".yaml")}
    assert named == {step["file"] for step in steps if step["file"]}
    assert all(any(is_compared(step["command"], line) for line in step["shown"].splitlines()) for step in steps if step["shown"])


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("step 9  loss 4.675  13,038 tokens/s  bubble 58%  0:30 left", "step 99  loss 2.7  1,000 tokens/s  bubble 9%  1:10 left"),
        ("compiling 4 stages: 20.2 s", "compiling 4 stages: 1.6 s (26 of 29 programs from the cache)"),
        ("time of a step            60 ms    174 ms   2.90", "time of a step     1.2 s   3 s   2.50"),
        ("chosen: gpipe with 2 stages", "chosen: data parallel with 1 × 2 stages"),
        ("chosen: gpipe with 2 stages", "chosen: pipedream_flush early with 2 stages"),
        ("two  complete  50/50  3.148  pipedream_2bw, 4 stages  1:06  24 s", "two  complete  50/50  3.15  gpipe, 2 stages  0:59  2 min"),
    ],
)
def test_what_differs_from_run_to_run_is_masked(shown, printed):
    assert masked(shown) == masked(printed)
    assert masked(shown) != masked(f"{printed} or not")
