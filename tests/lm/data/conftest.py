"""A small tokenizer, trained once, and common fixtures of the data tests."""

from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from jpipe_lm.data import prepare
from jpipe_train.console.progress import Reporter

SENTENCES = ["the quick brown fox jumps over the lazy dog", "a second document, with other words in it", "and a third one; it is short"]


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory) -> dict[str, Path]:
    """Return the path of a tokenizer.json for each kind of model."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "text.txt").write_text("\n".join(SENTENCES * 3))
    for kind in ("decoder", "bert"):
        prepare.make_tokenizer(prepare.Files([str(folder / "text.txt")]), 300, str(folder / f"{kind}.json"), quiet(), kind)
    return {kind: folder / f"{kind}.json" for kind in ("decoder", "bert")}


@pytest.fixture
def tokenizer(tokenizer_files) -> str:
    return str(tokenizer_files["decoder"])


@pytest.fixture
def documents(tmp_path) -> Path:
    """Return a folder of many short texts, two of them empty."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(f"{SENTENCES[i % 3]} {i}\n" if i not in (7, 8) else "")
    return folder


def quiet() -> Reporter:
    return Reporter(1, 1, "bytes", Console(quiet=True))


def whole(batch) -> list[np.ndarray]:
    """Return all rows of all arrays of a batch."""
    return [rows[:] for rows in jax.tree.leaves(batch)]


def same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(whole(one), whole(other), strict=True))
