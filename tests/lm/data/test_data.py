"""Text is found, split by file and cut into windows, and batch t is a pure function of (seed, t)."""

import errno
import itertools
import os
import sysconfig
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpipe import InputError
from jpipe_lm.data import splits
from jpipe_lm.data.documents import Documents
from jpipe_lm.data.windows import Windows
from jpipe_train.data import data, sources
from jpipe_train.data.rows import BatchesOfRows
from tests.train.conftest import changed


def test_labels_are_the_inputs_moved_on_by_one(tiny, text):
    batches = data.load(changed(tiny))
    whole = text.read_bytes()
    for inputs, labels in (batches.train[0], batches.validation[0]):
        assert inputs.shape == labels.shape == inputs[:].shape == (4, 8)
        assert inputs.dtype == labels.dtype == labels[:].dtype == np.int32
        for row, next_row in zip(inputs[:], labels[:], strict=True):
            np.testing.assert_array_equal(row[1:], next_row[:-1])
            assert bytes(row.tolist() + next_row[-1:].tolist()) in whole


def test_a_batch_depends_on_seed_and_index_only(tiny):
    forwards, other = data.load(changed(tiny)).train, data.load(changed(tiny)).train
    far = 1000  # many times round the text
    repeated = whole(forwards[far])
    for t in (3, 0, far):
        np.testing.assert_array_equal(whole(forwards[t]), whole(other[t]))
    np.testing.assert_array_equal(repeated, whole(forwards[far]))
    assert not np.array_equal(whole(forwards[0]), whole(forwards[1]))
    assert not np.array_equal(whole(forwards[0]), whole(data.load(changed(tiny | {"seed": 1})).train[0]))


def test_validation_does_not_depend_on_the_seed(tiny):
    batches, reseeded = data.load(changed(tiny)), data.load(changed(tiny | {"seed": 1}))
    np.testing.assert_array_equal(whole(batches.validation[0]), whole(reseeded.validation[0]))


def text_of(documents: Documents) -> bytes:
    return bytes(documents.read(0, documents.size).tolist())


def whole(batch) -> tuple[np.ndarray, ...]:
    return tuple(rows[:] for rows in batch)


def test_batches_are_those_of_grain_and_only_the_rows_that_are_sliced_are_read():
    read = []

    class Source:
        def __len__(self):
            return 10

        def __getitem__(self, index):
            read.append(index)
            return np.full(3, index), np.full(3, -index)

    row = jax.ShapeDtypeStruct((3,), np.dtype(np.int64))
    elements = grain.MapDataset.source(Source()).shuffle(seed=5).repeat()
    batches, expected = BatchesOfRows(elements, 4, (row, row)), elements.batch(4, drop_remainder=True)
    for t in (0, 1, 2, 3, 1000):  # ten elements: batch 2 is of two epochs
        np.testing.assert_array_equal(whole(batches[t]), expected[t])
    read.clear()
    inputs, labels = batches[2]
    assert (inputs.shape, inputs.ndim, len(labels), read) == ((4, 3), 2, 4, [])
    np.testing.assert_array_equal(labels[1:3], expected[2][1][1:3])
    assert sorted(read[:2]) == sorted(expected[2][0][1:3, 0])
    assert len(read) == 2 + 8, "two for the slice, twice four for what it is compared with"


def test_an_epoch_holds_every_window_once():
    windows = Windows(Documents.of(np.arange(41, dtype=np.uint8), 256), 8)
    assert [windows[i][0].tolist() for i in range(len(windows))] == [list(range(8 * i, 8 * i + 8)) for i in range(5)]
    assert len(Windows(Documents.of(np.arange(40, dtype=np.uint8), 256), 8)) == 4  # the last label is missing


def test_a_single_file_is_split_by_position(text):
    split = splits.read_bytes(str(text), 0.25)
    assert text_of(split.train) + text_of(split.validation) == text.read_bytes()
    assert split.validation.size == text.stat().st_size // 4


def test_files_are_split_whole(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i]) * 10)
    split = splits.read_bytes(str(tmp_path), 0.3)
    train, validation = set(text_of(split.train)), set(text_of(split.validation))
    assert train | validation == set(range(40))
    assert not train & validation
    assert 4 < len(validation) < 20


@given(st.sets(st.text("abc/", min_size=1), min_size=2), st.floats(0.01, 0.99), st.randoms())
def test_the_split_is_stable_and_never_one_sided(names, fraction, random):
    ordered = sorted(names)
    held_out = sources.validation_names(ordered, fraction)
    shuffled = random.sample(ordered, len(ordered))
    assert held_out == sources.validation_names(shuffled, fraction)
    assert 0 < len(held_out) < len(names)
    if len(held_out) > 1 and len(names) > len(held_out) + 1:  # not at either limit: any other file may go, and nothing moves
        removed = next(iter(names - held_out))
        assert sources.validation_names(sorted(names - {removed}), fraction) == held_out


def test_the_standard_library_is_read_without_tests_and_packages():
    names, files = sources.find_files(None)
    root = Path(sysconfig.get_path("stdlib"))
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert [root / name for name in names] == files == sorted(files, key=lambda file: file.relative_to(root).as_posix())
    assert not {"site-packages", "test", "tests", "__pycache__"} & set(itertools.chain(*(Path(name).parts for name in names)))


def test_hidden_files_and_pipes_are_skipped_and_links_lead_to_a_file_once(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / ".git").mkdir(parents=True)
    outside.mkdir()
    for file in (folder / "b.txt", folder / ".hidden", folder / ".git" / "c", outside / "blob"):
        file.write_text("text")
    links = {
        "a": "b.txt",
        "first": "../outside/blob",
        "second": "first",
        "a-loop": ".",
        "self": "self",
        "far": "../outside",
        "no": "nowhere",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe")
    assert sources.find_files(str(folder)) == (["b.txt", "first"], [folder / "b.txt", folder / "first"])
    assert sources.find_files(str(folder / "**"))[0] == ["b.txt", "far/blob"]  # a glob goes through links to folders
    for name in ("b.txt", "first", "second", "a"):
        (folder / name).unlink()
    with pytest.raises(InputError, match=r"found no regular file at '.*/folder', without links to folders, which are not followed, so 0 b"):
        sources.find_files(str(folder))


def test_a_glob_names_files_below_its_fixed_part(tmp_path):
    for name in ("x/one.md", "x/y/two.md", "x/three.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert sources.find_files(str(tmp_path / "x" / "**" / "*.md"))[0] == ["one.md", "y/two.md"]


def test_a_text_that_is_too_short_says_how_much_is_missing(tiny, text):
    text.write_bytes(b"xxx")
    with pytest.raises(
        InputError, match=r"data\.path: expected at least 2 bytes for training and 2 for validation.*found 2 and 1 in"
    ) as caught:
        data.load(changed(tiny))
    assert str(text) in str(caught.value)


@pytest.mark.parametrize("kind", ["empty folder", "device", "no match"])
def test_a_path_that_is_not_a_regular_file_is_refused(kind, tmp_path):
    path = {"empty folder": str(tmp_path), "device": os.devnull, "no match": str(tmp_path / "*.txt")}[kind]
    with pytest.raises(InputError, match=r"found no regular file at .* so 0 bytes"):
        splits.read_bytes(path, 0.5)


@pytest.mark.parametrize(
    ("module", "function"), [("pathlib.Path", "is_dir"), ("os", "open"), ("os", "scandir")], ids=["look", "read", "list"]
)
def test_an_unreadable_file_is_named(module, function, tmp_path, text, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(f"{module}.{function}", refuse)
    with pytest.raises(InputError, match=rf"data\.path: cannot read '{tmp_path}.*': Permission denied; give files that can be read"):
        splits.read_bytes(str(tmp_path), 0.5)


def test_a_path_too_long_is_refused():
    with pytest.raises(InputError, match=r"data\.path: cannot find 'a{400}': File name too long; choose another"):
        splits.read_bytes("a" * 400, 0.5)


def test_names_that_are_not_utf8_are_read_like_others(tmp_path):
    for name in (b"a", b"\xff.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"text")
    split = splits.read_bytes(str(tmp_path), 0.5)
    assert (split.train.size, split.validation.size) == (4, 4)
