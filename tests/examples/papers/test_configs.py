"""The configs of the papers' sequence models: the full ones are planned, lowered and simulated, the small ones train."""

import io
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml
from rich.console import Console

import jpipe
from examples.papers.models.awd_lm import awd_lm
from examples.papers.samples import make
from jpipe_lm.data import prepare, texts
from jpipe_planner import analyze
from jpipe_train import cli
from jpipe_train.config import config_file
from jpipe_train.console.progress import Reporter
from jpipe_train.plan.inputs import Request, read_topology
from jpipe_train.plan.profiling import Parts
from jpipe_train.plan.search import search
from jpipe_train.plan.simulate import plan_and_costs
from tests.examples.papers import test_vision_configs as vision_configs

CONFIGS = Path(__file__).parents[3] / "configs"
FULL = {
    **{"gnmt-8": "cluster-a", "gnmt-16": "cluster-a", "awd-lm": "v100-16gb-8", "s2vt": "cluster-c"},
    **{"bert-355m": "v100-16gb-8", "gpt-355m": "v100-16gb-8"},
}
"""The small configs that train in `make test`, beside AlexNet's."""


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Create the samples and a BERT tokenizer, as a user would, and return their folder."""
    folder = tmp_path_factory.mktemp("papers")
    for name in ("translation", "words", "captions"):
        (folder / "samples" / name).mkdir(parents=True)
        make.SAMPLES[name](folder / "samples" / name, 0)
    words = prepare.Files([str(folder / "samples" / "words" / "train.txt")], "text", texts.Keys())
    prepare.make_tokenizer(words, 400, str(folder / "samples" / "bert.json"), silent(), "bert")
    return folder


def silent():
    return Reporter(1, 1, "samples", Console(file=io.StringIO(), width=200))


@pytest.fixture
def samples_folder(samples, monkeypatch):
    monkeypatch.chdir(samples)


def load(name, *overrides):
    of_sample = ["data.arguments.features=32"] if name == "s2vt" else []
    return config_file.load(CONFIGS / "papers" / f"{name}.yaml", [*of_sample, *overrides], allow_code=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FULL)
def test_a_full_config_is_planned_and_simulated_without_its_weights(name, samples_folder, monkeypatch):
    def refuse(*_):
        raise AssertionError("weights are made")

    monkeypatch.setattr(jpipe.Pipeline, "init", refuse)
    arrays = {id(array) for array in jax.live_arrays()}
    config = load(name)
    subject = plan_and_costs(config, compile=False)
    plan, costs = subject.plan, subject.costs
    prediction = jpipe.simulate(jpipe.lower(plan, 6, **jpipe.programs.uses_by_costs(costs)), costs)
    assert max(prediction.held_bytes) < 16 * 2**30
    parts = Parts.of(config, silent())
    topology = read_topology(str(CONFIGS / "topologies" / f"{FULL[name]}.yaml"))
    rows = config.train.batch_size
    size = rows // config.plan.microbatches
    profile = analyze(parts.stack, parts.rows, parts.loss, parts.rule, (size // 2, size), topology.device, precision=parts.precision)
    schedules = (config.plan.schedule,) if name.endswith("355m") else ()  # of so many microbatches the search of all would take minutes
    request = Request(up_to=True, replicas=not parts.stack.carries_rows, schedules=schedules)
    result = search(profile, topology, rows, request, config.uses_global_norm, silent())
    assert result.choice.ranked
    if parts.stack.carries_rows:
        assert all(max(candidate.replicas) == 1 for candidate in result.candidates)
    assert {id(array) for array in jax.live_arrays()} <= arrays


@pytest.mark.exhaustive  # `make check` trains one of them
@pytest.mark.parametrize(
    "name", [pytest.param(f"{name}-small", id=name) for name in ("gnmt-8", "gnmt-16", "awd-lm", "bert", "gpt", "s2vt")]
)
def test_a_small_config_trains_some_steps_as_planned(name, samples_folder, tmp_path, capsys):
    few = ["train.steps=6", "train.eval_every=6", "train.eval_batches=1", "train.trace_batches=0", "checkpoint.every=null", "log=[]"]
    options = [f"--set={key}" for key in (*few, f"run.dir={tmp_path / 'run'}", "compile_cache=null", "train.log_every=1")]
    assert cli.main(["train", str(CONFIGS / "papers" / f"{name}.yaml"), "--allow-code", *options]) == 0
    rows = [yaml.safe_load(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(6))
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]


def test_each_config_is_tested():
    full = {*FULL, *vision_configs.FULL}
    assert {path.stem for path in (CONFIGS / "papers").iterdir()} == full | {f"{name.removesuffix('-355m')}-small" for name in full}


def test_replicas_are_refused_where_rows_carry_state(samples_folder, capsys):
    options = [f"--set=plan.{key}" for key in ("replicas=2", "microbatches=2", "num_stages=1")]
    assert cli.main(["train", str(CONFIGS / "papers" / "awd-lm-small.yaml"), "--allow-code", *options]) == 2
    assert "plan.replicas: expected 1 for each stage, because layers carry the state of each row" in capsys.readouterr().err
    assert not awd_lm(32, carries=False).carries_rows


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_processes_train_as_one(samples, tmp_path):
    def losses(name, *launch):
        few = ["train.steps=4", "train.eval_every=4", "train.trace_batches=0", "log=[]", "data.arguments.length=8"]
        options = [f"--set={key}" for key in (*few, f"run.dir={tmp_path / name}")]
        train = ["train", str(CONFIGS / "papers" / "awd-lm-small.yaml"), "--allow-code", *options]
        command = [sys.executable, "-m", "jpipe_train.cli", *launch, *train]
        subprocess.run(
            command, check=True, timeout=300, cwd=samples, env=os.environ | {"PYTHONPATH": str(CONFIGS.parent), "JAX_PLATFORMS": "cpu"}
        )
        rows = [yaml.safe_load(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows]

    assert losses("two", "launch", "-n", "2", "--") == losses("one")
