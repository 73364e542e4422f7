"""Arrays of numbers: every kind of file gives the same rows, dtypes and splits are as documented, and mistakes are named."""

import contextlib
import gzip
import io
import json
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import pytest

from jpipe import InputError
from jpipe_train import cli
from jpipe_train.assemble import model
from jpipe_train.assemble.labels import check_labels
from jpipe_train.config.config import Config
from jpipe_train.data import data
from jpipe_train.data.arrays import read_arrays
from jpipe_train.data.files import streams
from jpipe_train.data.position import Position
from tests.lm.data.conftest import same
from tests.lm.data.test_columns import arrow, lines, parquet, table
from tests.train.conftest import changed

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "arrays.md"
X = np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32).astype(np.float64)  # exact in both
Y = np.arange(90) % 4
ROWS = [{"inputs": x.tolist(), "targets": int(y)} for x, y in zip(X, Y, strict=True)]
CELLS = [dict(zip("abc", row["inputs"], strict=True)) | {"targets": row["targets"]} for row in ROWS]
ARRAYS = {"format": "arrays", "path": "a"}
OWN = {"model": {"target": "a:b"}, "data": ARRAYS}
MODEL = {"model": {"target": "a:b"}, "plan": {"microbatches": 2}}


def configured(tiny, path, loss=None, train=None, **keys) -> Config:
    section = {"format": "arrays", "path": str(path), "validation_fraction": 0.3, **keys}
    return changed(tiny | MODEL | {"data": section, "loss": loss or {}}, train=train or {})


def everything(loaded) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return all rows of both parts, each once, those for training as their elements come in the first epoch."""
    parts = {"train": [loaded.train.elements[i] for i in range(loaded.rows)]}
    parts["validation"] = [loaded.validation.elements[i] for i in range(len(loaded.validation.elements))]
    return {name: (np.stack([x for x, _ in rows]), np.stack([y for _, y in rows])) for name, rows in parts.items()}


def sorted_rows(loaded) -> tuple[np.ndarray, np.ndarray]:
    inputs, targets = (np.concatenate(arrays) for arrays in zip(*everything(loaded).values(), strict=True))
    order = np.lexsort(inputs.reshape(len(inputs), -1).T)
    return inputs[order], targets[order]


def fixed_size(_) -> bytes:
    sink = pa.BufferOutputStream()
    columns = {"inputs": pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 3), "targets": pa.array(Y)}
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


OF_ROWS = {
    "parquet": (parquet, ROWS, "inputs"),
    "fixed.parquet": (fixed_size, ROWS, "inputs"),
    "arrow": (arrow, ROWS, "inputs"),
    "jsonl": (lines, ROWS, "inputs"),
    "csv": (table, CELLS, ["a", "b", "c"]),
    "columns.parquet": (parquet, CELLS, ["a", "b", "c"]),
}


@pytest.mark.parametrize("kind", OF_ROWS)
def test_every_kind_of_file_with_rows_gives_the_same_batches(kind, tiny, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    write, rows, key = OF_ROWS[kind]
    (tmp_path / f"a.{kind}").write_bytes(write(rows))
    first, other = data.load(configured(tiny, tmp_path / "a.jsonl")), data.load(configured(tiny, tmp_path / f"a.{kind}", inputs_key=key))
    assert first.digest() == other.digest()
    for t in range(3):
        assert same(first.train[t], other.train[t])
    inputs, targets = sorted_rows(other)
    order = np.lexsort(X.T)
    assert np.array_equal(inputs, X[order]), "each row is there once"
    assert np.array_equal(targets, Y[order])
    assert (inputs.dtype, targets.dtype) == (np.float32, np.int32)


def of_numpy(folder: Path, kind: str, x: np.ndarray, y: np.ndarray) -> Path:
    """Write arrays in NumPy's files, and return their path."""
    folder.mkdir()
    if kind == "npy":
        np.save(folder / "inputs.npy", x)
        np.save(folder / "targets.npy", y)
        (folder / "README.md").write_text("about it")
        return folder
    {"npz": np.savez, "compressed": np.savez_compressed}[kind](folder / "arrays.npz", inputs=x, targets=y, other=np.zeros(2))
    return folder / "arrays.npz"


@pytest.mark.parametrize("kind", ["npy", "npz", "compressed"])
@pytest.mark.parametrize("form", ["C", "F", ">f8"])
def test_every_kind_of_file_of_numpy_gives_the_same_batches(kind, form, tiny, tmp_path):
    x = np.asarray(X, order=form) if form in "CF" else X.astype(form)
    loaded = data.load(configured(tiny, of_numpy(tmp_path / "other", kind, x, Y)))
    first = data.load(configured(tiny, of_numpy(tmp_path / "npy", "npy", X.astype(np.float32), Y.astype(np.uint8))))
    assert all(same(first.train[t], loaded.train[t]) for t in range(3))
    inputs, targets = sorted_rows(loaded)
    order = np.lexsort(X.T)
    assert np.array_equal(inputs, X[order])
    assert np.array_equal(targets, Y[order])
    assert (inputs.dtype, targets.dtype) == (np.float32, np.int32)


def test_rows_of_numpys_files_stay_there(tiny, tmp_path):
    for kind in ("npy", "npz"):
        path = of_numpy(tmp_path / kind, kind, X.astype(np.float32), Y)
        loaded = data.load(configured(tiny, path))
        file = path / "inputs.npy" if kind == "npy" else path
        content = file.read_bytes()
        file.write_bytes(content.replace(X.astype(np.float32).tobytes(), (2 * X).astype(np.float32).tobytes()))
        assert np.array_equal(sorted_rows(loaded)[0], 2 * X[np.lexsort(X.T)])
        file.write_bytes(content[:200])
        with pytest.raises(InputError, match=r"the file was cut off during the run"):  # and no signal ends the process
            everything(loaded)


def test_rows_in_memory_are_the_same_in_blocks_of_any_size(tiny, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    first = data.load(configured(tiny, tmp_path / "a.jsonl"))
    monkeypatch.setattr("jpipe_train.data.arrays.array_rows._BLOCK", 5 * 3 * 4)  # bytes of five rows of inputs
    other = data.load(configured(tiny, tmp_path / "a.jsonl"))
    assert first.digest() == other.digest()
    assert all(same(first.train[t], other.train[t]) for t in range(20))


def test_images_keep_their_shape_and_their_integers(tiny, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (40, 2, 3, 1), np.uint8)
    labels = np.arange(40) % 3 == 0
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    nested = pa.array(images.tolist(), pa.list_(pa.list_(pa.list_(pa.uint8()))))
    for name, column in (("tensors", tensors), ("nested", nested)):
        pq.write_table(pa.table({"inputs": column, "targets": labels}), tmp_path / f"{name}.parquet", row_group_size=7)
    loaded = [data.load(configured(tiny, tmp_path / f"{name}.parquet")) for name in ("tensors", "nested")]
    assert same(loaded[0].train[0], loaded[1].train[0])
    inputs, targets = sorted_rows(loaded[0])
    assert (inputs.dtype, inputs.shape, targets.dtype) == (np.uint8, images.shape, np.int32)
    by_image = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    assert [by_image[image.tobytes()] for image in inputs] == targets.tolist()


def test_numbers_without_types_are_floating_point_inputs_and_integer_targets(tiny, tmp_path):
    for name, targets, dtype in (("a", ["1", "-2"], np.int32), ("b", ["1", "0.5"], np.float32)):
        (tmp_path / name).write_text("inputs,targets\n" + "".join(f"{i},{targets[i % 2]}\n" for i in range(40)))
        loaded = data.load(configured(tiny, tmp_path / name, {"target": "a:b"}))
        inputs, labels = loaded.train[0]
        assert (inputs.dtype, inputs.shape, labels.dtype, labels.shape) == (np.float32, (4,), dtype, (4,))
        assert {*sorted_rows(loaded)[1].tolist()} == {*map(float, targets)}


def test_cells_may_have_spaces_signs_and_exponents(tiny, tmp_path):
    cells = {" 1.5": 1.5, "2\t": 2.0, "+3": 3.0, "-4e0": -4.0, "nan": np.nan, ".5": 0.5, "6.": 6.0, "1E1": 10.0, "007": 7.0}
    rows = [f"{cell},{i % 3}\n" for i, cell in enumerate(cells)] * 5 + [f" {i}, +{i % 2} \n" for i in range(20, 60)]
    (tmp_path / "a.csv").write_text("inputs,targets\n" + "".join(rows))
    inputs, targets = sorted_rows(data.load(configured(tiny, tmp_path / "a.csv")))
    assert np.array_equal(np.sort(inputs), np.sort([*cells.values()] * 5 + [*map(float, range(20, 60))]), equal_nan=True)
    assert (targets.dtype, {*targets.tolist()}) == (np.int32, {0, 1, 2})


def test_with_64_bits_integers_in_text_keep_all_digits(tiny, tmp_path):
    large = [2**63 - 1, -(2**63), 2**53 + 1, 1234567890123456789]
    (tmp_path / "a.csv").write_text("inputs,targets\n" + "".join(f"{i},{large[i % 4]}\n" for i in range(40)))
    (tmp_path / "a.jsonl").write_bytes(lines([{"inputs": float(i), "targets": large[i % 4]} for i in range(40)]))
    for name in ("a.csv", "a.jsonl"):
        with jax.enable_x64(True):
            targets = sorted_rows(data.load(configured(tiny, tmp_path / name, {"target": "a:b"})))[1]
        assert (targets.dtype, sorted(targets.tolist())) == (np.int64, sorted(large * 10))


def test_with_64_bits_numbers_keep_them(tiny, tmp_path):
    path = of_numpy(tmp_path / "a", "npy", np.arange(40) / 3, np.arange(40) + 2**40)
    with jax.enable_x64(True):
        inputs, targets = sorted_rows(data.load(configured(tiny, path, {"target": "a:b"})))
    assert np.array_equal(inputs, np.arange(40) / 3)
    assert np.array_equal(targets, np.arange(40) + 2**40)
    assert (inputs.dtype, targets.dtype) == (np.float64, np.int64)


def test_equal_inputs_are_on_one_side_and_appended_rows_move_no_other(tiny, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines([{"inputs": i % 20, "targets": i} for i in range(200)]))
    parts = everything(data.load(configured(tiny, tmp_path / "a.jsonl", {"target": "a:b"})))
    train, validation = ({*parts[name][0].tolist()} for name in ("train", "validation"))
    assert train | validation == {*range(20)}
    assert train
    assert validation
    assert not train & validation
    ranges = [np.arange(1000.0), np.arange(1100.0)]
    held_out = [
        {*everything(data.load(configured(tiny, of_numpy(tmp_path / f"{len(x)}", "npy", x, x.astype(int)))))["validation"][1].tolist()}
        for x in ranges
    ]
    assert held_out[0] == {y for y in held_out[1] if y < 1000}
    assert 250 < len(held_out[0]) < 350


def test_all_of_another_path_is_for_validation(tiny, tmp_path):
    path = of_numpy(tmp_path / "a", "npz", X, Y)
    (tmp_path / "b.jsonl").write_bytes(lines(ROWS[:7]))
    config = configured(tiny, path, validation_path=str(tmp_path / "b.jsonl"), validation_fraction=0.05, train={"batch_size": 8})
    loaded = data.load(config)
    assert (loaded.rows, len(loaded.validation.elements)) == (90, 7)
    assert len(data.held_out(config).validation.elements) == 7
    assert len(data.held_out(config, str(path)).validation.elements) == 90
    assert [len(labels) for (_, labels), _ in loaded.with_some_validation().held_out(4)] == [7]


def test_a_run_resumes_with_another_batch_size_and_ends_with_its_epochs(tiny, tmp_path):
    path = of_numpy(tmp_path / "a", "npy", X, Y)
    whole = data.load(configured(tiny, path))
    then = data.load(configured(tiny, path, train={"batch_size": 6}), Position(batch=2, rows=(8,), pieces=4))
    assert np.array_equal(then.train[2][0][:6], np.concatenate([whole.train[2][0][:4], whole.train[3][0][:2]]))
    for loss, last in (({}, -1), ({"name": "squared_error"}, None)):  # only the cross-entropy leaves out rows
        epochs = {"epochs": 1.0, "steps": None, "batch_size": 50}
        loaded = data.load(configured(tiny, path, loss, train=epochs))
        assert loaded.steps == 2
        labels = loaded.train[1][1][:50]
        assert (labels[loaded.rows - 50 :] == -1).all() == (last == -1)


def test_several_sources_are_mixed(tiny, tmp_path):
    sources = [{"path": str(of_numpy(tmp_path / name, "npy", X + shift, Y)), "weight": 1} for name, shift in (("one", 0), ("two", 100))]
    config = changed(tiny | MODEL | {"data": {"format": "arrays", "sources": sources}})
    assert [(row > 50).all() for row in data.load(config).train[0][0][:4]] in ([False, True] * 2, [True, False] * 2)
    sources[1]["path"] = str(of_numpy(tmp_path / "three", "npy", X[:, :2], Y))
    with pytest.raises(
        InputError, match=r"data.sources.1.path: .* found inputs and targets float32\[2\] and int32\[\] in place of float32\[3\]"
    ):
        data.load(changed(tiny | MODEL | {"data": {"format": "arrays", "sources": sources}}))


def json_lines(*rows: dict) -> bytes:
    return lines([*ROWS, *rows, *ROWS])


def with_objects(_) -> bytes:
    file = io.BytesIO()
    np.savez(file, inputs=np.asarray([{}, None]), targets=Y)
    return file.getvalue()


def archive(save=np.savez, **arrays) -> bytes:
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def no_rows() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"inputs": pa.array([], pa.float32()), "targets": pa.array([], pa.int64())}), sink)
    return sink.getvalue().to_pybytes()


WRONG = {
    "ragged": (json_lines({"inputs": [1.0, 2.0], "targets": 0}), {}, r"a', line 91: expected the shape \[3\] .* 'inputs', found \[2\]; "),
    "ragged inside": (lines([{"inputs": [[1, 2], [3]], "targets": 0}]), {}, "line 1: expected lists of the same length in 'inputs', found"),
    "ragged parquet": (parquet([*ROWS, {"inputs": [1.0], "targets": 1}]), {}, r"a', row 91: expected the shape \[3\] .*, found \[1\]"),
    "ragged lists": (parquet([{"inputs": [[1.0], [1.0, 2.0]], "targets": 1}]), {}, "row 1: expected lists of the same length in 'inputs'"),
    "null": (json_lines({"inputs": None, "targets": 0}), {}, "line 91: expected numbers in 'inputs', found null"),
    "null in parquet": (
        parquet([*ROWS, {"inputs": ROWS[0]["inputs"], "targets": None}]),
        {},
        "row 91: expected numbers in 'targets', found nu",
    ),
    "null list": (parquet([*ROWS[:30], {"inputs": None, "targets": 1}]), {}, "row 31: expected numbers in 'inputs', found null"),
    "words": (json_lines({"inputs": ["a", "b", "c"], "targets": 0}), {}, r"expected numbers in 'inputs', found \['a', 'b', 'c'\]"),
    "empty": (json_lines({"inputs": [], "targets": 0}), {}, "expected numbers in 'inputs', found an empty list"),
    "cell": (table([*CELLS, CELLS[0] | {"b": ""}]), {"inputs_key": ["a", "b"]}, "line 92: expected a number in 'b', found ''"),
    **{
        f"cell {cell!a}": (table([*CELLS, CELLS[0] | {"b": cell}]), {"inputs_key": ["a", "b"]}, f"line 92: {expected} in 'b', found '")
        for cell, expected in {
            "1_000": "expected a number",
            "\uff11\uff12": "expected a number",
            "\u0661": "expected a number",
            "\u20091": "expected a number",
            "1e400": "expected a finite number",
            "-inf": "expected a finite number",
        }.items()
    },
    "a class with an underscore": (b"inputs,targets\n1,0\n2,1_0\n3,0\n", {}, "line 3: expected a number in 'targets', found '1_0'"),
    "a class in other digits": ("inputs,targets\n1,0\n2,\uff11\n".encode(), {}, "line 3: expected a number in 'targets', found '"),
    "infinite in JSON": (
        lines([*ROWS, ROWS[0]]).replace(b'{"inputs"', b'{"targets": 0, "inputs": [1, 2.5, 1e400], "x"', 1),
        {},
        "line 1: expected finite numbers in 'inputs', found inf",
    ),
    "huge in JSON": (json_lines({"inputs": [10**39, 0, 1], "targets": 0}), {}, "line 91: expected numbers in 'inputs', found "),
    "huge target in JSON": (json_lines({"inputs": [0, 0, 1], "targets": 2**64}), {}, "line 91: expected numbers in 'targets', found "),
    "list among columns": (
        lines(ROWS),
        {"inputs_key": ["inputs", "targets"]},
        r"a number in 'inputs', because it is one of several columns, found .* \[3\]",
    ),
    "text column": (
        parquet([{"inputs": "a", "targets": 1}]),
        {},
        "expected numbers or lists of them in the column 'inputs' of .*string.*set data.inp",
    ),
    "no column": (parquet(CELLS), {}, "expected the column 'inputs' in '.*a', found 'a', 'b', 'c', 'targets'; set data.inputs_key"),
    "classes": (
        lines([row | {"targets": 0.5} for row in ROWS]),
        {},
        r"90 lines are wrong: .* expected integers in 'targets', because .* found 0\.5 \(float32\); save classes as integers, or",
    ),
    "classes in cells": (
        b"inputs,targets\n1,+1\n2,99999999999999999999\n3,-3\n",
        {},
        r"a', line 3: expected integers in 'targets', .* found '99999999999999999999'; save classes as integers",
    ),
    "classes in parquet": (
        parquet([row | {"targets": float(row["targets"])} for row in ROWS]),
        {},
        "expected integers or lists of them in the column 'targets' of '.*a', found double, .* save classes as integers, or choose loss",
    ),
    "no rows in parquet": (no_rows(), {}, "expected rows of numbers in '.*a', found no rows; name files"),
    "no rows in numpy": (archive(inputs=X[:0], targets=Y[:0]), {}, "expected rows of numbers in '.*a', found no rows; name files"),
    "a pickle": (
        b"\x80\x04" + b"a\n" * 11,
        {},
        "expected rows of numbers in '.*a', found another kind of file: it seems to be a pickle, which jpipe never loads; give",
    ),
    "equal inputs": (
        lines([row | {"inputs": 1} for row in ROWS]),
        {},
        r"found .*90.*; add rows with other inputs, .* in data.validation_path \(rows with equal inputs always stay together\)",
    ),
    "large": (
        json_lines({"inputs": [1e39, 0, 0], "targets": 0}),
        {},
        r"line 91: expected numbers up to 3.4e\+38 \(the range of float32\), found 1e\+39",
    ),
    "large integer": (json_lines({"inputs": [0, 0, 0], "targets": 2**40}), {}, "line 91: expected integers from .* to 2,147,483,647 "),
    "an image": (b"\x89PNG\r\n\x1a\n" + bytes(60), {}, r"it seems to be an image"),
    "few": (lines(ROWS[:3]), {}, r"expected at least 4 examples for training .* found \d and"),
    "objects": (with_objects(0), {}, "expected numbers in '.*a', inputs, found Python objects .a pickle., which jpipe never loads"),
    "no array": (archive(x=X), {}, "expected an array 'inputs' in '.*a', found 'x'; name other arrays in data.inputs_key"),
    "other rows": (
        archive(inputs=X, targets=Y[:7]),
        {},
        "expected arrays with the same number of rows, found 90 in .*, inputs, 7 in .*, targets",
    ),
    "several names": (
        archive(inputs=X, targets=Y),
        {"inputs_key": ["inputs"]},
        "data.inputs_key and data.targets_key must name one array each, found a list; replace the list by a name",
    ),
    "a number": (
        archive(inputs=np.float32(3), targets=Y),
        {},
        r"expected an array of rows in .*, inputs, found the shape \[\]; save an array",
    ),
    "floating classes": (
        archive(inputs=X, targets=X[:, 0]),
        {},
        r"a', targets: expected integers in 'targets', because the cross-entropy needs classes, found -?[\d.]+ \(float64\); save",
    ),
    "complex": (archive(inputs=X + 1j, targets=Y), {}, "expected numbers in .*, inputs, found complex128"),
    "cut off": (archive(inputs=X, targets=Y)[:-40], {}, "cannot read '.*a': it begins like a NumPy archive .* damaged, cut off"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_name_the_file_and_the_row(name, tiny, tmp_path):
    content, keys, message = WRONG[name]
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=rf"^data\.path: .*{message}"):
        data.load(configured(tiny, tmp_path / "a", **keys))


def test_a_number_that_does_not_fit_is_named_when_it_is_read(tiny, tmp_path):
    x = X.copy()
    x[17, 1] = 1e300
    loaded = data.load(configured(tiny, of_numpy(tmp_path / "a", "npy", x, Y)))
    with pytest.raises(
        InputError, match=r"^data: '.*inputs\.npy'\[17\]: expected numbers up to 3\.4e\+38 \(the range of float32\), found 1e\+300; "
    ):
        everything(loaded)


def npy(header: bytes, version: tuple[int, int] = (1, 0), content: bytes = b"") -> bytes:
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version[0] == 1 else "<I", len(header)) + header + content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy(b"{'descr': '<f4, 'fortran_order': False, 'shape': (90, 3)}\n"), "its header is damaged or not supported"),
        (npy(b"{'descr': '<f4', \0}\n"), "its header is damaged or not supported"),
        (npy(b"{'descr': ((((\n"), "its header is damaged or not supported"),
        (npy(b"-" * 9000 + b"1"), "its header is damaged or not supported"),
        (npy(b"{}\n", (9, 0)), r"its header is damaged or not supported \(version 9\.0 of the format is unknown\)"),
        (b"", r"expected the content of a \.npy file of NumPy, but it is empty"),
        (b"\0\1\2" * 40, r"expected the content of a \.npy file of NumPy, but it is damaged"),
        (b"\x80\x04" + bytes(40), r"expected the content of a \.npy file of NumPy, but it seems to be a pickle, which jpipe never loads"),
        *(
            (
                npy(b"{'descr': '<f8', 'fortran_order': %s, 'shape': (%s), }\n" % (order, shape), content=bytes(2160)),
                r"its header is damaged or not supported \(the shape \(.*",
            )
            for order, shape in (
                (b"True", b"True, 3"),
                (b"False", b"90, True"),
                (b"False", b"90, 3, " + b"1, " * 68),
                (b"True", b"1, " * 33),
                (b"True", b"0, 9223372036854775807"),
                (b"False", b"0, 2, 4611686018427387904"),
            )
        ),
    ],
    ids=["quote", "nul", "brackets", "deep", "version", "empty", "other", "pickle", *("shape" + str(i) for i in range(6))],
)
def test_damaged_files_of_numpy_are_named(content, message, tiny, tmp_path):
    folder = of_numpy(tmp_path / "a", "npy", X, Y)
    (folder / "inputs.npy").write_bytes(content)
    for path in (folder, folder / "inputs.npy"):
        if path == folder or not content.startswith(b"\x93"):
            with pytest.raises(InputError, match=rf"^data\.path: cannot read '.*a/inputs\.npy': .*{message}"):
                data.load(configured(tiny, path))


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_damaged_archive_is_named(method, tiny, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as packed, zipfile.ZipFile(io.BytesIO(archive(inputs=X, targets=Y))) as plain:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert data.load(configured(tiny, tmp_path / "a.npz")).rows
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[60:200] = bytes(140)
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"^data\.path: cannot read '.*a\.npz': it begins like .*, but .* damaged"):
        data.load(configured(tiny, tmp_path / "a.npz"))


def test_a_file_that_unpacks_to_far_more_than_its_size_is_an_error(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "_FREE", 10**5)
    (tmp_path / "a.npz").write_bytes(packed := archive(np.savez_compressed, inputs=np.zeros((10**4, 50)), targets=Y))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"inputs,targets\n" + b"0,0\n" * 10**5))
    rows = pa.table({"inputs": np.zeros(10**5, np.int64), "targets": np.zeros(10**5, np.int64)})
    pq.write_table(rows, tmp_path / "a.parquet", compression="zstd")
    for name in ("a.npz", "a.csv.gz", "a.parquet"):
        message = rf"^data\.path: cannot read '.*{name}': it has [\d,]+ bytes and unpacks to more than [\d,]+, which is unusual for data"
        with pytest.raises(InputError, match=message):
            data.load(configured(tiny, tmp_path / name))
    monkeypatch.setattr(streams, "_FREE", 10**4 * 50 * 8)
    assert len(packed) * 200 < streams._FREE
    with pytest.raises(InputError, match="the same number of rows"):
        data.load(configured(tiny, tmp_path / "a.npz"))


def test_headers_of_other_versions_are_read(tiny, tmp_path):
    """Version 3.0, and one that Python 2 wrote, without NumPy's warning; the names of the arrays may have their ending."""
    expected = sorted_rows(data.load(configured(tiny, of_numpy(tmp_path / "a", "npy", X, Y))))
    headers = {(3, 0): b"(90, 3)", (1, 0): b"(90L, 3L)"}
    for version, shape in headers.items():
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': " + shape + b"}\n"
        (tmp_path / "a" / "inputs.npy").write_bytes(npy(header, version, X.tobytes()))
        loaded = sorted_rows(data.load(configured(tiny, tmp_path / "a", inputs_key="inputs.npy")))
        assert np.array_equal(loaded[0], expected[0])


def test_integers_that_do_not_fit_the_common_dtype_are_named_at_the_start(tiny, tmp_path):
    for name, dtype, most in (("a", np.int32, 5), ("b", np.uint32, 2**32 - 1)):
        rows = {"inputs": np.asarray([*range(40), most], dtype), "targets": np.zeros(41, int)}
        pq.write_table(pa.table(rows), tmp_path / f"{name}.parquet")
    assert data.load(configured(tiny, tmp_path / "b.parquet")).train[0][0].dtype == np.uint32
    with pytest.raises(
        InputError,
        match=r"^data\.path: '.*b\.parquet', row 41: expected integers .* \(the range of int32\), found 4,294,967,295; .* one dtype",
    ):
        data.load(configured(tiny, tmp_path / "*.parquet"))


def test_messages_about_paths_are_about_numbers(tiny, tmp_path):
    for path, message in (("none", "'.*none' does not exist; give a file, a folder or a glob$"), ("*.x", "or a glob that holds numbers$")):
        with pytest.raises(InputError, match=message):
            data.load(configured(tiny, tmp_path / path))
    (tmp_path / "a.csv").write_text("0.1,1\n" * 2 + "0.2,1\n" * 9)
    with pytest.raises(InputError, match=r"expected the column 'inputs' .*, found '0\.1', '1'; .* the first line .* names"):
        data.load(configured(tiny, tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_text("inputs,targets\n")
    with pytest.raises(InputError, match=r"expected rows of numbers in '.*a\.csv', found no rows"):
        data.load(configured(tiny, tmp_path / "a.csv"))


def test_a_folder_in_place_of_an_array_is_named(tiny, tmp_path):
    folder = of_numpy(tmp_path / "a", "npy", X, Y)
    (folder / "inputs.npy").unlink()
    (folder / "inputs.npy").mkdir()
    with pytest.raises(InputError, match=r"^data\.path: expected a file '.*a/inputs\.npy', found a folder of this name"):
        data.load(configured(tiny, folder, {"name": "squared_error"}))


def test_folders_without_the_arrays_are_errors(tiny, tmp_path):
    folder = of_numpy(tmp_path / "a", "npy", X, Y)
    with pytest.raises(InputError, match=r"data\.path: expected the file 'pixels\.npy' in a folder of NumPy files, found 'inputs\.npy'"):
        data.load(configured(tiny, folder, inputs_key="pixels"))
    (folder / "arrays.npz").write_bytes(archive(inputs=X, targets=Y))
    with pytest.raises(
        InputError, match=r"expected one \.npz, or a folder of \.npy files, found 'arrays\.npz', 'inputs\.npy', 'targets\.npy'"
    ):
        data.load(configured(tiny, folder, {"name": "squared_error"}))
    (folder / "inputs.npy").write_bytes((folder / "inputs.npy").read_bytes()[:500])
    (folder / "arrays.npz").unlink()
    with pytest.raises(InputError, match=r"cannot read '.*inputs\.npy': it is cut off: expected 2,160 bytes, found 372; give files"):
        data.load(configured(tiny, folder, {"name": "squared_error"}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {}}, "data.format arrays needs a model of your own, .* set model.target"),
        ({"data": {"format": "arrays"}}, "format arrays needs path; set path to files with rows of numbers"),
        ({"data": {"inputs_key": "a"}}, "inputs_key has no effect with format auto: inputs_key is for arrays"),
        ({"data": {"format": "arrays", "path": "a", "inputs_key": ["a", "a"]}}, "expected each column once, found 'a' twice"),
        ({"data": ARRAYS | {"inputs_key": [0, 1]}}, r"inputs_key\n.* expected names of columns as text, found 0; write '0'"),
        (
            {"data": ARRAYS | {"targets_key": None}},
            r"targets_key\n.* expected names of columns as text, found None; put the name in quotes",
        ),
        ({"data": ARRAYS | {"inputs_key": []}}, r"inputs_key\n.* expected the name of a column, or a list of 1 to 100,000 names, found 0"),
        ({"data": ARRAYS | {"inputs_key": ""}}, r"inputs_key\n.* expected names of columns of 1 to 256 characters, found ''"),
        ({"model": {"target": "a:b", "seq_len": 8}}, "model.seq_len has no effect with model.target and data.format arrays"),
        ({"loss": {"name": "squared_error", "target": "a:b"}}, "name has no effect with 'a:b', found squared_error"),
        ({"model": {}, "data": {}, "loss": {"name": "squared_error"}}, "loss.name has no effect without model.target"),
    ],
)
def test_keys_that_do_not_fit_are_errors(sections, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        Config.model_validate(OWN | sections)


def test_the_squared_error_is_the_mean_over_all_numbers():
    loss = model.loss(Config.model_validate(OWN | {"loss": {"name": "squared_error"}}))
    outputs, targets = jnp.asarray([[1.0], [3.0]]), jnp.asarray([0.0, 1.0])
    np.testing.assert_array_equal(loss(outputs, targets), (5, 2))
    np.testing.assert_array_equal(loss(outputs, jnp.asarray([[0], [1]])), (5, 2))
    with pytest.raises(
        InputError, match=r"loss\.name: squared_error: expected outputs with the shape of the targets, \[2\], found \[2, 2\]; "
    ):
        loss(jnp.ones((2, 2)), targets)
    assert model.loss(Config.model_validate(OWN | {"loss": {"name": "cross_entropy"}})) is model.loss(Config.model_validate(OWN))
    with pytest.raises(
        InputError, match=r"loss: cross_entropy: expected outputs with one more dimension than the labels, \[2, 1\], found \[2, 3\]; "
    ):
        model.loss(Config.model_validate(OWN))(jnp.ones((2, 3)), jnp.ones((2, 1), jnp.int32))


def test_classes_that_the_model_does_not_have_are_errors(tiny, tmp_path, monkeypatch):
    path = of_numpy(tmp_path / "a", "npy", X, Y)
    config = configured(tiny, path, train={"batch_size": 40})
    outputs = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    with pytest.raises(
        InputError, match=r"data: expected every label to be at most 2 \(.* 3 outputs for each\), found 3 in '.*targets\.npy'\[3\]; correct"
    ):
        check_labels(config, data.load(config), outputs)
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    for section in ({"path": str(tmp_path / "a.jsonl")}, {"sources": [{"path": str(tmp_path / "a.jsonl")}] * 2}):
        of_rows = changed(tiny | MODEL | {"data": {"format": "arrays", "validation_fraction": 0.3, **section}})
        with pytest.raises(InputError, match=r"found 3 in '.*a\.jsonl', line 4; correct the labels, or the model"):
            check_labels(of_rows, data.load(of_rows), outputs)
    with pytest.raises(InputError, match=r"found 3 in '.*a\.jsonl', line 4; "):
        check_labels(config, data.held_out(config, str(tmp_path / "a.jsonl")), outputs)
    monkeypatch.setattr("jpipe_train.data.arrays.numpy_files._MOST_CHECKED", 8)
    with pytest.raises(InputError, match=r"found 3 in validation\[0\]; "):
        check_labels(config, data.load(config), outputs)
    numbers = configured(tiny, path, {"name": "squared_error"})
    assert check_labels(numbers, loaded := data.load(numbers), outputs) is loaded


@pytest.mark.slow
def test_the_example_of_the_page_learns(tmp_path, monkeypatch, no_report):
    """A whole model, Parquet and a config, without code for the data; then another file is evaluated."""
    monkeypatch.chdir(tmp_path)
    (net, write), (config, _) = (re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.M | re.S) for kind in ("python", "yaml"))
    Path("net.py").write_text(net)
    Path("features.yaml").write_text(config)
    subprocess.run([sys.executable, "-c", write], check=True)  # writes the Parquet file
    small = ["run.dir=run", "compile_cache=null", "log=[]", "checkpoint.every=200", "train.trace_batches=0"]
    assert cli.main(["train", "features.yaml", "--allow-code", *(word for key in small for word in ("--set", key))]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row["val_accuracy"] for row in rows if "val_accuracy" in row]
    assert evaluations[0] < 0.7
    assert evaluations[-1] > 0.9
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["evaluate", "run", "--data", "features.parquet", "--allow-code"]) == 0
    assert "2,000 rows" in printed.getvalue()
    np.savez("one.npz", features=np.zeros((1, 8)), label=np.zeros(1, int))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["evaluate", "run", "--data", "one.npz", "--allow-code"]) == 0
    assert re.search(r"one\.npz', 1 row\n(.|\n)*over 1 label\b[^s]", printed.getvalue())
    np.savez("narrow.npz", features=np.zeros((9, 5)), label=np.zeros(9, int))
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        assert cli.main(["evaluate", "run", "--data", "narrow.npz", "--allow-code"]) == 2
    assert "--data: expected inputs of shape [8], as in training, found [5] in 'narrow.npz'; give rows" in printed.getvalue()


def test_targets_beside_wrong_inputs_decide_no_shape(tiny, tmp_path):
    (folder := tmp_path / "rows").mkdir()
    (folder / "a.jsonl").write_bytes(lines([{"inputs": None, "targets": 1.0}] * 2))
    (folder / "b.jsonl").write_bytes(lines([{"inputs": 1, "targets": [1.0, 2.0]}] * 2))
    with pytest.raises(InputError, match=r"data\.path: 2 lines are wrong: "):
        data.load(configured(tiny, folder, {"name": "squared_error"}))


def test_a_row_in_memory_keeps_no_other_rows(tiny, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    arrays = read_arrays.read(configured(tiny, tmp_path / "a.jsonl"))
    for side in (arrays.train, arrays.validation):
        assert all(array.stored[0].base is None for array in side.arrays)
