"""Run programs that need PyTorch and its libraries in their own environment."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-torch" / "bin" / "python"


def run(*words: str | Path, needs: str = "transformers", request: str | None = None) -> str:
    """Run Python there and return what it prints, or skip the test if the module `needs` is not installed.

    With `JPIPE_REQUIRE_TORCH` in the environment the test fails instead.

    Args:
        words: the arguments of Python.
        needs: a module.
        request: what standard input gives.
    """
    if not PYTHON.exists() or subprocess.run([PYTHON, "-c", f"import {needs}"], capture_output=True, check=False).returncode:
        (pytest.fail if os.environ.get("JPIPE_REQUIRE_TORCH") else pytest.skip)(
            f"{needs} is needed in .venv-torch: `make .venv-torch/ready`"
        )
    command = [PYTHON, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, input=request, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
