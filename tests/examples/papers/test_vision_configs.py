"""The configs of the papers' image models: the full ones are planned, lowered and simulated, the small ones train."""

import io
from pathlib import Path

import jax
import pytest
import yaml
from rich.console import Console

import jpipe
from examples.papers.samples import make
from jpipe_planner import analyze
from jpipe_train import cli
from jpipe_train.config import config_file
from jpipe_train.console.progress import Reporter
from jpipe_train.plan.inputs import Request, read_topology
from jpipe_train.plan.profiling import Parts
from jpipe_train.plan.search import search
from jpipe_train.plan.simulate import plan_and_costs

CONFIGS = Path(__file__).parents[3] / "configs"
FULL = {"alexnet": (15, 1), "vgg16": (15, 1), "resnet50": (16,), "inception-v3": (8,)}
"""The replicas of each stage in the paper's plan."""


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Create the image sample, as a user would, and return its folder."""
    folder = tmp_path_factory.mktemp("papers")
    (folder / "samples" / "images").mkdir(parents=True)
    make.SAMPLES["images"](folder / "samples" / "images", 0)
    return folder


@pytest.fixture
def refuses_weights(monkeypatch):
    def refuse(*_):
        raise AssertionError("weights are made")

    monkeypatch.setattr(jpipe.Pipeline, "init", refuse)
    before = {id(array) for array in jax.live_arrays()}
    yield
    assert {id(array) for array in jax.live_arrays()} <= before


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize("name", FULL)
def test_a_full_config_is_simulated_under_the_papers_plan_without_its_weights_and_images(name, refuses_weights):
    config = config_file.load(CONFIGS / "papers" / f"{name}.yaml", allow_code=True)
    subject = plan_and_costs(config, compile=False)
    plan, costs = subject.plan, subject.costs
    assert plan.replicas == FULL[name]
    assert [stage.layers[0] for stage in plan.stages[1:]] == ["fc6"] * (plan.depth - 1)
    assert jpipe.simulate(jpipe.lower(plan, 2), costs).versions_alive


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name if name == "alexnet" else pytest.param(name, marks=pytest.mark.exhaustive) for name in FULL])
def test_a_full_config_is_planned_for_the_papers_cluster(name, refuses_weights):
    silent = Reporter(1, 1, "samples", Console(file=io.StringIO(), width=200))
    parts = Parts.of(config_file.load(CONFIGS / "papers" / f"{name}.yaml", allow_code=True), silent)
    topology = read_topology(str(CONFIGS / "topologies" / "cluster-a.yaml"))
    rows = parts.config.train.batch_size
    size = rows // parts.config.plan.microbatches
    profile = analyze(parts.stack, parts.rows, parts.loss, parts.rule, (size,), topology.device, precision=parts.precision)
    assert profile.ids == parts.stack.ids
    result = search(profile, topology, rows, Request(schedules=("pipedream", "pipedream_flush")), parts.config.uses_global_norm, silent)
    assert result.choice.ranked


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("alexnet", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FULL if name != "alexnet"),
    ],
)
def test_a_small_config_trains_some_steps_as_planned(name, samples, tmp_path, monkeypatch):
    monkeypatch.chdir(samples)
    few = ["train.steps=3", "train.eval_every=3", "train.eval_batches=1", "train.trace_batches=0", "checkpoint.every=null", "log=[]"]
    few += ["model.arguments.width=0.06"] if name == "alexnet" else []
    options = [f"--set={key}" for key in (*few, f"run.dir={tmp_path / 'run'}", "compile_cache=null", "train.log_every=1")]
    assert cli.main(["train", str(CONFIGS / "papers" / f"{name}-small.yaml"), "--allow-code", *options]) == 0
    rows = [yaml.safe_load(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["val_loss"] != rows[0]["val_loss"]
    assert 0 <= rows[-1]["val_top1"] <= rows[-1]["val_top5"] <= 1
