"""Runs with preferences: the reference that they keep, resumed runs, evaluations, adapters and the command line."""

import json
import math
import shutil

import numpy as np
import pytest

from jpipe import InputError
from jpipe_train import cli
from jpipe_train.config.config import Config
from jpipe_train.run import evaluate, loop
from jpipe_train.run.requests import EvaluateRequest
from tests.lm.preferences.test_pairs import MODEL, texts

pytestmark = pytest.mark.usefixtures("no_report")
METRICS = {"val_margin", "val_accuracy", "val_chosen_reward", "val_rejected_reward"}


@pytest.fixture
def config(tiny, tokenizer, tmp_path):
    """Return a function that returns a config with some sections changed."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in texts(23)))
    fields = {"format": "preferences", "path": str(path), "tokenizer": tokenizer, "validation_fraction": 0.3}
    whole = tiny | {"data": fields, "model": MODEL, "loss": {"name": "dpo", "arguments": {"beta": 0.5}}, "log": []}
    whole["plan"] = {"schedule": "pipedream_flush", "num_stages": 2, "microbatches": 2}
    whole["train"] = {"steps": 4, "batch_size": 4, "eval_every": 1, "eval_batches": 2, "log_every": 1}

    def of(**sections) -> Config:
        return Config.model_validate(whole | {name: whole.get(name, {}) | keys for name, keys in sections.items()})

    return of


def rows_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def kept(folder) -> dict[str, np.ndarray]:
    return {file.name: np.load(file) for file in (folder / "reference").iterdir()}


def test_a_run_begins_at_the_reference_and_a_resumed_one_has_the_same_numbers(config, tmp_path):
    whole = rows_of(loop.main(config(checkpoint={"every": 2})).folder)
    assert whole[0].keys() >= METRICS
    np.testing.assert_allclose(whole[0]["val_loss"], math.log(2), rtol=1e-6)
    assert {whole[0][name] for name in METRICS} == {0.0}
    assert whole[-1]["val_chosen_reward"] - whole[-1]["val_rejected_reward"] == pytest.approx(whole[-1]["val_margin"], abs=1e-6)
    assert abs(whole[-1]["val_margin"]) > 1e-3
    parts = {"run": {"dir": str(tmp_path / "parts")}, "checkpoint": {"every": 2}}
    folder = loop.main(config(**parts, train={"steps": 2})).folder
    before = kept(folder)
    assert sum(len(rows) for rows in before.values()) == 23
    assert all(np.isfinite(rows).all() and (rows < 0).all() for rows in before.values())
    loop.main(config(**parts))
    for one, other in zip(whole[2:], rows_of(folder)[2:], strict=True):
        assert {name: one[name] for name in ("loss", "val_loss", *METRICS)} == {
            name: other[name] for name in ("loss", "val_loss", *METRICS)
        }
    for file in (folder / "reference").iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(
        InputError, match=r"data: expected the rows with which the run in '.*parts' began, .*; restore the data, or start a new run"
    ):
        loop.main(config(**parts, train={"steps": 6}))


def test_an_evaluation_has_the_numbers_of_the_last_validation_and_makes_the_reference_of_other_pairs(config, tmp_path, capsys):
    folder = loop.main(
        config(
            checkpoint={"every": 4},
            data={"validation_path": str(tmp_path / "pairs.jsonl"), "validation_fraction": 0.05},
            train={"eval_batches": 10},
        )
    ).folder
    result = evaluate.main(EvaluateRequest(str(folder)))
    last = rows_of(folder)[-1]
    assert (result.rows, result.labels) == (23, 23)
    other = evaluate.main(EvaluateRequest(str(folder), data=str(tmp_path / "pairs.jsonl")))
    assert (other.loss, other.metrics) == (result.loss, result.metrics)
    shutil.rmtree(folder / "reference")
    again = evaluate.main(EvaluateRequest(str(folder), data=str(tmp_path / "pairs.jsonl")))
    np.testing.assert_allclose([again.loss, *again.metrics.values()], [result.loss, *result.metrics.values()], rtol=1e-5, atol=1e-6)
    assert "the reference's log-probabilities of 23 pairs" in capsys.readouterr().out
    assert result.metrics.keys() == {name.removeprefix("val_") for name in METRICS}
    assert last["val_accuracy"] == pytest.approx(result.metrics["accuracy"], abs=0.2)  # the last validation leaves out 3 rows


def test_adapters_have_their_base_as_reference_with_any_microbatches(config, tmp_path):
    first = loop.main(config(train={"steps": 2}, checkpoint={"every": 2})).folder
    found = []
    for name, sections in {
        "lora": {"tune": {"lora": {"rank": 2}}},
        "gpipe": {"plan": {"schedule": "gpipe", "microbatches": 1}, "data": {"path": str(tmp_path / "pairs.jsonl")}},
    }.items():
        run = {"run": {"dir": str(tmp_path / name)}, "warm_start": {"file": str(first)}, "train": {"steps": 1}}
        found.append(kept(loop.main(config(**run, **sections)).folder))
    assert found[0].keys() == found[1].keys() == kept(first).keys()
    for name, rows in found[0].items():
        np.testing.assert_allclose(found[1][name], rows, rtol=1e-5)
        assert not np.allclose(kept(first)[name], rows, rtol=1e-5)


def test_the_command_line_trains_without_a_reference_and_mixes_sources(config, tmp_path, capsys):
    sources = [{"path": str(tmp_path / "pairs.jsonl"), "name": name} for name in ("one", "two")]
    mixed = config(data={"path": None, "sources": sources}, loss={"name": "orpo"}, checkpoint={"every": 2})
    (tmp_path / "config.yaml").write_text(json.dumps(mixed.model_dump(mode="json", exclude_unset=True)))
    assert cli.main(["train", str(tmp_path / "config.yaml"), "--set", "train.steps=2"]) == 0
    assert rows_of(tmp_path / "run")[-1].keys() >= {*METRICS, "val_loss_one", "val_loss_two"}
    assert not (tmp_path / "run" / "reference").exists()
    command = ["train", str(tmp_path / "config.yaml"), "--set", "loss.name=dpo", "--set", f"run.dir={tmp_path / 'dpo'}"]
    assert cli.main([*command, "--set", "train.steps=1"]) == 0
    assert len(kept(tmp_path / "dpo")) == 2  # both sources have the same rows
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 0
    assert "chosen_reward" in capsys.readouterr().out
