"""Every example learns from its config and from Python."""

import importlib
import json
import re
from pathlib import Path

import jax
import pytest

from jpipe_train import cli

pytestmark = pytest.mark.usefixtures("reader_settings")

ROOT = Path(__file__).parents[3]
STEPS = {"mlp": 120, "conv_skips": 40, "lstm_dropout": 12, "linen_model": 60}


@pytest.fixture
def reader_settings(monkeypatch):
    """Set JAX's standard promotion and change to the root of the repository."""
    monkeypatch.chdir(ROOT)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_each_has_a_config_and_a_line_in_the_readme():
    named = re.findall(r"`jpipe train examples/(\w+)\.yaml( --allow-code)?`", (ROOT / "examples" / "README.md").read_text())
    assert {name for name, _ in named} == {path.stem for path in (ROOT / "examples").glob("*.yaml")}
    assert {name for name, has_code in named if has_code} == set(STEPS)


@pytest.mark.usefixtures("no_report")
@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize("name", STEPS)
def test_it_learns_from_its_config(name, tmp_path):
    config = ROOT / "examples" / f"{name}.yaml"
    assert f"# Command:  jpipe train examples/{name}.yaml --allow-code\n" in config.read_text()
    changes = [f"train.steps={STEPS[name]}", f"run.dir={tmp_path / 'run'}", "train.eval_batches=2"]
    assert cli.main(["train", f"examples/{name}.yaml", "--allow-code", *(word for change in changes for word in ("--set", change))]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["val_loss"] < 0.75 * rows[0]["val_loss"]


@pytest.mark.thinned(most=0, most_slow=0)
@pytest.mark.parametrize("name", [*reversed(STEPS)])
def test_it_runs_from_python(name, capsys):
    losses = []
    for steps in (1, STEPS[name]):
        importlib.import_module(f"examples.{name}").main(steps)
        losses.append(float(re.search(r"loss ([\d.]+)", capsys.readouterr().out)[1]))
    assert losses[1] < 0.75 * losses[0]
