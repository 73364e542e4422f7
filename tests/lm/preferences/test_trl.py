"""Losses, rewards and updates beside TRL: a tiny Llama, all pairs in each step."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from jpipe_lm.checkpoint.huggingface.write_weights import write_huggingface
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.config import config_file
from jpipe_train.run import loop
from tests import torch
from tests.lm.preferences.test_pairs import texts

ARGUMENTS = {"dpo": {"beta": 0.3}, "simpo": {"beta": 2.0, "gamma": 0.7}, "orpo": {"beta": 0.4}}
OPTIMIZERS = {
    "sgd": {"name": "sgd", "learning_rate": 0.5},
    "adamw": {"name": "adamw", "learning_rate": 0.01, "arguments": {"weight_decay": 0.1}},
}


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize(("loss", "optimizer"), [("dpo", "sgd"), ("dpo", "adamw"), ("simpo", "sgd"), ("orpo", "sgd")])
def test_three_steps_are_those_of_trl(loss, optimizer, tokenizer, tmp_path):
    shutil.copy(tokenizer, tmp_path / "tokenizer.json")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts(8)))
    torch.run("-m", "tests.lm.preferences.trl_program", tmp_path, loss, optimizer, needs="trl")
    path = str(tmp_path / "pairs.jsonl")
    data = {"format": "preferences", "path": path, "validation_path": path, "tokenizer": tokenizer}
    keys = {"data": data, "model": {"seq_len": 48}, "warm_start": {"file": str(tmp_path / "model")}, "run": {"dir": str(tmp_path / "run")}}
    keys |= {"loss": {"name": loss, "arguments": ARGUMENTS[loss]}, "optimizer": OPTIMIZERS[optimizer], "checkpoint": {"every": 3}}
    keys |= {"plan": {"schedule": "pipedream_flush", "num_stages": 2, "microbatches": 4}}
    keys |= {"train": {"steps": 3, "batch_size": 8, "eval_every": 1, "log_every": 1}}
    (tmp_path / "config.yaml").write_text(json.dumps(keys))
    folder = loop.main(config_file.load(tmp_path / "config.yaml")).folder
    ours = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    theirs = json.loads((tmp_path / f"{loss}-{optimizer}.json").read_text())
    names = {"chosen": "chosen_reward", "rejected": "rejected_reward", "margins": "margin", "accuracies": "accuracy"}
    for step, (one, other) in enumerate(zip(ours[: 1 if loss == "orpo" else 2], theirs, strict=False)):
        for name, ours_name in names.items():  # the last row of ours has the validation of the final weights
            np.testing.assert_allclose(one[f"val_{ours_name}"], other[f"rewards/{name}"], rtol=2e-4, atol=2e-4, err_msg=f"{name}, {step}")
    if loss == "orpo":  # TRL's cross-entropy is over the prompt as well, so that its updates differ
        beta = ARGUMENTS["orpo"]["beta"]
        expected = -theirs[0]["rewards/chosen"] / beta - beta * theirs[0]["log_odds_ratio"]
        np.testing.assert_allclose(ours[0]["loss"], expected, rtol=1e-4)
        return
    np.testing.assert_allclose([row["loss"] for row in ours], [row["loss"] for row in theirs], rtol=2e-4)
    write_huggingface(ExportRequest(str(folder), str(tmp_path / "export")), print)
    found, expected, before = (load_file(tmp_path / name / "model.safetensors") for name in ("export", f"{loss}-{optimizer}", "model"))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-5 if optimizer == "sgd" else 1e-4, err_msg=name)
        assert not np.allclose(before[name], array, atol=1e-4)
