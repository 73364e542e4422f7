"""Validation data: the held-out rows of a run, or all rows at another path, down to a single row."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jpipe import InputError
from jpipe_lm.data import prepare, splits
from jpipe_train.data import data
from jpipe_train.data.rows import like_a_batch
from tests.lm.data.conftest import quiet, same
from tests.lm.data.prepared import prepare_files
from tests.train.conftest import SENTENCE, changed


def configured(tiny, keys, **model):
    return changed(tiny | {"data": keys}, model={"vocab_size": 300, "seq_len": 16} | model)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}:", "answer": "a fox"}) + "\n" for i in range(30)))
    return path


@pytest.fixture
def keys_of(tokenizer, tokenizer_files, documents, prompts, tmp_path):
    """Return the keys of `data` in each form."""

    def of(form):
        if form == "tokens":
            prepare_files(prepare.Files([str(documents)]), tokenizer, str(tmp_path / "tokens"), quiet(), 0.4)
            return {"format": "tokens", "path": str(tmp_path / "tokens")}
        path = {"prompts": prompts}.get(form, documents)
        keys = {"format": "text" if form == "masked" else form, "path": str(path), "validation_fraction": 0.4}
        if form != "bytes":
            keys["tokenizer"] = str(tokenizer_files["bert"]) if form == "masked" else tokenizer
        return keys | ({"objective": "masked"} if form == "masked" else {})

    return of


@pytest.mark.parametrize("form", ["bytes", "text", "tokens", "prompts", "masked"])
def test_every_validation_batch_is_read_once(tiny, keys_of, form):
    keys = keys_of(form)
    config = configured(tiny, keys, **({"kind": "bert"} if form == "masked" else {}))
    held_out, all_there = data.held_out(config), data.held_out(config, keys["path"])
    assert all(same(held_out.validation[i], batch) for i, batch in enumerate(data.load(config).validation[i] for i in range(2)))
    assert len(all_there.validation.elements) > len(held_out.validation.elements) >= 8
    elements = all_there.validation.elements
    labels = np.concatenate([np.ravel(leaf) for i in range(len(elements)) for leaf in jax.tree.leaves(elements[i][1])])
    if form == "bytes":  # each window once, in some order
        rows = sorted(bytes(elements[i][0].astype(np.uint8)) for i in range(len(elements)))
        text = b"".join(path.read_bytes() for path in sorted(Path(keys["path"]).iterdir()))
        assert rows == sorted(text[i : i + 16] for i in range(0, len(text) - 16, 16))
    if form == "prompts":  # each answer once
        answer = splits.read(config).tokenizer.encoded(["a fox"])[0].size
        assert (labels >= 0).sum() in (30 * answer, 30 * (answer + 1))


@pytest.mark.parametrize(("rows", "batch_size"), [(11, 4), (3, 8), (12, 4), (9, 4)])
def test_the_remaining_rows_are_a_smaller_batch(tiny, tmp_path, rows, batch_size):
    (tmp_path / "text.txt").write_bytes((SENTENCE * 9)[: rows * 16 + 1])
    config = changed(
        tiny | {"data": {"path": str(tmp_path / "text.txt")}},
        model={"seq_len": 16},
        train={"batch_size": batch_size},
        plan={"microbatches": 1},
    )
    batches = data.held_out(config, str(tmp_path / "text.txt")).validation
    everything = batches.with_remainder()
    read = np.concatenate([everything[i][0][:] for i in range(len(everything))])
    assert np.array_equal(read, np.stack([batches.elements[i][0] for i in range(rows)]))
    assert [len(everything[i][0]) for i in range(len(everything))] == [everything.rows_of(i) for i in range(len(everything))]
    assert sum(map(everything.rows_of, range(len(everything)))) == rows
    assert like_a_batch(batches)[0][:].shape == (batch_size, 16)


@pytest.mark.parametrize(
    ("form", "content", "message"),
    [
        ("bytes", "1", r"data.path: expected at least 2 bytes \(one as input and one to predict\), found 1 in"),
        ("text", "", r"data.path: expected at least 2 tokens \(one as input and one to predict\), found 0 in"),
        ("masked", "short", r"data.path: expected at least 13 tokens \(a window of model.seq_len 16 without special tokens\), found \d in"),
        ("prompts", "", r"data.path: expected at least 1 example with an answer, found 0 in"),
        (
            "prompts",
            '{"prompt": "' + 50 * "a b " + '", "answer": "b"}',
            r"line 1: expected at most 17 tokens \(model.seq_len 16, plus one\), found",
        ),
        ("tokens", None, r"data.path: cannot read '.*tokens.json': No such file"),
    ],
)
def test_data_without_a_row_are_reported(tiny, keys_of, tmp_path, form, content, message):
    other = tmp_path / "other"
    other.mkdir()
    if content is not None:
        (other / "file.txt").write_text(content)
    config = configured(tiny, keys_of(form), **({"kind": "bert"} if form == "masked" else {}))
    with pytest.raises(InputError, match=message):
        data.held_out(config, str(other))


def test_tokens_of_another_tokenizer_are_refused_where_that_can_be_seen(tiny, keys_of, tokenizer_files, documents, tmp_path):
    other = str(tmp_path / "others")
    prepare_files(prepare.Files([str(documents)]), str(tokenizer_files["bert"]), other, quiet(), 0.3)
    config = configured(tiny, keys_of("tokens"))
    with pytest.raises(InputError, match=r"data\.path: expected text of the same tokenizer as in '.*', found text of another tokenizer"):
        data.held_out(config, other)
    (tmp_path / "tokens").rename(tmp_path / "moved")
    assert data.held_out(config, other).validation.elements[0]


def test_data_from_a_function_have_no_path(tiny):
    config = changed(tiny | {"data": {"target": "tests.nothing:load"}})
    with pytest.raises(InputError, match=r"the data come from 'tests.nothing:load' \(data.target\), found the path 'text'"):
        data.held_out(config, "text")
