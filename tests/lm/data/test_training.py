"""Each format trains through a pipeline of two stages and learns what one stage learns."""

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from jpipe_lm.data.document_files import Files
from jpipe_train import cli
from jpipe_train.config.config import Config
from jpipe_train.data import data
from jpipe_train.report.metrics_log import repeatable
from jpipe_train.run import loop
from tests.lm.data.conftest import SENTENCES, quiet
from tests.lm.data.prepared import prepare_files
from tests.train.conftest import changed

pytestmark = pytest.mark.usefixtures("no_report")

ROOT = Path(__file__).parents[3]


@pytest.fixture
def lines(tmp_path):
    """Write questions and answers; one answer is much longer than the others."""
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"what is {i}?", "answer": f"{i} is {i}" + " and so on" * (i % 8 == 0)} for i in range(80)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def of_format(tiny, documents, lines, tokenizer_files, tmp_path):
    """Return a function that returns a config for a format."""
    text = {"format": "text", "path": str(documents), "tokenizer": str(tokenizer_files["decoder"]), "validation_fraction": 0.3}

    def folder(kind: str) -> dict:
        prepare_files(Files([str(documents)]), str(tokenizer_files[kind]), str(tmp_path / "tokens"), quiet(), 0.3, 200)
        return {"format": "tokens", "path": str(tmp_path / "tokens")}

    def config(kind: str, **sections) -> Config:
        fields = {
            "text": lambda: text,
            "tokens": lambda: folder("decoder"),
            "prompts": lambda: text | {"format": "prompts", "path": str(lines)},
            "masked": lambda: folder("bert") | {"objective": "masked"},
        }[kind]()
        model = tiny["model"] | {"vocab_size": 300, "seq_len": 32, "kind": "bert" if kind == "masked" else "decoder"}
        return changed(tiny | {"data": fields, "model": model}, **sections)

    return config


def losses(config: Config) -> list[dict]:
    folder = loop.main(config).folder
    return [repeatable(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("prompts", "tokens"))])
def test_each_format_trains_with_two_stages(kind, of_format):
    run = {"steps": 12, "eval_every": 11, "eval_batches": 1, "trace_batches": 0}
    rows = losses(of_format(kind, train=run, optimizer={"learning_rate": 0.03}))
    assert abs(rows[0]["val_loss"] - math.log(300) - math.log(2) * (kind == "masked")) < 0.7
    assert rows[-1]["val_loss"] < rows[0]["val_loss"] - 0.7


@pytest.mark.exhaustive
def test_two_stages_learn_of_prompts_what_one_learns(of_format, tmp_path):
    """The microbatches have different numbers of counted labels."""
    run = {"steps": 3, "eval_every": 2, "trace_batches": 0}
    two = losses(of_format("prompts", train=run, plan={"schedule": "gpipe"}))
    (tmp_path / "run").rename(tmp_path / "two")
    one = losses(of_format("prompts", train=run, plan={"schedule": "naive", "num_stages": 1, "microbatches": 1}))
    for row, same in zip(two, one, strict=True):
        for key in row.keys() & {"loss", "val_loss"}:
            np.testing.assert_allclose(row[key], same[key], rtol=2e-5)


def test_only_answers_are_learned(of_format):
    dataset = data.load(of_format("prompts"))
    for i in range(3):
        inputs, labels = dataset.train[i]
        counted = labels[:] >= 0
        assert 0.2 < counted.sum() / (inputs["segments"][:] > 0).sum() < 0.9
        assert not (counted & (inputs["segments"][:] == 0)).any()


@pytest.mark.exhaustive
def test_a_run_on_prompts_resumes_at_its_position(of_format, tmp_path):
    config = of_format("prompts", train={"steps": 6, "eval_every": 6, "trace_batches": 0}, checkpoint={"every": 3})
    whole = losses(config)
    (tmp_path / "run").rename(tmp_path / "whole")
    loop.main(config.model_copy(update={"train": config.train.model_copy(update={"steps": 3})}))
    assert [row["loss"] for row in losses(config)] == [row["loss"] for row in whole]


@pytest.mark.exhaustive
def test_the_commands_of_the_page_lead_from_text_to_a_model(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "how-to" / "data.md").read_text()
    first = page[: page.index("\n## ")]
    commands = [shlex.split(command) for command in re.findall("^    jpipe (.*)$", first, re.MULTILINE)]
    assert [command[:2] for command in commands] == [["data", "tokenizer"], ["data", "prepare"], ["train", "configs/gpt-bytes.yaml"]]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", "configs")
    Path("notes").mkdir()
    for i in range(40):
        Path("notes", f"{i}.txt").write_text(f"{SENTENCES[i % 3]} {i}\n" * 20)
    small = (
        "train.steps=3 train.batch_size=4 model.seq_len=16 model.depth=1 model.width=8 model.heads=2 plan.num_stages=2 plan.microbatches=2"
    )
    commands[2] += [word for change in small.split() for word in ("--set", change)]
    for command in commands:
        assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "tokens: 40 documents, " in printed
    assert "data: 'tokens'; " in printed
    assert re.search(r"^step 2  loss \d", printed, re.MULTILINE)
