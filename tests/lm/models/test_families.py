"""Small models of each family learn in a pipeline of two stages, with a flush and with delayed weights."""

import json

import numpy as np
import pytest

from jpipe_lm.config.huggingface import read_config
from jpipe_train.config import config_file
from jpipe_train.run import loop
from tests.lm.checkpoint.families import MODELS
from tests.train.conftest import SENTENCE


@pytest.mark.thinned(size=1, most=0, most_slow=0)
@pytest.mark.parametrize("schedule", ["pipedream_2bw", "pipedream_flush"])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_a_run_falls(name, schedule, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "write_report", lambda *_: None)
    architecture, content = MODELS[name]
    keys = read_config.parse({"architectures": [architecture], **content}).keys
    (tmp_path / "text.txt").write_bytes(SENTENCE * 100)
    sections = {
        "run": {"dir": str(tmp_path / "run")},
        "data": {"format": "bytes", "path": str(tmp_path / "text.txt"), "validation_fraction": 0.1},
        "train": {"steps": 50, "batch_size": 8, "eval_every": 50, "eval_batches": 1, "trace_batches": 0},
        "model": {**keys, "vocab_size": 256, "seq_len": 16, "init": "normal"},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 5},
        "plan": {"schedule": schedule, "num_stages": 2, "microbatches": 2},
        "log": [],
    }
    (tmp_path / "config.yaml").write_text(json.dumps(sections))
    run = loop.main(config_file.load(tmp_path / "config.yaml", [])).folder
    losses = [row["loss"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert len(losses) == 50
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 1.5
