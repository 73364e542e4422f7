"""Rows of training data have numbers, by which both ends of a cut know them again in each epoch (`plan.links.rows`)."""

import json
import re

import grain
import jax
import numpy as np
import pytest

import jpipe
import jpipe_train
from jpipe import InputError
from jpipe.checkpoints import files as checkpoint_files
from jpipe.checkpoints import orbax_item
from jpipe_train import cli
from jpipe_train.checkpoint import export
from jpipe_train.config.config_file import to_yaml
from jpipe_train.data import data
from jpipe_train.data.batched.order import Shuffled
from jpipe_train.data.rows import BatchesOfRows
from jpipe_train.run import evaluate, loop
from jpipe_train.run.starting import begin
from tests.jpipe.running import check_equal
from tests.train.checkpoint.test_resume import run_in_two, weights_of
from tests.train.conftest import changed
from tests.train.run.fit_program import ARRAYS, pipeline
from tests.train.run.test_loop import rows_of

pytestmark = pytest.mark.usefixtures("no_report")
LINKS = {"activations": "int8", "gradients": "int8"}


@pytest.fixture
def labelled(tiny, tokenizer_files, tmp_path) -> dict:
    """Return a config for texts of two classes, of which 12 are to train on."""
    records = [{"text": f"the {['fox', 'dog'][i % 2]} {i}", "label": i % 2} for i in range(20)]
    for name, part in (("train", records[:12]), ("held", records[12:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
    files = {"path": str(tmp_path / "train.jsonl"), "validation_path": str(tmp_path / "held.jsonl")}
    model = {"vocab_size": 300, "seq_len": 16, "head": "classification", "labels": ["0", "1"]}
    return tiny | {
        "data": {"format": "labels", "tokenizer": str(tokenizer_files["decoder"]), **files},
        "model": tiny["model"] | model,
        "train": {"steps": 9, "batch_size": 4, "eval_every": 8, "eval_batches": 1, "trace_batches": 0},
        "plan": tiny["plan"] | {"links": {**LINKS, "rows": 12}},
        "checkpoint": {"every": 4},
    }


def check_numbers(loaded: data.Data, count: int, batch_size: int) -> None:
    """Check that a number stands for the same row in each epoch, and that each row has one."""
    rows: dict[int, bytes] = {}
    for t in range(count):
        leaves = [leaf[0:batch_size] for leaf in jax.tree.leaves(loaded.train[t])]
        for i, number in enumerate(loaded.train.numbers(t)):
            row = b" ".join(leaf[i].tobytes() for leaf in leaves)
            assert rows.setdefault(int(number), row) == row
    assert sorted(rows) == list(range(loaded.rows))


def test_a_number_stands_for_the_same_row_in_each_epoch(tiny, labelled):
    check_numbers(data.load(changed(labelled)), 7, 4)
    check_numbers(data.load(changed(tiny, train={"batch_size": 150})), 7, 150)


def test_the_number_of_a_row_is_computed_once(monkeypatch):
    """It gives the row, too, as grain would shuffle the rows themselves."""
    rows = [(np.full(1, i), np.full(1, i)) for i in range(10)]
    shuffled, expected = Shuffled(rows, 3, epochs=True), grain.MapDataset.source(rows).shuffle(seed=3).repeat()
    asked, numbers = list[int](), grain.MapDataset.range(10).shuffle(seed=3).repeat().map(lambda number: asked.append(number) or number)
    monkeypatch.setitem(shuffled.__dict__, "_numbers", numbers)
    batches = BatchesOfRows(shuffled, 4, (jax.ShapeDtypeStruct((1,), int),) * 2, order=shuffled.number)
    for t in range(5):
        inputs, labels = batches[t]
        assert inputs[0:4].ravel().tolist() == labels[0:4].ravel().tolist() == batches.numbers(t).tolist()
        assert batches.numbers(t).tolist() == [int(expected[i][0][0]) for i in range(4 * t, 4 * t + 4)]
    assert len(asked) == 20


def test_padding_after_the_last_epoch_has_no_number(labelled):
    train = {key: value for key, value in labelled["train"].items() if key != "steps"}
    loaded = data.load(changed(labelled | {"train": train | {"epochs": 1.5, "batch_size": 4}}))
    assert loaded.steps == 5
    assert [int(np.count_nonzero(loaded.train.numbers(t) < 0)) for t in range(5)] == [0, 0, 0, 0, 2]


@pytest.mark.slow
def test_a_run_says_what_it_keeps_and_only_training_reads_it(labelled, tmp_path, monkeypatch, capsys):
    short = labelled["train"] | {"steps": 1}
    run = str(loop.main(changed(labelled, train=short, checkpoint={"every": 1}, run={"dir": str(tmp_path / "run")})).folder)
    assert re.search(r"both ends of each cut remember 12 rows: each end keeps \d+(\.\d+)? [kM]?B", capsys.readouterr().out)
    specs = checkpoint_files.layer_specs(tmp_path / "run", 1)
    assert [list(plain["remembered"]) for plain in specs.values() if "remembered" in plain] == [["received"]]
    states, read = list[jpipe.State](), list[str]()

    def reading(*arguments):
        layers = orbax_item.read_item(*arguments)
        read.extend(part for plain in layers.values() for part in plain)
        return layers

    monkeypatch.setattr(checkpoint_files, "read_item", reading)
    monkeypatch.setattr(evaluate, "begin", lambda *arguments: states.append(begin(*arguments)) or states[0])
    assert np.isfinite(evaluate.main(evaluate.Request(run)).loss)
    assert [worker.remembered for worker in states[0].workers] == [{}] * len(states[0].workers)
    export.main(run, str(tmp_path / "weights.safetensors"), None, print)
    assert "params" in read
    assert "remembered" not in read


@pytest.mark.slow
def test_a_run_remembers_rows_over_epochs_and_resumes_with_the_same_bits(labelled, tmp_path, monkeypatch):
    """Three epochs of three batches; the error falls, so the losses are nearer to those without rounding."""
    losses = {}
    for name, links in {"exact": None, "rounded": LINKS, "rows": {**LINKS, "rows": 12}}.items():
        folder = loop.main(changed(labelled, plan={"links": links}, run={"dir": str(tmp_path / name)})).folder
        losses[name] = np.asarray([row["loss"] for row in rows_of(folder)])
    assert not np.array_equal(losses["rows"], losses["rounded"])
    assert np.abs(losses["rows"] - losses["exact"]).max() < 0.05
    again = run_in_two(labelled | {"run": {"dir": str(tmp_path / "again")}}, monkeypatch, 6).folder
    assert [row["loss"] for row in rows_of(again)] == losses["rows"].tolist()
    check_equal(weights_of(again), weights_of(tmp_path / "rows"))


def test_arrays_of_fit_have_numbers_and_batches_have_none():
    count = len(ARRAYS[1])
    layers = pipeline().stack
    plan = jpipe.Plan.even(layers.ids, 2, "gpipe", 2, links={**LINKS, "rows": count})
    pipe = jpipe.Pipeline(layers, plan, pipeline().loss, pipeline().optimizer, jax.devices()[:1] * 2)
    result = jpipe_train.fit(pipe, ARRAYS, steps=2 * count // 8, batch_size=8, progress=False, log=())
    remembered = [worker.remembered for worker in result.state.workers]
    check_equal(remembered[0]["sent"], remembered[1]["received"])
    assert all(np.any(row) for row in remembered[0]["sent"][0])
    batches = [jax.tree.map(lambda leaf: leaf[:8], ARRAYS)] * 2
    with pytest.raises(InputError, match=r"plan\.links\.rows: expected training data whose rows come back with each epoch"):
        jpipe_train.fit(pipe, batches, steps=2, progress=False, log=())


def test_rows_that_do_not_come_back_and_too_few_are_refused(tiny, labelled, tokenizer_files, documents, tmp_path, capsys):
    masked = {
        "format": "text",
        "objective": "masked",
        "validation_fraction": 0.4,
        "path": str(documents),
        "tokenizer": str(tokenizer_files["bert"]),
    }
    (tmp_path / "other.txt").write_text("another text " * 200)
    sources = [{"path": path, "weight": 1} for path in (tiny["data"]["path"], str(tmp_path / "other.txt"))]
    several = {"format": "bytes", "sources": sources, "validation_fraction": 0.2}
    for case, words in (
        (labelled | {"plan": labelled["plan"] | {"links": {**LINKS, "rows": 11}}}, "expected 12, the rows of the training data, found 11"),
        (labelled | {"plan": labelled["plan"] | {"links": {**LINKS, "rows": 13}}}, "found 13; set it to 12"),
        (labelled | {"data": masked, "model": tiny["model"] | {"kind": "bert", "vocab_size": 300, "seq_len": 16}}, "come back"),
        (labelled | {"data": several, "model": tiny["model"]}, "come back"),
    ):
        (tmp_path / "config.yaml").write_text(to_yaml(changed(case)))
        assert cli.main(["train", str(tmp_path / "config.yaml")]) == 2
        assert "plan.links.rows: expected" in (err := capsys.readouterr().err)
        assert words in err
        assert len(err.splitlines()) == 1
