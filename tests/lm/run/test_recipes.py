"""The recipes in configs/recipes: their plans are valid and fit their cards, and each runs small on a CPU."""

import json
import shlex

import jax
import pytest

from benchmarks.planner import recipes
from benchmarks.tables import DATA
from jpipe_train.config import config_file
from jpipe_train.run import loop
from tests.packages import ROOT

(TABLE,) = json.loads((DATA / "recipes.json").read_text(encoding="utf-8"))["tables"]
FIGURES = [dict(zip(TABLE["head"], row, strict=True)) for row in TABLE["rows"]]
HELD = {row["recipe"].partition("](")[0].strip("["): row for row in FIGURES}
FAST = "qwen3-0.6b-lora-2x24gb", "qwen3-8b-qlora-2x12gb"
LONG = "qwen3-8b-long-2x24gb"  # of 16 slices: to trace them takes minutes
MARKS = dict.fromkeys(FAST, ()) | {LONG: pytest.mark.exhaustive}
NAMES = [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in recipes.RECIPES]


@pytest.fixture
def promotion():
    """JAX's own attention promotes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_each_recipe_has_a_config_and_a_row_for_each_of_its_machines():
    assert {path.stem for path in recipes.FOLDER.glob("*.yaml")} == {*recipes.RECIPES}
    rows = [(row["recipe"].partition("](")[0].strip("["), row["cards"]) for row in FIGURES]
    assert rows == [(name, cards) for name, machines in recipes.RECIPES.items() for cards in machines]


@pytest.mark.usefixtures("promotion")
@pytest.mark.parametrize("name", NAMES)
def test_the_arrays_of_a_recipe_are_those_of_its_figures_and_fit(name):
    (machine, *_), row = recipes.RECIPES[name].values(), HELD[name]
    assert len(recipes.planned(name)[2].rank_workers) == machine.num_devices
    assert recipes.held_bytes(name) == int(row["held"]) < int(row["peak"]) < machine.device.limit


@pytest.mark.usefixtures("no_report", "promotion")
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs_small_on_a_cpu(name, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = [*recipes.changes(name, "Tiny"), "train.eval_batches=1", "train.trace_batches=0", "log=[]", "checkpoint.every=null"]
    changes[changes.index("data={}")] = f"data={{path: {text}, validation_fraction: 0.3}}"
    summary = loop.main(config_file.load(recipes.FOLDER / f"{name}.yaml", changes))
    assert summary.steps == 2
    assert summary.val_loss_after is not None


def test_the_page_has_the_commands_of_the_configs():
    page = (ROOT / "docs" / "how-to" / "recipes.md").read_text(encoding="utf-8").replace("\\\n", "")
    for kind, command in (("Offline", "simulate"), ("Tiny", "train")):
        (line,) = [line for line in page.splitlines() if line.startswith(f"    jpipe {command} configs/recipes/qwen3-8b-qlora-2x12gb.yaml")]
        assert [word for word in shlex.split(line)[3:] if "=" in word] == recipes.changes("qwen3-8b-qlora-2x12gb", kind)
