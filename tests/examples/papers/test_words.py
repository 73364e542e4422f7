"""Running text by words: each row continues from batch to batch."""

import numpy as np
import pytest

from examples.papers.data.sentences import Words
from jpipe import InputError
from jpipe_train.config.config import Config
from jpipe_train.data import data


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for part, lines in (("train", 30), ("validation", 20)):
        text = [" ".join(f"w{n}" for n in rng.integers(0, 9, rng.integers(2, 6))) for _ in range(lines)]
        (tmp_path / f"{part}.txt").write_text("\n".join(text) + "\n")
    return tmp_path


def load(folder, **arguments):
    arguments = {"folder": str(folder), "length": 4, **arguments}
    fields = {
        "data": {"target": "examples.papers.data.words:load", "arguments": arguments},
        "model": {"target": "examples.papers.models.awd_lm:awd_lm"},
        "train": {"batch_size": 3},
        "plan": {"microbatches": 1},
    }
    return data.load(Config.model_validate(fields))


def numbers(folder, part):
    """Return the token ids of one part of the text, with the vocabulary of the training part."""
    lines = [[line.split() for line in (folder / f"{name}.txt").read_text().splitlines()] for name in ("train", part)]
    words = Words.of(lines[0])
    return words.numbers([word for line in lines[1] for word in (*line, "<eos>")])


def test_row_b_continues_where_row_b_of_the_previous_batch_ended(folder):
    dataset, text = load(folder), numbers(folder, "train")
    piece = len(text) // 3
    windows = (piece - 1) // 4
    assert windows >= 3
    for epoch in range(2):
        tokens, labels = [], []
        for window in range(windows):
            inputs, after = dataset.train[epoch * windows + window]
            tokens.append(inputs["tokens"][:])
            labels.append(after[:])
            assert inputs["continues"][:].tolist() == [int(window > 0)] * 3
        for b in range(3):
            begin = b * piece
            np.testing.assert_array_equal(np.concatenate(tokens, axis=1)[b], text[begin : begin + 4 * windows])
            np.testing.assert_array_equal(np.concatenate(labels, axis=1)[b], text[begin + 1 : begin + 4 * windows + 1])


def test_batches_can_be_read_in_any_order_and_in_part(folder):
    one, second = load(folder), load(folder)
    later = second.train[3][0]["tokens"][:]
    np.testing.assert_array_equal(one.train[3][0]["tokens"][1:2], later[1:2])
    assert one.digest() == second.digest()


def test_validation_is_read_once(folder):
    dataset, text = load(folder), numbers(folder, "validation")
    assert len(dataset.validation) == (len(text) // 3 - 1) // 4


def test_words_are_numbered_from_the_most_frequent_on():
    sentences = [["b", "a", "b"], ["c", "a", "<unk>"]]
    words = Words.of(sentences)
    assert words.words == ("<eos>", "<unk>", "a", "b", "c")
    assert words.numbers(["a", "z", "<eos>", "<unk>"]).tolist() == [2, 1, 0, 1]
    assert Words.of(sentences, 3).words == ("<eos>", "<unk>", "a")


def test_unread_arrays_are_counted(folder):
    with (folder / "train.txt").open("a") as file:
        file.write("\n  \n")
    with (folder / "validation.txt").open("a") as file:
        file.write("new words\n")
    empty, unknown = load(folder).remarks
    assert empty == "2 empty lines left out"
    assert unknown.startswith("2 of ")
    assert unknown.endswith(" words for validation are not known")


def test_bad_text_is_refused(folder):
    assert load(folder).vocab_size == 11
    assert load(folder, vocab_size=10).vocab_size == 10
    with pytest.raises(
        InputError, match=r"expected at least 303 words in 'train\.txt' \(train\.batch_size 3 rows of 100 words, plus one\)"
    ):
        load(folder, length=100)
    (folder / "validation.txt").unlink()
    with pytest.raises(InputError, match=r"cannot read '.*validation\.txt': No such file or directory; the folder needs it"):
        load(folder)
