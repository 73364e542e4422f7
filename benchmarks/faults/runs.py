"""Run tiny trainings that write checkpoints, and compare two of them."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jpipe.checkpoints
from jpipe_train.report.metrics_log import repeatable

ROOT = Path(__file__).parents[2]
LIMIT = 240.0  # seconds, for a run of some
STEPS, EVERY = 24, 3
_PARTS = {"model": "layers", "data": "data", "loss": "loss"}

KINDS: dict[str, dict[str, Any]] = {
    "GPipe": {"schedule": "gpipe", "num_stages": 4, "microbatches": 2},
    "Flush": {"schedule": "pipedream_flush", "num_stages": 4, "microbatches": 4},
    "PipeDream": {"schedule": "pipedream", "num_stages": 4, "microbatches": 1},
    "vertical sync": {"schedule": "pipedream", "num_stages": 4, "microbatches": 1, "vertical_sync": True},
    "2BW": {"schedule": "pipedream_2bw", "num_stages": 4, "microbatches": 4},
    "2-1-1": {"schedule": "pipedream", "num_stages": 3, "replicas": [2, 1, 1], "microbatches": 2},
}
"""Plans of four workers over the four layers of `benchmarks.faults.model`."""


class End(NamedTuple):
    """The result of a run.

    Attributes:
        rows: the rows of `metrics.jsonl`, without times.
        layers: its last checkpoint: weights, optimizer state and layer state by layer id.
    """

    rows: list[dict[str, Any]]
    layers: dict[str, Any]


def config_of(folder: Path, plan: Mapping[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """Return the config of a run of `benchmarks.faults.model` as plain data.

    Args:
        folder: the run is written in its folder `run`.
        plan: the section `plan`.
        steps: of the run.
    """
    return {
        **{name: {"target": f"benchmarks.faults.model:{function}"} for name, function in _PARTS.items()},
        "run": {"dir": str(folder / "run")},
        "train": {"steps": steps, "batch_size": 8, "eval_every": 6, "eval_batches": 1, "trace_batches": 0},
        "plan": dict(plan),
        "optimizer": {"name": "sgd", "learning_rate": 0.01, "arguments": {"momentum": 0.9}},
        "checkpoint": {"every": EVERY},
    }


@contextlib.contextmanager
def launched(config: Mapping[str, Any], folder: Path, processes: int, restarts: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """Run `jpipe launch` in a `with` statement; at its end the launcher and its processes have ended.

    Args:
        config: the run's, as plain data.
        folder: gets `config.yaml`, and what all processes print as `log`.
        processes: how many.
        restarts: how often all are started again when one fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    arguments = [
        "launch",
        "-n",
        str(processes),
        "--max-restarts",
        str(restarts),
        "--",
        "train",
        str(folder / "config.yaml"),
        "--allow-code",
    ]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        # Most of a tiny run is compiling, and all runs of a kind compile the same.
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-m", "jpipe_train.cli", *arguments], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.kill()  # on Linux its processes end with it
        process.wait()


def last_words(folder: Path) -> str:
    """Return the launcher's message about a run in this folder, or its last printed line."""
    lines = [line.strip() for line in (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    of_launcher = [line.removeprefix("jpipe: ") for line in lines if line.startswith("jpipe: ")]
    return "; then ".join(of_launcher or lines[-1:]) or "nothing"


def end_of(run: Path) -> End:
    """Return the result of the run in the folder `run`, after checking the hashes of its checkpoint."""
    rows = [repeatable(json.loads(line)) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return End(rows, jpipe.checkpoints.Checkpoint(run, jpipe.checkpoints.steps(run)[-1]).read())


def difference(actual: Any, expected: Any, where: str = "") -> str | None:
    """Return the first difference of two trees of dicts, sequences, arrays and plain values in dtypes, shapes and bits, or None."""
    if isinstance(expected, np.ndarray):
        same = isinstance(actual, np.ndarray) and (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        return None if same and actual.tobytes() == expected.tobytes() else f"{where}: other numbers"
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping) or actual.keys() != expected.keys():
            return f"{where}: other keys"
        pairs = [(f"{where}/{key}", actual[key], value) for key, value in expected.items()]
    elif isinstance(expected, (list, tuple)):
        if not isinstance(actual, type(expected)) or len(actual) != len(expected):
            return f"{where}: another length"
        pairs = [(f"{where}/{index}", one, other) for index, (one, other) in enumerate(zip(actual, expected, strict=True))]
    else:
        return None if actual == expected else f"{where}: {actual!r} in place of {expected!r}"
    return next((text for place, one, other in pairs if (text := difference(one, other, place))), None)
