"""The script of all gates: what fails in the background ends it, and its last line says what was left out."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Stands for make: it logs its goals, and makes or fails to make an environment.
MAKE = """#!/bin/bash
echo "$* torch=${JPIPE_REQUIRE_TORCH:-}" >> log
case " $* " in *"$FAILS"*) exit 2 ;; esac
case $* in *"$LACKS"*) exit 0 ;; *ready) mkdir -p "$(dirname "$1")" && touch "$1" ;; esac
"""
NOTHING = "nothing"
GATES = "All gates passed"
SKIPPED = f"{GATES}, but these could not be installed, and their tests were skipped:"


def run(tmp_path, fails=NOTHING, lacks=NOTHING, python="python3.11"):
    """Run .ci/run with small programs in place of make and others, and return its exit code, its last line and what was made."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    browser = "exit 1" if fails == "browser" else ""
    for name, text in {
        "make": MAKE,
        ".ci/get-browser": f"#!/bin/sh\n{browser}\n",
        ".ci/find-python": f"#!/bin/sh\necho {python}\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILS": fails, "LACKS": lacks}
    done = subprocess.run([".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, (done.stdout.splitlines() or [""])[-1], (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "fails",
    [
        ".venv/ready",
        ".venv-oldest/ready",
        ".venv-targets/ready",
        ".venv-torch/ready",
        "browser",
        "test",
        "test-slow",
        " check ",
        "test-targets test-oldest",
    ],
)
def test_whatever_fails_ends_the_run(fails, tmp_path):
    code, line, _ = run(tmp_path, fails)
    assert code != 0
    assert GATES not in line


@pytest.mark.parametrize(
    ("lacks", "line"),
    [
        (NOTHING, f"{GATES}."),
        ("-targets/ready", f"{SKIPPED} XLA's compilers for GPUs and TPUs."),
        ("-torch/ready", f"{SKIPPED} PyTorch and transformers."),
    ],
)
def test_the_last_line_says_what_was_left_out(lacks, line, tmp_path):
    code, last, log = run(tmp_path, lacks=lacks)
    assert (code, last) == (0, line)
    assert ("test-slow torch=1" in log) == ("torch" not in lacks)


def test_without_python_3_11_its_tests_are_left_out(tmp_path):
    code, last, log = run(tmp_path, python="")
    assert (code, last) == (0, f"{SKIPPED} Python 3.11.")
    assert ".venv-oldest" not in log


RETRY = "WARNING: Retrying (Retry(total={}, connect=None)) after connection broken by 'NewConnectionError'"


@pytest.mark.parametrize(
    ("pip", "code", "ready"),
    [
        ("exit 0", 0, True),
        ('case "$*" in *=further*) exit 0 ;; *) exit 1 ;; esac', 0, True),
        ("echo 'ERROR: No matching distribution found for it==1' >&2; exit 1", 1, False),
        ("echo 'ERROR: No matching distribution found for it==1+cpu' >&2; exit 1", 0, False),
        (f'echo "{RETRY.format(1)}" >&2; exit 1', 1, False),
        (f'echo "{RETRY.format(0)}" >&2; exit 1', 0, False),
    ],
)
@pytest.mark.parametrize("required", ["", "1"])
def test_a_set_up_fails_unless_the_index_is_out_of_reach(pip, code, ready, required, tmp_path):
    (tmp_path / ".venv-it" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv-it" / "bin" / "python"
    python.write_text(f"#!/bin/bash\n{pip}\n")
    python.chmod(0o755)
    environment = os.environ | {"FURTHER_INDEX": "further", "JPIPE_REQUIRE_ENVIRONMENTS": required}
    command = [ROOT / ".ci" / "set-up", ".venv-it", "It", "it==1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (code if required else 0)
    assert (tmp_path / ".venv-it" / "ready").exists() == ready
    assert ready or "skipped" in done.stderr
