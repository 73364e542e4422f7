"""The Ray driver starts all processes on a local cluster, passes their exit codes on, and starts them again; needs `pip install ray`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DRIVER = ROOT / "examples" / "clusters" / "ray_train.py"
LIMIT = 300  # seconds: a local cluster takes ten to start

pytest.importorskip("ray", reason="Ray (100 MB) is not among the tools for development; pip install ray")


def run(tmp_path, *words, restarts=0):
    """Run the driver with a local cluster of two cores, and return its exit code and output."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'train'}:{ROOT / 'planner'}", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, DRIVER, "--processes", "2", "--max-restarts", str(restarts), "--", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_two_processes_train_on_a_cluster(tiny_config, tmp_path):
    code, output = run(tmp_path, "train", tiny_config)
    assert code == 0, output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_bad_input_is_not_started_again(tmp_path):
    code, output = run(tmp_path, "train", "missing.yaml", restarts=2)
    assert code == 2, output
    assert "starting all again" not in output
