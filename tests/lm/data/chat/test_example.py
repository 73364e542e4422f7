"""The example of ten conversations: its files are what the page says, and a model learns them, answers, and is exported."""

import io
import json
import sys
from pathlib import Path

import jax
import pytest

from jpipe_lm.checkpoint.huggingface import write_weights
from jpipe_train import cli
from jpipe_train.config import config_file
from jpipe_train.data import data
from tests.lm.data.chat.templates import template

ROOT = Path(__file__).parents[4]
MAKE = (
    "data tokenizer examples/chat/conversations.jsonl --format text --text-key none --vocab-size 384 --special <|im_start|> "
    "--special <|im_end|> --out"
)


def test_the_tokenizer_is_made_of_the_conversations_and_they_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert cli.main([*MAKE.split(), str(tmp_path / "tokenizer.json")]) == 0
    assert (tmp_path / "tokenizer.json").read_text() == Path("examples/chat/tokenizer.json").read_text()
    config = config_file.load("examples/chat.yaml")
    loaded = data.load(config)
    assert len(loaded.train.elements) > 0
    assert loaded.remarks == ()
    assert "; 5 and 5 rows of whole examples" in loaded.amount


def test_a_copied_config_brings_its_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["configs", "copy", "chat"]) == 0
    assert cli.main(["data", "show", "examples/chat.yaml", "--count", "1"]) == 0
    assert "[[Stages that work on different batches at once.<|im_end|>]]" in capsys.readouterr().out


def test_the_template_and_the_end_of_a_turn_are_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = config_file.load("examples/chat.yaml")
    assert write_weights._copy_tokenizer(config, tmp_path, pytest.fail) == " and the tokenizer"
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == Path("examples/chat/chat_template.jinja").read_text()
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert write_weights._end_of_text(config) == 2
    (tmp_path / "own.jinja").write_text(template("mistral", marked=True))
    own = config_file.load("examples/chat.yaml", [f"data.chat_template={tmp_path / 'own.jinja'}"])
    assert write_weights._end_of_text(own) == 0  # <|endoftext|>: bos_token is unknown, and eos_token the end of a text


@pytest.mark.exhaustive
def test_a_model_learns_the_conversations_and_answers(tmp_path, monkeypatch, capsys, no_report):
    jax.devices()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["configs", "copy", "chat"]) == 0
    assert cli.main(["train", "examples/chat.yaml", "--set", "train.trace_batches=0"]) == 0
    rows = [json.loads(line) for line in Path("runs/0001/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["val_loss"] < 0.1 < 5 < rows[0]["val_loss"]
    capsys.readouterr()
    stdin = io.TextIOWrapper(io.BytesIO(b"What is a stage?\nAnd a microbatch?\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli.main(["generate", "runs/0001", "--chat"]) == 0
    assert capsys.readouterr().out == "Some layers of a model on one device.\nA part of a batch.\n"
