"""Mixtures of several sources: exact proportions, orders of their own, exact resume, and a validation loss for each source."""

import itertools
import json
import math
from collections import Counter

import jax
import numpy as np
import pydantic
import pytest

import jpipe
import jpipe.checkpoints
from jpipe_lm.data import prepare
from jpipe_train.checkpoint.best import values_in
from jpipe_train.config.config import Config
from jpipe_train.data import data
from jpipe_train.data.mixture import proportions
from jpipe_train.data.mixture.mixed import Mixed, source_of
from jpipe_train.report.metrics_log import mean_of
from jpipe_train.run import evaluate, loop
from jpipe_train.run.requests import EvaluateRequest
from tests.lm.data.conftest import SENTENCES, quiet, same
from tests.lm.data.prepared import prepare_files
from tests.train.checkpoint.test_resume import Killed, run_in_two, stop_before, weights_of
from tests.train.conftest import changed
from tests.train.run.test_loop import rows_of

WEIGHTS = {"a": 3, "b": 1, "c": 0.5}


@pytest.fixture
def mixed(tiny, tmp_path) -> dict:
    """Return a config with three texts, each of its own symbols and of another length."""
    sources = []
    for letter, weight in WEIGHTS.items():
        symbols = np.random.default_rng(ord(letter)).integers(0, 32, 8 * (20 + ord(letter) % 5))
        (tmp_path / f"{letter}.txt").write_bytes(bytes((symbols + 32 * "abc".index(letter)).astype(np.uint8)))
        (tmp_path / f"{letter}.held").write_bytes(letter.encode() * 21 * (1 + ord(letter) % 5))
        sources.append({"path": str(tmp_path / f"{letter}.txt"), "weight": weight, "validation_path": str(tmp_path / f"{letter}.held")})
    return tiny | {"data": {"format": "bytes", "sources": sources}}


def rows(batches, first: int, end: int) -> list[bytes]:
    return [row.astype(np.uint8).tobytes() for t in range(first, end) for row in batches[t][0][0 : len(batches[t][0])]]


def source(row: bytes) -> str:
    return "abc"[row[0] // 32]


@pytest.mark.parametrize("weights", [[3, 1], [0.7, 0.3], [1, 2, 4.5, 0.01], [1], [1 / 3, 1]])
def test_any_stretch_of_a_mixture_has_its_proportions_exactly(weights):
    shares = proportions(weights)
    assert math.gcd(*shares) == 1
    assert all(share * weights[0] == pytest.approx(shares[0] * weight) for share, weight in zip(shares, weights, strict=True))
    period = min(sum(shares), 2000)
    drawn = [source_of(i, shares) for i in range(3 * period)]
    for number, share in enumerate(shares):
        assert [row for of, row in drawn if of == number] == list(range(sum(of == number for of, _ in drawn))), "no row is left out"
        counts = np.cumsum([of == number for of, _ in drawn])
        expected = np.arange(1, len(drawn) + 1) * (share / sum(shares))
        assert np.abs(counts - expected).max() < len(shares)
    if period == sum(shares):
        for start in (0, 1, period // 2, period):
            assert Counter(of for of, _ in drawn[start : start + period]) == Counter(dict(enumerate(shares)))


def test_the_shares_of_many_sources_are_summed_once():
    added = []

    class Share(int):
        def __radd__(self, other):
            added.append(other)
            return int(self) + int(other)

        __add__ = __radd__

    mixture = Mixed(tuple([(number, row) for row in range(20)] for number in range(500)), tuple(map(Share, range(1, 501))))
    assert [mixture[i] for i in range(20)] == [source_of(i, range(1, 501)) for i in range(20)]
    assert 0 < len(added) < 500


def test_batches_mix_the_rows_of_sources_each_in_an_order_of_its_own(mixed):
    read = data.load(changed(mixed, train={"batch_size": 18}))
    assert [Counter(map(source, rows(read.train, t, t + 1))) for t in (0, 7, 10**6)] == [{"a": 12, "b": 4, "c": 2}] * 3
    many = rows(read.train, 0, 30)
    for number, (letter, keys) in enumerate(zip("abc", mixed["data"]["sources"], strict=True)):
        alone = data.load(changed(mixed | {"data": {"format": "bytes"} | {key: keys[key] for key in ("path", "validation_path")}}))
        of_mixture, in_order = [row for row in many if source(row) == letter], rows(alone.train, 0, 10)[: alone.rows]
        assert Counter(of_mixture[: alone.rows]) == Counter(in_order), "an epoch has each row once"
        assert of_mixture[: alone.rows] != of_mixture[alone.rows : 2 * alone.rows], "each epoch has an order of its own"
        assert (of_mixture[: alone.rows] == in_order) == (number == 0), "each further source is shuffled by a seed of its own"
    assert len({read.digest(), data.load(changed(mixed | {"data": {"path": mixed["data"]["sources"][0]["path"]}})).digest()}) == 2


def test_a_mixture_goes_on_with_another_batch_size_at_its_next_row(mixed):
    first = data.load(changed(mixed))
    then = data.load(changed(mixed, train={"batch_size": 6}), first.train.position(5))
    assert rows(then.train, 5, 9) == rows(first.train, 5, 11)


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_a_resumed_run_is_equal_and_each_source_has_its_validation_loss(mixed, tmp_path, monkeypatch, capsys):
    mixed["plan"] = {"schedule": "gpipe", "num_stages": 1, "microbatches": 1}
    config = changed(
        mixed, train={"steps": 4, "eval_batches": 100, "stop": {"patience": 9, "metric": "val_loss_c"}}, checkpoint={"every": 2}
    )
    fields = config.model_dump(mode="json", by_alias=True)
    whole = loop.main(changed(fields, run={"dir": str(tmp_path / "whole")})).folder
    again = run_in_two(fields | {"run": {"dir": str(tmp_path / "two")}}, monkeypatch, 3).folder
    assert rows_of(again) == rows_of(whole)
    assert jax.tree.all(jax.tree.map(np.array_equal, weights_of(whole), weights_of(again)))
    last = rows_of(whole)[-1]
    mean = sum(weight * last[f"val_loss_{letter}"] for letter, weight in WEIGHTS.items()) / sum(WEIGHTS.values())
    assert last["val_loss"] == pytest.approx(mean, rel=1e-12)
    all_of_them = evaluate.main(EvaluateRequest(str(whole)))
    assert f"by the weights of the sources, {all_of_them.labels:,.10g} labels\n" in capsys.readouterr().out
    assert all_of_them.loss == pytest.approx(last["val_loss"], rel=1e-6)
    assert all_of_them.metrics == pytest.approx({f"loss_{letter}": last[f"val_loss_{letter}"] for letter in WEIGHTS}, rel=1e-6)
    alone = evaluate.main(EvaluateRequest(str(whole), data=mixed["data"]["sources"][1]["validation_path"]))
    assert alone.loss == pytest.approx(last["val_loss_b"], rel=1e-6)


@pytest.mark.usefixtures("no_report")
def test_a_run_that_goes_on_with_other_weights_forgets_validations_of_the_old_mixture(mixed, monkeypatch, capsys):
    mixed["plan"] = {"schedule": "gpipe", "num_stages": 1, "microbatches": 1}
    mixed["train"] |= {"steps": 4, "eval_every": 2, "stop": {"patience": 9}}
    mixed["checkpoint"] = {"every": 2, "keep": 5, "best": {}}
    weights = {"a": 1, "b": 5, "c": 20}
    sources = [each | {"weight": weight} for each, weight in zip(mixed["data"]["sources"], weights.values(), strict=True)]
    with monkeypatch.context() as patched:
        stop_before(patched, 3)
        with pytest.raises(Killed):
            loop.main(changed(mixed))
    folder = loop.main(changed(mixed | {"data": mixed["data"] | {"sources": sources}})).folder
    assert "data.sources has changed: earlier validations do not count for train.stop and checkpoint.best\n" in capsys.readouterr().out
    validations = [row for row in rows_of(folder) if "val_loss" in row]
    for row, of in zip(validations, (WEIGHTS, weights, weights), strict=True):
        mean = sum(weight * row[f"val_loss_{letter}"] for letter, weight in of.items()) / sum(of.values())
        assert row["val_loss"] == pytest.approx(mean, rel=1e-12)
    assert jpipe.checkpoints.steps(folder) == [2, 4]
    assert values_in(folder, "val_loss") == {4: validations[-1]["val_loss"]}
    facts = jpipe.checkpoints.Checkpoint(folder, 4).facts
    assert (facts["stop"]["best_step"], facts["stop"]["best"]) == (2, validations[1]["val_loss"])
    assert (facts["val_loss_before"], facts["val_since"]) == (None, 2)


def test_means_of_sources_are_averaged_by_the_weights_of_the_sources():
    sources = Config.model_validate({"data": {"sources": [{"path": "a", "weight": 3}, {"path": "b"}]}}).data.sources
    batches = [{"val_loss": (1.0, 10.0), "val_hits": (0.5, 1.0)}, {"val_loss": (4.0, 20.0), "val_hits": (0.5, 3.0)}]
    batches += [{"val_loss": (7.0, 1.0), "val_hits": (1.0, 0.0)}]
    result = mean_of(batches, [sources[0], sources[0], sources[1]])
    assert result == {"val_loss": (3 * 3 + 7) / 4, "val_hits": 0.5, "val_loss_a": 3, "val_loss_b": 7}


ROWS = {
    "text": lambda i: {"text": f"{SENTENCES[i % 3]} {i}"},
    "prompts": lambda i: {"prompt": f"what is {i}?", "answer": SENTENCES[i % 3]},
    "chat": lambda i: {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": SENTENCES[i % 3]}]},
    "labels": lambda i: {"text": f"{SENTENCES[i % 3]} {i}", "label": i % 2},
    "tokens": lambda i: {"input_ids": [1 + i % 200] * 20},
}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("form", [pytest.param(form, marks=[pytest.mark.slow] if form == "chat" else []) for form in ROWS])
def test_every_format_can_be_mixed(form, tiny, tokenizer, tmp_path):
    keys = {"format": form, "validation_fraction": 0.2} | ({} if form == "tokens" else {"tokenizer": tokenizer})
    if form == "chat":
        (tmp_path / "template.jinja").write_text(TEMPLATE)
        keys["chat_template"] = str(tmp_path / "template.jinja")
    sources = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": weight} for name, weight in (("one", 1), ("two", 2))]
    for number, each in enumerate(sources):
        with open(each["path"], "w") as file:
            file.writelines(json.dumps(ROWS[form](100 * number + i)) + "\n" for i in range(60))
    model = {"vocab_size": 300, "seq_len": 64} | ({"head": "classification", "labels": 2} if form == "labels" else {})
    config = changed(tiny | {"data": keys | {"sources": sources}}, model=model)
    read = data.load(config).with_some_validation()
    for t in range(3):
        inputs, labels = read.train[t]
        for row in range(4):
            number, index = source_of(4 * t + row, (1, 2))
            alone = read.parts[number][1].train[index // 4]
            for mixed, other in zip(whole_rows((inputs, labels), row), whole_rows(alone, index % 4), strict=True):
                assert np.array_equal(mixed, other)
    assert [each.source.name for each in read.held_out(1)] == sorted(each.source.name for each in read.held_out(1))
    assert {each.source.name for each in read.held_out(1)} == {"one", "two"}


def whole_rows(batch, row: int) -> list[np.ndarray]:
    return [leaf[row : row + 1] for leaf in jax.tree.leaves(batch)]


@pytest.mark.parametrize(
    ("sources", "other", "message"),
    [
        ([{"path": "a", "weight": 0}], {}, "data.sources.*weight.*greater than 0"),
        ([{"path": "a", "weight": -1.0}], {}, "weight"),
        ([{"path": "a", "weight": math.inf}], {}, "weight"),
        ([{"path": "a", "weight": math.nan}], {}, "weight"),
        ([], {}, "data.sources"),
        ([{"path": "a", "name": "x"}, {"path": "b", "name": "x"}], {}, "a different name for each source, found 'x' twice; change one"),
        ([{"path": "a", "name": "ema"}], {}, "the name ema stands for the averaged weights"),
        ([{"path": "a"}], {"data": {"path": "b"}}, "path has no effect with sources"),
        ([{"path": "a"}], {"data": {"validation_path": "b"}}, "set validation_path of each source"),
        ([{"path": "a", "validation_path": "b"}], {"data": {"validation_fraction": 0.5}}, "if each source has a validation_path"),
        ([{"path": "a"}], {"train": {"epochs": 2, "steps": None}}, "train.epochs needs data.path, .* set train.steps"),
        ([{"path": "a"}], {"eval": {"metrics": {"loss_a": "accuracy"}}}, "eval.metrics has 'loss_a', the name of the loss of a source"),
        ([{"path": "a"}], {"data": {"format": "text"}}, "format text needs tokenizer"),
    ],
)
def test_sources_that_do_not_fit_are_errors(sources, other, message):
    with pytest.raises(pydantic.ValidationError, match=f"(?s){message}"):
        Config.model_validate(other | {"data": {"sources": sources} | other.get("data", {})})


def test_names_are_those_of_the_files_made_unique():
    paths = ["x/code.txt", "y/code", "notes 2/*.md", "ema.txt", "…", "z/code_2.txt"]
    config = Config.model_validate({"data": {"sources": [{"path": path} for path in paths]}})
    assert [each.name for each in config.data.sources] == ["code", "code_2", "notes_2", "ema_2", "source", "code_2_2"]


def test_a_source_that_cannot_be_read_is_named(mixed, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    for name, message in (
        ("empty.txt", r"^data\.sources\.1\.path: expected at least 2 bytes for training and 2 for validation .* found 0"),
        ("none.txt", r"^data\.sources\.1\.path: '.*none\.txt' does not exist; give a file, a folder or a glob$"),
    ):
        sources = [mixed["data"]["sources"][0], {"path": str(tmp_path / name)}]
        with pytest.raises(jpipe.InputError, match=message):
            data.load(changed(mixed | {"data": {"sources": sources}}))


def test_folders_of_tokens_of_different_tokenizers_are_an_error(tiny, tokenizer_files, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES * 20))
    for kind, path in tokenizer_files.items():
        prepare_files(prepare.Files([str(tmp_path / "text.txt")]), str(path), str(tmp_path / kind), quiet(), 0.2)
    sources = [{"path": str(tmp_path / kind)} for kind in tokenizer_files]
    config = changed(tiny | {"data": {"format": "tokens", "sources": sources}}, model={"vocab_size": 300})
    with pytest.raises(jpipe.InputError, match=r"data\.sources\.1\.path: expected tokens of the same tokenizer as in '.*decoder', found"):
        data.load(config)
    one = changed(tiny | {"data": {"format": "tokens", "sources": [sources[0], sources[0]]}}, model={"vocab_size": 300})
    read = data.load(one)
    assert [name for name, _ in itertools.groupby(each.source.name for each in read.held_out(1))] == ["decoder", "decoder_2"]
    assert not same(read.train[0], read.train[1])
