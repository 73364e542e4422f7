"""Only the requested rows and their files are read, at any step of a run."""

import json
from pathlib import Path

import jax
import pytest

from jpipe_lm.data.document_files import Files
from jpipe_lm.data.documents import Documents
from jpipe_lm.data.files import token_files
from jpipe_train.data import data
from tests.lm.data.conftest import quiet
from tests.lm.data.prepared import prepare_files
from tests.train.conftest import changed


@pytest.fixture
def reads(monkeypatch) -> dict[str, list]:
    """Record the spans of tokens that are read and the files that are opened to read them."""
    seen: dict[str, list] = {"spans": [], "files": []}
    read, opened = Documents.read, token_files._opened

    def noted_read(self, start, stop):
        seen["spans"].append((start, stop))
        return read(self, start, stop)

    def noted_open(path, *kind):
        seen["files"].append(path.name)
        return opened(path, *kind)

    monkeypatch.setattr(Documents, "read", noted_read)
    monkeypatch.setattr(token_files, "_opened", noted_open)
    return seen


def load(tiny, path: Path, *, seq_len: int, **keys):
    model = tiny["model"] | {"vocab_size": 300, "seq_len": seq_len} | ({"kind": "bert"} if "objective" in keys else {})
    return data.load(changed(tiny | {"model": model, "data": {"format": "tokens", "path": str(path)} | keys}))


def sliced(batch, rows: slice) -> None:
    for array in jax.tree.leaves(batch):
        array[rows]


def test_a_batch_far_into_a_run_is_reached_at_once_and_only_its_rows_are_read(tiny, documents, tokenizer, tmp_path, reads):
    index = prepare_files(Files([str(documents)]), tokenizer, str(tmp_path / "tokens"), quiet(), 0.3, 100)
    dataset = load(tiny, tmp_path / "tokens", seq_len=8)
    assert reads == {"spans": [], "files": []}, "what is in the files is not read before it is needed"
    batch = dataset.train[10**12]
    assert reads == {"spans": [], "files": []}
    sliced(batch, slice(1, 3))
    assert len(index.train) > 6
    assert [stop - start for start, stop in reads["spans"]] == [9, 9]
    assert 1 <= len({name.split(".")[0] for name in reads["files"]}) <= 4, "each of the two may go on in the next shard"
    reads["spans"].clear()
    sliced(dataset.train[10**12], slice(0, 0))
    assert reads["spans"] == []


def test_the_rows_of_two_processes_are_together_those_of_one(tiny, documents, tokenizer, tmp_path, reads):
    prepare_files(Files([str(documents)]), tokenizer, str(tmp_path / "tokens"), quiet(), 0.3, 100)
    spans = []
    for rows in (slice(0, 4), slice(0, 2), slice(2, 4)):  # each asks data of its own, as processes do
        reads["spans"].clear()
        sliced(load(tiny, tmp_path / "tokens", seq_len=8).train[7], rows)
        spans.append(list(reads["spans"]))
    assert spans[0] == spans[1] + spans[2]
    assert len(set(spans[0])) == 4


def test_examples_and_masked_rows_are_read_alone(tiny, documents, tokenizer_files, tmp_path, reads):
    lines = [{"prompt": f"what is {i}?", "answer": f"{i} is {i}"} for i in range(80)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prompts = Files([str(tmp_path / "a.jsonl")], "prompts")
    prepare_files(prompts, str(tokenizer_files["decoder"]), str(tmp_path / "prompts"), quiet(), 0.3, 100)
    dataset = load(tiny, tmp_path / "prompts", seq_len=64)
    assert reads["spans"] == []
    inputs, labels = dataset.train[10**9]
    sliced((inputs, labels), slice(2, 3))
    assert len(reads["spans"]) == inputs["segments"][2:3].max(), "as many as there are examples in the row"
    assert sum(stop - start - 1 for start, stop in reads["spans"]) == (inputs["segments"][2:3] > 0).sum()

    prepare_files(Files([str(documents)]), str(tokenizer_files["bert"]), str(tmp_path / "masked"), quiet(), 0.3, 100)
    dataset = load(tiny, tmp_path / "masked", seq_len=19, objective="masked")
    reads["spans"].clear()
    sliced(dataset.train[10**9], slice(2, 4))
    assert 2 <= len(reads["spans"]) <= 4, "a window for each row, and for some a second part from elsewhere"
    assert all(stop - start <= 16 for start, stop in reads["spans"])
