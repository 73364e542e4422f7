"""Runs that classify pairs of sentences and choose answers learn far more than chance, with and without a delay."""

import json
import re

import pytest

from jpipe_lm.data import prepare, texts
from jpipe_train import cli
from jpipe_train.run import loop
from tests.lm.data.conftest import quiet
from tests.lm.run import judged_texts
from tests.train.conftest import changed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_report")]

MODEL = {"preset": "bert-tiny", "vocab_size": 400, "width": 32, "heads": 2, "depth": 1, "mlp_width": 64, "max_positions": 32, "seq_len": 32}
TASKS = {
    "pairs": (
        {"text_key": "premise", "second_key": "hypothesis"},
        {"head": "classification", "labels": list(judged_texts.LABELS)},
        {"accuracy": "accuracy", "f1": "f1_macro"},
    ),
    "questions": (
        {"text_key": "article", "second_key": "question", "choices_key": "options", "label_key": "answer"},
        {"head": "multiple_choice", "labels": list("ABCD")},
        {"accuracy": "accuracy"},
    ),
}
SCHEDULES = {"flush": {"schedule": "gpipe", "num_stages": 1, "microbatches": 1}, "2bw": {"schedule": "pipedream_2bw", "num_stages": 2}}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Write the data and a tokenizer for them."""
    folder = tmp_path_factory.mktemp("judged")
    judged_texts.write(folder)
    as_text = prepare.Files([str(folder / "*.jsonl")], "text", texts.Keys(None))
    prepare.make_tokenizer(as_text, 400, str(folder / "tokenizer.json"), quiet(), "bert")
    return folder


def config(home, run, task: str, schedule: str, steps: int = 120):
    keys, model, metrics = TASKS[task]
    fields = {"format": "labels", "path": str(home / f"{task}.jsonl"), "tokenizer": str(home / "tokenizer.json"), **keys}
    return changed(
        {
            "run": {"dir": str(run)},
            "data": fields | {"validation_fraction": 0.1},
            "train": {"steps": steps, "batch_size": 32, "eval_every": 500, "eval_batches": 4, "trace_batches": 0},
            "eval": {"metrics": metrics},
            "model": {**MODEL, **model},
            "plan": {"microbatches": 4, **SCHEDULES[schedule]},
            "optimizer": {"learning_rate": 4e-3, "warmup_steps": 20},
            "checkpoint": {"every": None},
        }
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["2bw", pytest.param("flush", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("task", ["pairs", pytest.param("questions", marks=pytest.mark.exhaustive)])
def test_a_run_learns_the_task(task, schedule, home, tmp_path):
    folder = loop.main(config(home, tmp_path / "run", task, schedule)).folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["val_accuracy"] > 0.8
    assert rows[0]["val_accuracy"] < 0.6
    assert all(0 <= row.get("val_f1", 0) <= 1 for row in rows)


def test_evaluate_prints_the_metrics_and_generate_refuses_the_model(home, tmp_path, capsys):
    """Fewer examples than a batch are held out: two microbatches, of which one has each of its examples eight times."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join((home / "pairs.jsonl").read_text().splitlines(keepends=True)[:13]))
    fields = config(home, tmp_path / "run", "pairs", "2bw", steps=3).model_dump(exclude_unset=True)
    keys = {name: value for name, value in fields["data"].items() if name != "validation_fraction"}
    one = changed(fields | {"data": keys | {"validation_path": str(few)}, "optimizer": {"name": "sgd"}}, checkpoint={"every": 3})
    folder = loop.main(one).folder
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    capsys.readouterr()
    assert cli.main(["evaluate", str(folder)]) == 0
    printed = "".join(capsys.readouterr())
    assert "13 rows" in printed
    for name, key in (("loss, nats per label", "val_loss"), ("accuracy", "val_accuracy"), ("f1", "val_f1")):
        assert float(re.search(rf"{name} +([\d.e-]+)", printed)[1]) == pytest.approx(last[key], rel=1e-5)
    assert cli.main(["evaluate", str(tmp_path / "run"), "--data", str(home / "pairs.jsonl")]) == 0
    printed = capsys.readouterr()
    assert re.search(
        r"1,500 rows(.|\n)*over 1,500 labels(.|\n)*loss, nats per label +1\.\d+(.|\n)*accuracy +0\.\d+\n.*f1 +0\.\d+",
        printed.out + printed.err,
    )
    assert cli.main(["generate", str(tmp_path / "run"), "--prompt", "a fox"]) == 2
    assert "expected a language model, found model.head classification in" in capsys.readouterr().err
