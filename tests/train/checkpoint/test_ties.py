"""A run with a parameter shared between stages: it resumes, is exported, and starts another run."""

import itertools
import re

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jpipe
import jpipe.checkpoints
from jpipe.runtime import _snapshot
from jpipe_train.assemble.build import build
from jpipe_train.checkpoint import export, warm_start
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.console.progress import Reporter
from jpipe_train.launch.team import Team
from jpipe_train.report.metrics_log import RunStopped
from jpipe_train.run import loop
from tests.jpipe.running import check_equal
from tests.train.checkpoint.test_resume import run_in_two, stop_before
from tests.train.conftest import changed


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(256, 8, rngs=rngs)
        self.bias = nnx.Param(jax.numpy.zeros(256))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.table.attend(x) + self.bias[...][None, None]


def model() -> jpipe.LayerStack:
    """Return the model that the config names."""
    layers = {"embed": lambda rngs: nnx.Embed(256, 8, rngs=rngs), "mix": lambda rngs: nnx.Linear(8, 8, rngs=rngs), "head": Head}
    return jpipe.LayerStack(layers, ties=[jpipe.Tie(("embed", "embedding"), ("head", "table/embedding"))])


@pytest.fixture
def config(tiny, monkeypatch) -> dict:
    monkeypatch.setattr(loop, "write_report", lambda *_: None)  # it takes longer than the run
    return tiny | {
        "model": {"target": f"{__name__}:model"},
        "optimizer": {"name": "adam", "learning_rate": 0.01, "ema_decay": 0.5},
        "train": tiny["train"] | {"steps": 5, "trace_batches": 0},
        "checkpoint": {"every": 2},
    }


@pytest.mark.parametrize("pattern", ["head/table/embedding", "!head/table/*"])
def test_a_pattern_that_matches_only_a_tied_copy_is_refused(config, pattern):
    """The pattern would match but have no effect, because the parameter has the name of its first place."""
    with pytest.raises(
        jpipe.InputError, match=f"optimizer.decay: no parameter matches '{re.escape(pattern)}'; the most similar names are "
    ):
        build(changed(config, optimizer={"name": "adamw", "decay": ["embed/*", pattern]}), Reporter(1, 1, "bytes"))


@pytest.mark.exhaustive
def test_it_is_resumed_exported_and_begins_another(config, tmp_path, monkeypatch):
    loop.main(changed(config))
    run_in_two(config | {"run": {"dir": str(tmp_path / "parts")}}, monkeypatch, 3)
    whole, parts = (jpipe.checkpoints.Checkpoint(tmp_path / name, 5).read() for name in ("run", "parts"))
    check_equal(parts, whole)
    for weights in ("newest", "ema"):
        export.write_file(ExportRequest(str(tmp_path / "run"), str(tmp_path / f"{weights}.safetensors"), weights=weights), lambda _: None)
    newest, average = (load_file(tmp_path / f"{weights}.safetensors") for weights in ("newest", "ema"))
    assert sorted(newest) == sorted(average) == ["embed/embedding", "head/bias", "mix/bias", "mix/kernel"]
    table = whole["embed shared embedding"]
    check_equal(newest["embed/embedding"], table["params"]["0"]["array"])
    check_equal(average["embed/embedding"], table["optimizer"]["weights_ema"])

    messages = []
    for source in ("newest.safetensors", "run"):
        fields = config | {"plan": {"schedule": "gpipe", "num_stages": 3, "microbatches": 2}}
        started = changed(fields, warm_start={"file": str(tmp_path / source), "mode": "strict"})
        pipe, batches = build(started, Reporter(1, 1, "bytes"))
        initial = warm_start.load(started, pipe, batches.train[0], Team(None), messages.append)
        params = pipe.params(pipe.init(jax.random.key(3), batches.train[0], initial))
        check_equal(np.asarray(params["embed"]["embedding"][...]), newest["embed/embedding"])
        check_equal(np.asarray(params["head"]["table"]["embedding"][...]), newest["embed/embedding"])
    assert all("warm start: 3 of 3 layers" in line for line in messages)


@pytest.mark.exhaustive
def test_copies_that_differ_end_the_run(config, monkeypatch):
    numbers = itertools.count()
    stop_before(monkeypatch, 4)  # once the first checkpoint is written
    loop_of_checksums = _snapshot.WorkerSnapshot.checksum
    monkeypatch.setattr(_snapshot.WorkerSnapshot, "checksum", lambda self, entry: loop_of_checksums(self, entry) ^ next(numbers))
    message = (
        r"^checkpoint of step 2: the copies of 'embed shared embedding' at stage 0 and at stage 1 are not .*; there is no complete one; "
    )
    with pytest.raises(RunStopped, match=message):
        loop.main(changed(config))
