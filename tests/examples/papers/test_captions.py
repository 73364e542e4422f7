"""Features of videos with captions."""

import io

import numpy as np
import pytest

from examples.papers.data.captions import Sizes, features_of
from jpipe import InputError
from jpipe_train.config.config import Config
from jpipe_train.data import data


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "features").mkdir()
    for part in ("train", "validation"):
        lines = []
        for i in range(3):
            np.savez(tmp_path / "features" / f"{part}{i}.npz", features=rng.normal(size=(3 + 4 * i, 5)))
            lines += [f"{part}{i}\tone dog runs", f"{part}{i}\ta dog sees {i} birds"]
        (tmp_path / f"{part}.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path


SIZES = {"frames": 6, "words": 7, "features": 5}


def load(folder, **arguments):
    arguments = {"folder": str(folder), **SIZES, **arguments}
    config = {
        "data": {"target": "examples.papers.data.captions:load", "arguments": arguments},
        "model": {"target": "examples.papers.models.s2vt:s2vt"},
        "train": {"batch_size": 3},
        "plan": {"microbatches": 1},
    }
    return data.load(Config.model_validate(config))


def test_a_row_is_a_caption_with_its_video(folder):
    dataset = load(folder)
    assert dataset.amount == "6 captions for training, 6 for validation, of 6 videos"
    seen = set()
    for t in range(2):
        inputs, labels = dataset.train[t]
        assert inputs["features"].shape == (3, 6, 5)
        assert inputs["features"].dtype == np.float32
        for features, tokens, label in zip(inputs["features"][:], inputs["tokens"][:], labels[:], strict=True):
            counted = label[label >= 0]
            assert tokens[0] == counted[-1] == 0
            np.testing.assert_array_equal(tokens[1 : len(counted)], counted[:-1])
            seen.add((features.tobytes(), len(counted)))
    expected = {file: features_of(folder / "features" / f"train{file}.npz", Sizes(**SIZES)).tobytes() for file in range(3)}
    assert seen == {(expected[file], length) for file in range(3) for length in (4, 6)}


def test_frames_are_padded_or_sampled_evenly(folder):
    sizes = Sizes(**SIZES)
    for file, count in (("train0", 3), ("train2", 11)):
        stored = np.load(folder / "features" / f"{file}.npz")["features"].astype(np.float32)
        assert len(stored) == count
        features = features_of(folder / "features" / f"{file}.npz", sizes)
        expected = np.concatenate([stored, np.zeros((3, 5))]) if count == 3 else stored[[0, 2, 4, 6, 8, 10]]
        np.testing.assert_array_equal(features, expected)


def truncate(file):
    file.write_bytes(file.read_bytes()[:200])


def pickled(file):
    content = io.BytesIO()
    np.savez(content, features=np.array([{"a": 1}], object))
    file.write_bytes(content.getvalue())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.unlink(), "there is no file '{file}', which a caption names; add it, or remove its captions"),
        (truncate, "cannot read '{file}': File is not a zip file; is it truncated?"),
        (lambda file: np.savez(file, other=np.zeros((2, 5))), "'{file}': expected an array 'features', found none"),
        (lambda file: np.savez(file, features=np.zeros((2, 4))), "'{file}': expected float features of 1 to 1,000,000 frames, 5 each"),
        (lambda file: np.savez(file, features=np.zeros((0, 5))), "found float64 of shape [0, 5]"),
        (pickled, "found object of shape [1]"),
    ],
)
def test_damaged_files_are_named(folder, spoil, message):
    file = folder / "features" / "validation1.npz"
    spoil(file)
    with pytest.raises(InputError) as caught:
        load(folder)
    assert message.format(file=file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_breaks_later_is_named_when_it_is_read(folder):
    dataset = load(folder)
    for file in (folder / "features").glob("train*"):
        np.savez(file, features=np.full((2, 5), np.nan))
    with pytest.raises(InputError, match=r"train\d\.npz': expected finite features, found NaN or infinity; make it again"):
        dataset.train[0][0]["features"][:]


def test_captions_that_cannot_be_used_are_dropped_by_choice(folder):
    with (folder / "train.tsv").open("a") as file:
        file.write("train0\t\n" + "train1\tone dog runs and runs and runs\n")
    with pytest.raises(InputError, match=r"'train\.tsv', line 7: expected 1 to 6 tokens and the end of a sentence, found none"):
        load(folder)
    dataset = load(folder, unusable="drop")
    assert dataset.amount.startswith("6 captions")
    assert dataset.remarks == ("1 line empty, 1 too long: dropped, the first is 'train.tsv', line 7",)
    (folder / "train.tsv").write_text("../train0\tone dog\n")
    with pytest.raises(InputError, match=r"'train\.tsv', line 1: expected the name of a video, a tab and a caption; correct it"):
        load(folder)
