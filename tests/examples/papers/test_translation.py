"""Parallel text: pairs of lines become rows of one shape, and unusable text is refused or dropped."""

import collections

import jax
import numpy as np
import pytest

from examples.papers.data import translation
from examples.papers.samples import make
from jpipe import InputError
from jpipe_train.assemble import labels
from jpipe_train.config.config import Config
from jpipe_train.data import data


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("translation")
    make.SAMPLES["translation"](folder, 0)
    return folder


@pytest.fixture
def folder(sample, tmp_path):
    """Return a folder with the JSON files and the first eight lines of each other file of the sample."""
    for file in sample.iterdir():
        lines = file.read_text(encoding="utf-8")
        (tmp_path / file.name).write_text(lines if file.suffix == ".json" else "".join(lines.splitlines(True)[:8]), encoding="utf-8")
    return tmp_path


def config(folder, model=None, batch_size=4, seed=0, **arguments):
    arguments = {"folder": str(folder), "source_length": 10, "target_length": 9, **arguments}
    return Config.model_validate(
        {
            "data": {"target": "examples.papers.data.translation:load", "arguments": arguments},
            "model": {"target": "examples.papers.models.gnmt:gnmt", "arguments": model or {}},
            "seed": seed,
            "train": {"batch_size": batch_size},
            "plan": {"microbatches": 1},
        }
    )


def rows(batches, t):
    (inputs, labels) = batches[t]
    return {name: part[:] for name, part in inputs.items()}, labels[:]


def test_each_row_is_a_pair_of_lines(folder):
    dataset = data.load(config(folder))
    tokenizer = translation.load_tokenizer(str(folder))
    pairs = set()
    for t in range(2):
        inputs, labels = rows(dataset.train, t)
        assert inputs["source"].shape == (4, 10)
        assert inputs["target"].shape == labels.shape == (4, 9)
        for i in range(4):
            source = inputs["source"][i][: inputs["source_length"][i]]
            counted = labels[i][labels[i] >= 0]
            assert source[-1] == counted[-1] == inputs["target"][i][0] == tokenizer.end
            np.testing.assert_array_equal(inputs["target"][i][1 : len(counted)], counted[:-1])
            assert (labels[i][len(counted) :] == -1).all()
            pairs.add((tokenizer.decoded(source.tolist()), tokenizer.decoded(counted.tolist())))
    texts = [(folder / f"train.{name}").read_text(encoding="utf-8").splitlines() for name in ("source", "target")]
    assert pairs == set(zip(*texts, strict=True))
    assert dataset.amount == "8 pairs of sentences for training, 8 for validation"


def test_the_seed_determines_the_order_and_batches_can_be_read_repeatedly(folder):
    one, repeated, other = (data.load(config(folder, seed=seed)) for seed in (0, 0, 1))
    for t in (5, 0):
        np.testing.assert_array_equal(rows(one.train, t)[1], rows(repeated.train, t)[1])
    assert any((rows(one.train, t)[1] != rows(other.train, t)[1]).any() for t in range(4))
    np.testing.assert_array_equal(rows(one.validation, 1)[1], rows(other.validation, 1)[1])
    assert one.digest() == other.digest()


def write(folder, name, lines):
    (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_lines_that_cannot_be_used_are_dropped_by_choice(folder):
    source = (folder / "train.source").read_text(encoding="utf-8").splitlines()
    source[2], source[4], source[5] = "", "the old dog sees the " * 4, " "
    write(folder, "train.source", source)
    with pytest.raises(InputError) as caught:
        data.load(config(folder))
    assert str(caught.value) == (
        "data.arguments.folder: 'train.source', line 3: expected 1 to 9 tokens and the end of a sentence, found none (it is empty) (in all "
        "2 lines empty, 1 too long); change the text, allow longer ones in data.arguments, or drop such lines with "
        "data.arguments.unusable: drop"
    )
    dataset = data.load(config(folder, unusable="drop"))
    assert dataset.amount.startswith("5 pairs")
    assert dataset.remarks == ("2 lines empty, 1 too long: dropped, the first is 'train.source', line 3",)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "train.target").unlink(), "data.arguments.folder: cannot read '{folder}/train.target': No such file"),
        (
            lambda folder: write(folder, "validation.target", ["das"] * 7),
            "expected as many lines in 'validation.source' as in 'validation.target', found 8 and 7; is 'validation.target' truncated?",
        ),
        (lambda folder: (folder / "train.source").write_bytes(b"\xff\xfe\x00"), "expected text in UTF-8 in '{folder}/train.source'"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "expected a tokenizer.json of the tokenizers library"),
        (lambda folder: [write(folder, f"train.{name}", []) for name in ("source", "target")], "expected something to learn from"),
        (lambda folder: [write(folder, f"validation.{name}", ["das"] * 3) for name in ("source", "target")], "found 3 in '{folder}/'"),
    ],
)
def test_damaged_files_are_named(folder, spoil, message):
    spoil(folder)
    with pytest.raises(InputError) as caught:
        data.load(config(folder))
    assert message.format(folder=folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_larger_than_the_outputs_is_refused(folder):
    dataset, outputs = data.load(config(folder)), jax.ShapeDtypeStruct((4, 9, 100), np.float32)
    with pytest.raises(
        InputError, match=r"model\.arguments: expected at least \d+ outputs for each label, .*, found 100; raise it, or use data"
    ):
        labels.check_labels(config(folder), dataset, outputs)


@pytest.fixture
def uneven(sample, tmp_path):
    """Write pairs of three lengths that fill odd numbers of batches: 7 of up to 4 tokens, 5 of up to 6, and 9 longer ones."""
    text = (sample / "train.source").read_text(encoding="utf-8").splitlines()
    tokenizer = translation.load_tokenizer(str(sample))
    words = [word for word in dict.fromkeys(" ".join(text).split()) if tokenizer.encoded([f"the {word}"])[0].size == 2]
    for part in ("train", "validation"):
        for name in ("source", "target"):
            lengths = [2] * 7 + [4] * 5 + [7] * 9
            write(tmp_path, f"{part}.{name}", [" ".join(["the", *[words[i]] * (n - 1)]) for i, n in enumerate(lengths)])
    (tmp_path / "tokenizer.json").write_text((sample / "tokenizer.json").read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def sizes(labels):
    """Return the number of tokens of each sentence, including the end token."""
    return (labels >= 0).sum(1).tolist()


def test_pairs_of_like_length_share_batches_of_their_length(uneven):
    dataset = data.load(config(uneven, buckets=[4, 6], target_length=10))
    read, pairs = [], collections.Counter()
    for t in range(21):  # four epochs: as many batches as 4 times 21 rows fill
        inputs, labels = rows(dataset.train, t)
        assert inputs["source"].shape == inputs["target"].shape == labels.shape
        longest = labels.shape[1]
        assert all({4: 0, 6: 4, 10: 6}[longest] < size <= longest for size in sizes(labels))
        assert inputs["source_length"].tolist() == sizes(labels)
        read += sizes(labels)
        pairs.update(tuple(row[row >= 0].tolist()) for row in labels)
    assert sorted(read) == sorted(([3] * 7 + [5] * 5 + [8] * 9) * 4)
    assert list(pairs.values()) == [4] * 21, "each pair once per epoch"
    assert {tuple(leaf.shape for leaf in rows_of(shape)) for shape in dataset.shapes} == {
        tuple(leaf.shape for leaf in rows_of(dataset.train[t])) for t in range(21)
    }
    assert dataset.like[1].shape == (4, 10), "the largest shape comes first"
    assert dataset.remarks == (
        "buckets for training and validation: 7 and 7 pairs of up to 4 tokens, 5 and 5 pairs of up to 6 tokens, 9 and 9 pairs of up to 10 "
        "tokens",
    )


def rows_of(batch):
    return *batch[0].values(), batch[1]


def test_batches_of_buckets_can_be_read_in_any_order_and_are_mixed(uneven):
    one, repeated = (data.load(config(uneven, buckets=[4, 6])) for _ in range(2))
    lengths = [one.train[t][1].shape[1] for t in range(40)]
    assert [repeated.train[t][1].shape[1] for t in reversed(range(40))] == lengths[::-1]
    assert len(set(lengths[:5])) > 1, "an epoch does not go through one bucket after the other"
    assert len({tuple(lengths[start : start + 5]) for start in range(0, 40, 5)}) > 1, "epochs have orders of their own"
    for t in (39, 3):
        np.testing.assert_array_equal(rows(one.train, t)[1], rows(repeated.train, t)[1])


def test_one_bucket_equals_no_buckets(folder):
    plain, bucketed = (data.load(config(folder, buckets=buckets)) for buckets in ([], [2]))
    assert plain.shapes == bucketed.shapes == (), "nothing is so short"
    for t in range(5):
        np.testing.assert_array_equal(rows(plain.train, t)[1], rows(bucketed.train, t)[1])


def test_a_bucket_may_lack_rows_for_training_or_for_validation(uneven):
    write(uneven, "validation.source", ["das"] * 8)
    write(uneven, "validation.target", ["das"] * 8)
    dataset = data.load(config(uneven, buckets=[2, 4, 6]))
    assert len(dataset.shapes) == 4
    assert {dataset.train[t][1].shape[1] for t in range(40)} == {4, 6, 9}
    assert [dataset.validation[i][1].shape[1] for i in range(len(dataset.validation))] == [2, 2]
    for name in ("source", "target"):
        write(uneven, f"validation.{name}", ["das"] * 2 + ["das das das"] * 2)
    with pytest.raises(InputError, match=r"expected at least train\.batch_size 4 rows for validation, found 2 in the largest bucket of"):
        data.load(config(uneven, buckets=[2, 5]))


def test_every_validation_row_is_read_once(uneven):
    dataset = data.load(config(uneven, buckets=[4, 6]))
    everything, counted = dataset.validation.with_remainder(), []
    assert len(dataset.validation) == 4
    for i in range(len(everything)):
        read = sizes(rows(everything, i)[1])
        assert len(read) == everything.rows_of(i)
        counted += read
    assert sorted(counted) == sorted([3] * 7 + [5] * 5 + [8] * 9)
    assert sum(map(everything.rows_of, range(len(everything)))) == 21


@pytest.mark.parametrize("buckets", [[6, 4], [4, 4], [4, 10], [12]])
def test_buckets_that_do_not_grow_are_refused(folder, buckets):
    with pytest.raises(InputError, match=r"expected lengths that grow, below 10 \(the larger of source_length and target_length\)"):
        data.load(config(folder, buckets=buckets))
