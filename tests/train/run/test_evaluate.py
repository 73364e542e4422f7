"""`jpipe evaluate` equals the whole model on all rows, counts each row once, and does not change the run."""

import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jpipe.checkpoints
from jpipe_lm.data import prepare
from jpipe_lm.models import layers
from jpipe_train import cli
from jpipe_train.checkpoint.weights import by_name, with_ema
from jpipe_train.config import config_file
from jpipe_train.console.progress import Reporter
from jpipe_train.data import data
from jpipe_train.data.sources import validation_names
from jpipe_train.losses import cross_entropy
from jpipe_train.run import loop
from jpipe_train.run.evaluate import Result, main
from jpipe_train.run.requests import EvaluateRequest
from tests.lm.models.running import applied
from tests.train.conftest import SENTENCE, changed

ROOT = Path(__file__).parents[3]
ROOT = Path(__file__).parents[3]
SEQ = 8
BASE = {
    "train": {"steps": 5, "batch_size": 4, "eval_every": 50, "eval_batches": 2, "trace_batches": 0},
    "eval": {"metrics": {"accuracy": "accuracy"}},
    "model": {"depth": 1, "width": 8, "heads": 2, "seq_len": SEQ},
    "plan": {"schedule": "pipedream_2bw", "num_stages": 2, "microbatches": 2},
    "optimizer": {"learning_rate": 0.05, "ema_decay": 0.9, "delay_correction": "predict"},
    "checkpoint": {"every": 2},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Train on documents with boundaries, so that some labels do not count, and return the paths of the run and both texts."""
    folder = tmp_path_factory.mktemp("evaluated")
    texts = folder / "texts"
    texts.mkdir()
    for i in range(50):
        (texts / f"{i}.txt").write_bytes(SENTENCE[: 1 + 7 * (i % 7)])
    other = folder / "other.txt"
    other.write_bytes(SENTENCE[::-1] + b"and more")  # 53 bytes: 6 windows, a batch of 4 and 2 rows
    fields = BASE | {"data": {"path": str(texts), "boundaries": "keep", "validation_fraction": 0.3}, "run": {"dir": str(folder / "run")}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "write_report", lambda *_: None)  # it takes longer than the run
        return SimpleNamespace(folder=folder, texts=texts, other=other, run=loop.main(changed(fields)).folder)


def at_once(run: Path, rows, step: int, weights="newest") -> Result:
    """Evaluate the whole model as one function, on all rows as one batch."""
    config = config_file.load_resolved(run / "config.yaml")
    stored_layers = jpipe.checkpoints.Checkpoint(run, step).read()
    arrays = by_name(stored_layers if weights == "newest" else with_ema(stored_layers, step))
    stack, params = layers.layers(config.model), {}
    for layer_id, shared in stack.ties.shared.items():
        arrays |= {f"{layer_id}/{path}": arrays["/".join(stack.ties.first[name])] for path, name in shared.items()}
    for name, array in arrays.items():
        *path, last = name.split("/")
        functools.reduce(lambda tree, key: tree.setdefault(key, {}), path, params)[last] = array
    inputs, labels = jax.tree.map(lambda *each: jnp.stack(each), *rows)
    outputs = applied(stack, stack.ties.split(params), inputs)
    (total, number), (hits, counted) = cross_entropy.loss(outputs, labels), cross_entropy.correct(outputs, labels)
    return Result(step, len(rows), len(rows), float(number), float(total / number), {"accuracy": float(hits / counted)})


def check_equal(actual: Result, expected: Result):
    assert (actual.step, actual.rows, actual.total, actual.labels) == (expected.step, expected.rows, expected.total, expected.labels)
    assert actual.loss == pytest.approx(expected.loss, rel=2e-6)
    assert actual.metrics == pytest.approx(expected.metrics, rel=1e-6)


def windows_of(text: bytes):
    """Compute each row's inputs and labels by hand."""
    whole = np.frombuffer(text, np.uint8).astype(np.int32)
    return [(whole[i : i + SEQ], whole[i + 1 : i + SEQ + 1]) for i in range(0, len(whole) - SEQ, SEQ)]


def held_out_rows(home):
    """Return the rows of the validation files with documents kept apart: labels that begin a document do not count."""
    names = sorted(path.name for path in home.texts.iterdir())
    parts = [(home.texts / name).read_bytes() for name in names if name in validation_names(names, 0.3)]
    begins = np.cumsum([0, *map(len, parts)])
    rows = []
    for i, (tokens, labels) in enumerate(windows_of(b"".join(parts))):
        at = np.isin(np.arange(i * SEQ + 1, (i + 1) * SEQ + 1), begins)
        segments = 1 + np.cumsum([False, *at[:-1]])
        rows.append(({"tokens": tokens, "segments": segments.astype(np.int32)}, np.where(at, np.int32(-1), labels)))
    return rows


def listed(folder: Path):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


@pytest.mark.exhaustive
@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize(
    ("plan", "step", "weights"),
    [
        ({}, None, "newest"),
        ({"schedule": "gpipe", "replicas": [1, 2]}, 4, "newest"),
        ({"num_stages": 1, "microbatches": 4}, 4, "ema"),
        ({"schedule": "pipedream", "num_stages": 3, "microbatches": 4, "replicas": [2, 1, 1]}, 2, "newest"),
    ],
)
def test_every_row_counts_once_and_the_run_is_unchanged(home, plan, step, weights):
    rows, before = held_out_rows(home), listed(home.run)
    assert len(rows) % 4 == 3, "one microbatch and a half are left"
    assert sum((labels < 0).sum() for _, labels in rows) > 5
    overrides = tuple(f"plan.{key}={value}" for key, value in plan.items())
    result = main(EvaluateRequest(str(home.run), step=step, weights=weights, overrides=overrides))
    check_equal(result, at_once(home.run, rows, step or 5, weights))
    assert listed(home.run) == before


@pytest.mark.slow
def test_evaluation_on_other_data_and_its_output(home, capsys):
    """The data are a single document, all of whose labels count."""
    rows = [({"tokens": tokens, "segments": np.ones(SEQ, np.int32)}, labels) for tokens, labels in windows_of(home.other.read_bytes())]
    expected = at_once(home.run, rows, 2)
    check_equal(main(EvaluateRequest(str(home.run), str(home.other), step=2)), expected)
    output = capsys.readouterr().out
    assert f"{home.run}, step 2; data: '{home.other}', 6 rows\n" in output
    assert re.search(rf"over 48 labels\s+loss, nats per byte +{expected.loss:.4f}\d*\s+perplexity +{math.exp(expected.loss):.3f}", output)


def test_some_batches_are_those_of_the_runs_own_validations(home):
    (last,) = [json.loads(line) for line in (home.run / "metrics.jsonl").read_text().splitlines()][-1:]
    result = main(EvaluateRequest(str(home.run), batches=2))
    assert (result.rows, result.loss, result.metrics) == (8, last["val_loss"], {"accuracy": last["val_accuracy"]})
    assert result.total == len(held_out_rows(home))


def test_ctrl_c_ends_the_command_with_a_message(home, capsys, monkeypatch, interruptible):
    def press(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("jpipe_train.run.evaluate.begin", press)
    assert cli.main(["evaluate", str(home.run)]) == 130
    assert capsys.readouterr().out.splitlines()[-1] == "interrupted"


@pytest.mark.exhaustive
def test_two_processes_find_the_same_plan(home):
    """The processes start from the command line, and each reads only the rows and layers of its stages."""
    command = [sys.executable, "-m", "jpipe_train.cli", "launch", "-n", "2", "--", "evaluate", str(home.run), "--wait-limit", "60"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, cwd=home.folder)
    assert ended.returncode == 0, ended.stderr
    expected = at_once(home.run, held_out_rows(home), 5)
    (loss,) = re.findall(r"loss, nats per byte +(\S+)", ended.stdout)
    (accuracy,) = re.findall(r"accuracy +(\S+)", ended.stdout)
    assert (float(loss), float(accuracy)) == pytest.approx((expected.loss, expected.metrics["accuracy"]), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "evaluate: expected checkpoints in 'nothing/checkpoints', but there is no folder 'nothing'"),
        (["run", "--step", "3"], "--step: expected one of 2, 4, 5, the checkpoints in 'run', found 3"),
        (["run", "--batches", "0"], "--batches: expected 1 or more, found 0; without --batches all"),
        (["run", "--data", "nothing"], "--data: 'nothing' does not exist; give a file, a folder or a glob\n"),
        (["run", "--set", "optimizer.ema_decay=null", "--weights", "ema"], "--weights: the run has no moving average of the weights"),
        (["run", "--set", "model.width=16"], "checkpoint: layer 'embed', parameters: expected 'position/embedding' as in the model"),
        (["run", "--set", "plan.stages=1"], "config.yaml --set plan.stages=1: unknown key 'plan.stages'"),
    ],
)
def test_an_impossible_evaluation_is_reported_in_one_line(home, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(home.folder)
    before = listed(home.run)
    assert cli.main(["evaluate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jpipe: ")
    assert message in error
    assert error.count("\n") == 1
    assert listed(home.run) == before


@pytest.mark.usefixtures("no_report")
@pytest.mark.exhaustive
def test_masked_tokens_are_evaluated_as_in_training(tmp_path):
    """Each row has its own label as well, the embedding is tied to the head, and logits are computed in chunks."""
    text = str(tmp_path / "text.txt")
    Path(text).write_bytes(SENTENCE * 20)
    prepare.make_tokenizer(prepare.Files([text]), 280, str(tmp_path / "t.json"), Reporter(1, 1, "bytes", Console(quiet=True)), "bert")
    keys = {"format": "text", "path": text, "tokenizer": str(tmp_path / "t.json"), "validation_fraction": 0.3, "objective": "masked"}
    fields = BASE | {"data": keys, "run": {"dir": str(tmp_path / "run")}}
    config = changed(fields, model={"kind": "bert", "vocab_size": 280, "seq_len": 24}, loss={"chunk": 16})
    run = loop.main(config).folder
    elements = data.held_out(config).validation.elements
    rows = [elements[i] for i in range(len(elements))]
    assert len(rows) % 4
    check_equal(main(EvaluateRequest(str(run))), at_once(run, rows, 5))
