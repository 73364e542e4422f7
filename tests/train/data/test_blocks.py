"""Many rows of numbers at once: the same as row by row, or not converted at all."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpipe_train.data.arrays.blocks import arrays_of
from jpipe_train.data.arrays.numbers import array_of
from jpipe_train.data.files import arrow
from jpipe_train.data.files import records as rows_of_files
from jpipe_train.data.files.wrong_lines import WrongLine, WrongLines
from tests.lm.data.test_columns import zstd

TWICE = 2**60 + 2**36 + 1  # in float32 by way of float64 it is another number
INTEGERS = st.sampled_from([0, 1, -7, 2**31, TWICE, 2**62 + 3, 2**63, 2**70])
FLOATS = st.sampled_from([0.5, -0.0, 1e300, float("nan"), float("inf"), 2.0**60, 16777217.0])
CELLS = st.sampled_from(["1", " -3 ", "+2", "0.25", "1_000", "nan", "1e999", "x", "", "999999999999999999", "9999999999999999999"])
TYPED = st.sampled_from([np.float32(0.1), np.float64(0.1), np.int64(2**40), np.uint8(3), np.bool_(True), np.float64(1e300), np.str_("1")])
ONE = INTEGERS | FLOATS | CELLS | TYPED | st.booleans() | st.none()
LISTS = st.lists(INTEGERS | FLOATS, max_size=3) | st.lists(st.lists(FLOATS, min_size=1, max_size=2), max_size=2)
ARRAYS = st.sampled_from([np.zeros(2), np.ones(3), np.ones(2, np.int32), np.zeros(0), np.ones((2, 2)), np.asarray(["a"])])
KINDS = [INTEGERS, st.integers(-9, 9), FLOATS, CELLS, TYPED, ONE, LISTS, ARRAYS, INTEGERS | FLOATS, st.just([1, 2.5]), st.just(["1"])]


def records(names):
    """Draw rows whose values are of one kind, in some of which a value is missing."""
    rows = st.sampled_from(KINDS).flatmap(lambda kind: st.lists(st.fixed_dictionaries(dict.fromkeys(names, kind)), min_size=1, max_size=4))
    return rows | rows.map(lambda drawn: [*drawn, {names[0]: 1.5}])


def row_by_row(rows, key, is_target):
    """Return an array of all rows by the conversion of each, or None if one is wrong or they differ."""
    try:
        arrays = [array_of(row, key, is_target=is_target) for row in rows]
    except WrongLine:
        return None
    alike = len({(array.shape, array.dtype) for array in arrays}) == 1
    return np.stack(arrays) if alike else None


@given(st.sampled_from(["a", ["a"], ["a", "b"]]).flatmap(lambda key: st.tuples(st.just(key), records(list(key)))), st.booleans())
def test_rows_are_converted_at_once_as_one_by_one_or_not_at_all(drawn, is_target):
    key, rows = drawn
    numbers, expected = arrays_of(rows, key, is_target=is_target), row_by_row(rows, key, is_target)
    if numbers is not None:
        assert expected is not None
        assert numbers.dtype == expected.dtype
        np.testing.assert_array_equal(numbers, expected)


@pytest.mark.parametrize("is_target", [False, True])
@pytest.mark.parametrize("value", ["3", "0.25", 7, 1.5, np.float32(2), np.int64(4), np.bool_(True)])
def test_plain_rows_are_converted_at_once(value, is_target):
    for key in ("a", ["a", "b"]):
        assert arrays_of([{"a": value, "b": value}] * 3, key, is_target=is_target) is not None
    if not isinstance(value, str):
        assert arrays_of([{"a": [value] * 3 if isinstance(value, int | float) else np.ones(3)}] * 2, "a", is_target=is_target) is not None


def test_targets_of_which_some_are_no_integers_are_converted_one_by_one():
    for others in ({"a": "1_000"}, {"a": "0.5"}):
        assert arrays_of([{"a": "1"}, others], "a", is_target=True) is None
    assert arrays_of([{"a": 1}, {"a": 0.5}], "a", is_target=True) is None


def test_integers_beside_other_numbers_are_converted_at_once_if_no_rounding_differs():
    for large, is_at_once in ((2**53, True), (TWICE, False)):
        rows = [{"a": large}, {"a": 0.5}]
        numbers = arrays_of(rows, "a", is_target=False)
        assert (numbers is not None) == is_at_once
        if is_at_once:
            np.testing.assert_array_equal(numbers, row_by_row(rows, "a", is_target=False))
    assert array_of({"a": TWICE}, "a", is_target=False) != np.float32(np.float64(TWICE))


def test_columns_of_numbers_are_decoded_in_large_batches_and_shared_values_of_any_size_in_small_ones(tmp_path, monkeypatch):
    file, sizes = tmp_path / "a.parquet", []
    pq.write_table(pa.table({"number": np.arange(3000) % 7 / 3, "text": ["a" * 9999] * 3000, "list": [[1.5]] * 3000}), file)
    read = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda self, size, **options: sizes.append(size) or read(self, size, **options))
    for name in ("number", "text", "list"):
        with file.open("rb") as opened:
            assert sum(1 for _ in arrow.rows(opened, file, "parquet", [arrow.Column(name)], lambda *_: None)) == 3000
    assert [size for size in sizes if size > 1] == [1024, 64, 64]  # of each row group one row is read first


def test_shared_texts_are_decoded_in_small_batches_beside_numbers_of_the_same_path(tmp_path, monkeypatch):
    file, sizes = tmp_path / "a.parquet", []
    pq.write_table(pa.table({"a.b": np.arange(3000) % 7, "a": [{"b": "x" * 9999}] * 3000}), file)
    read = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda self, size, **options: sizes.append(size) or read(self, size, **options))
    with file.open("rb") as opened:
        assert sum(1 for _ in arrow.rows(opened, file, "parquet", [arrow.Column("a")], lambda *_: None)) == 3000
    assert sizes == [1, 64]


def blocks(file, columns):
    """Return the rows of a file in the blocks that are converted at once."""
    found = []
    rows = rows_of_files.records(
        [file], WrongLines("data.path"), columns, dict, lambda _: b"", 0.0, lambda block: found.append(block) or block
    )
    assert sum(1 for _ in rows) == sum(map(len, found))
    return found


def compressed_file(folder, kind, length, count=1500):
    """Write rows with `length` equal numbers, which are compressed to a small part of their size."""
    rows, file = [{"a": [0] * length}] * count, folder / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"a": [row["a"] for row in rows]}), file, compression="zstd", use_dictionary=False)
    elif kind == "csv.zst":
        file.write_bytes(zstd(b"a,b\n" + b"0," + b"0" * length + b"\n" + (b"0," + b"0" * length + b"\n") * (count - 1)))
    else:
        file.write_bytes(zstd("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return file


@pytest.mark.parametrize("kind", ["csv.zst", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("parquet", "jsonl.zst"))])
def test_blocks_are_small_after_decompression(kind, tmp_path):
    columns = [arrow.Column("a", "inputs_key", "numbers")]
    sizes = [len(block) for block in blocks(compressed_file(tmp_path, kind, 4), columns)]
    assert sizes == [1024, 476]
    file = compressed_file(tmp_path, kind, 2**12 if kind == "parquet" else 2**15)
    assert file.stat().st_size < 2**18  # all rows would be one block by the size of the file
    sizes = [len(block) for block in blocks(file, columns)]
    assert sum(sizes) == 1500
    assert max(sizes) <= 9  # rows of 2**15 bytes or more


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_file_may_have_many_columns(form, tmp_path):
    """No name is searched for among all names, which would take minutes for a hundred thousand."""
    names = [f"x{i}" for i in range(20_000 if form == "csv" else 1000)]
    if form == "csv":
        (tmp_path / "a.csv").write_text(",".join(names) + "\n" + "0.5," * (len(names) - 1) + "1\n")
    else:
        pq.write_table(pa.table({name: [1.0 if name == names[-1] else 0.5] for name in names}), tmp_path / "a.parquet")
    [[row]] = blocks(tmp_path / f"a.{form}", [arrow.Column(name, "inputs_key", "numbers") for name in names])
    assert np.array_equal(array_of(row, names, is_target=False), [0.5] * (len(names) - 1) + [1])
