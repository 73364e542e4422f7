"""Read rows of Parquet and Arrow files with pyarrow, one row group or record batch at a time.

Files may be untrusted, so pyarrow checks what it reads. If many rows may share one stored text, few rows are decoded at a time. No file is
mapped into memory: if another process truncated it, a signal would kill this process.
"""

import contextlib
import decimal
import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jpipe import InputError
from jpipe.errors import short
from jpipe_train.console.terminal import first_line
from jpipe_train.data.files import streams
from jpipe_train.data.files.wrong_lines import Place, WrongLine

Form = Literal["parquet", "arrow file", "arrow stream"]
NAMES: dict[Form, str] = {"parquet": "a Parquet file", "arrow file": "an Arrow file", "arrow stream": "an Arrow file"}
_BUFFER = 2**20  # bytes of a column that are read at once
_BATCH, _MOST_ROWS = 2**24, 1024  # the most bytes and rows of a Parquet file that are decoded at once
_SHARED = 4, 64  # limits of the rows decoded at once if many rows may share a value; decoding copies it for each row
_Row = tuple[Place, "dict[str, Any] | WrongLine", int, int]


class Column(NamedTuple):
    """A column that a reader of rows needs."""

    name: str  # the name of the column, or the key of a JSON line
    key: str | None = None  # the config key in `data` that sets the name, or None if the name is fixed
    # the kind of its values: text, token ids, numbers or lists of numbers, classes (integers) or lists of classes, a label, or any value
    kind: Literal["text", "ids", "numbers", "classes", "label", "any"] = "any"
    is_needed: bool = True  # whether a file without this column is an error
    labels: tuple[str, ...] = ()  # the names of the classes, if the column is a label


Check = Callable[[Sequence[str], Mapping[str, str]], None]
"""A function of the names of all columns, and a mapping from columns of a wrong type to their types; it raises if a column is wrong."""


def rows(opened: BufferedReader, file: Path, form: Form, columns: Sequence[Column], check: Check) -> Iterator[_Row]:
    """Yield, for each row, its place, its values or the error in them, and the number of bytes read and decoded so far.

    Raise OSError if the file is damaged, cut off, or of a kind that pyarrow cannot read, and InputError if pyarrow is not installed or
    `check` (see `Check`) raises it.
    """
    read = {"parquet": _parquet, "arrow file": _arrow_file, "arrow stream": _arrow_stream}[form]
    pa = streams.pyarrow(file, NAMES[form])
    number, before, decoded, needed = 0, 0, 0, {column.name: column for column in columns}
    with _errors_reported(pa, file, form):
        for batch, position in read(pa, opened, columns, check):
            values = {name: _values(pa, batch, needed[name]) for name in batch.schema.names if name in needed}
            size = batch.get_total_buffer_size() // max(batch.num_rows, 1)  # nbytes raises for string_view in pyarrow 18
            for i in range(batch.num_rows):
                number, decoded = number + 1, decoded + size
                part = (position - before) * (i + 1) // batch.num_rows
                yield Place(file, number, "row"), _record(values, i), before + part, decoded
            before = position


_Batches = Iterator[tuple[Any, int]]
"""Pairs of a record batch and the position in the file after it."""


def _parquet(pa: Any, opened: BufferedReader, columns: Sequence[Column], check: Check) -> _Batches:
    file = pa.parquet.ParquetFile(opened, buffer_size=_BUFFER, pre_buffer=False)
    _check(pa, file.schema_arrow, columns, check)
    present = {*file.schema_arrow.names}
    names = [column.name for column in columns if column.name in present]
    leaves = _leaves(file.schema, names)
    total, size, done = file.metadata.num_rows, os.fstat(opened.fileno()).st_size, 0
    for group in range(file.metadata.num_row_groups):
        if next(file.iter_batches(1, row_groups=[group], columns=names, use_threads=False), None) is None:
            continue
        facts = file.metadata.row_group(group)
        # For a damaged chunk `column` crashes the process. Reading one of its rows, as above, raises an error instead.
        chunks = [(facts.column(i), file.schema.column(i)) for i in leaves]
        unpacked = max(sum(chunk.total_uncompressed_size for chunk, _ in chunks), 1)
        least, most = _SHARED
        are_shared = any(chunk.has_dictionary_page and not _is_flat(column) for chunk, column in chunks)
        most = min(max(2 * _BATCH // unpacked, least), most) if are_shared else _MOST_ROWS
        at_once = min(max(_BATCH * facts.num_rows // unpacked, 1), most)
        for batch in file.iter_batches(at_once, row_groups=[group], columns=names, use_threads=False):
            done += batch.num_rows
            yield batch, size * done // max(total, 1)


def _leaves(schema: Any, names: Sequence[str]) -> list[int]:
    """Return the indices of the columns in a Parquet schema that pyarrow reads for these names, including nested columns."""
    wanted, nested = {*names}, tuple(f"{name}." for name in names if "." in name)
    paths = (schema.column(i).path for i in range(len(schema)))
    return [i for i, path in enumerate(paths) if path in wanted or path.partition(".")[0] in wanted or path.startswith(nested)]


def _is_flat(column: Any) -> bool:
    """Return whether the values of a Parquet column are single numbers of at most 8 bytes, so that copies of them are small."""
    return column.max_repetition_level == 0 and column.physical_type in ("BOOLEAN", "INT32", "INT64", "FLOAT", "DOUBLE")


def _arrow_file(pa: Any, opened: BufferedReader, columns: Sequence[Column], check: Check) -> _Batches:
    schema = pa.ipc.open_file(opened).schema
    file = pa.ipc.open_file(opened, options=_options(pa, schema, columns, check))
    size, count = os.fstat(opened.fileno()).st_size, file.num_record_batches
    for k in range(count):
        yield _valid(file.get_batch(k)), size * (k + 1) // count


def _arrow_stream(pa: Any, opened: BufferedReader, columns: Sequence[Column], check: Check) -> _Batches:
    schema = pa.ipc.open_stream(opened).schema
    opened.seek(0)
    for batch in pa.ipc.open_stream(opened, options=_options(pa, schema, columns, check)):
        yield _valid(batch), opened.tell()


def _options(pa: Any, schema: Any, columns: Sequence[Column], check: Check) -> Any:
    """Return options to read only the columns that are needed."""
    _check(pa, schema, columns, check)
    names = {column.name for column in columns}
    fields = [i for i, name in enumerate(schema.names) if name in names]
    return pa.ipc.IpcReadOptions(included_fields=sorted(fields), use_threads=False)


def _valid(batch: Any) -> Any:
    batch.validate(full=True)  # offsets in an untrusted file could point anywhere
    return batch


def _check(pa: Any, schema: Any, columns: Sequence[Column], check: Check) -> None:
    wrong, names = {}, schema.names
    counts = Counter(names)
    for column in columns:
        if counts[column.name] == 1:
            kind = schema.field(column.name).type
            if not {"text": _is_text, "ids": _is_ids, "numbers": _is_numbers, "classes": _is_classes}.get(column.kind, lambda *_: True)(
                pa, kind
            ):
                wrong[column.name] = str(kind)
    check(names, wrong)


def _is_text(pa: Any, kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_list(pa: Any, kind: Any) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_ids(pa: Any, kind: Any) -> bool:
    return _is_list(pa, kind) and pa.types.is_integer(kind.value_type)


def _is_numbers(pa: Any, kind: Any) -> bool:
    """Return whether values are numbers, (nested) lists of numbers, or tensors of one shape."""
    return _is_classes(pa, kind) or pa.types.is_floating(_of_lists(pa, kind))


def _is_classes(pa: Any, kind: Any) -> bool:
    """Return whether values are integers, (nested) lists of integers, or tensors of integers."""
    kind = _of_lists(pa, kind)
    return pa.types.is_integer(kind) or pa.types.is_boolean(kind)


def _of_lists(pa: Any, kind: Any) -> Any:
    """Return the type of the elements of lists, lists of lists or tensors."""
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    while _is_list(pa, kind):
        kind = kind.value_type
    return kind


def _values(pa: Any, batch: Any, column: Column) -> Callable[[int], Any]:
    """Return a function that returns the value of a column in a row of a batch."""
    array = batch.column(batch.schema.get_field_index(column.name))
    if column.kind in ("numbers", "classes") and (numbers := _array(pa, array)) is not None:
        return numbers.__getitem__
    if column.kind == "ids":
        return lambda i: None if array[i].values is None else array[i].values.to_numpy(zero_copy_only=False)
    if column.kind == "text":
        return lambda i: array[i].as_py()
    names = _class_names(batch.schema, column.name) if column.labels else []
    if names and sorted(names) == sorted(column.labels):
        return lambda i: _name(array[i].as_py(), names)
    return lambda i: _as_json(pa, array[i], column.name)


def _array(pa: Any, column: Any) -> np.ndarray | None:
    """Return the numbers of a column as an array of rows; None if a value is null, or lists differ in length."""
    if isinstance(column.type, pa.FixedShapeTensorType):
        return None if column.null_count else column.to_numpy_ndarray()
    numbers = column.storage if isinstance(column.type, pa.BaseExtensionType) else column
    shape: list[int] = []
    while _is_list(pa, numbers.type):
        lengths = {numbers.type.list_size} if pa.types.is_fixed_size_list(numbers.type) else {*numbers.value_lengths().to_pylist()}
        if numbers.null_count or len(lengths) != 1:
            return None
        shape += lengths
        numbers = numbers.flatten()
    return None if numbers.null_count else numbers.to_numpy(zero_copy_only=False).reshape(len(column), *shape)


def _record(values: Mapping[str, Callable[[int], Any]], i: int) -> dict[str, Any] | WrongLine:
    try:
        return {name: value(i) for name, value in values.items()}
    except UnicodeDecodeError as error:
        return WrongLine(f"expected text in UTF-8, found the byte {error.object[error.start]:#04x} at {error.start}")
    except WrongLine as wrong:
        return wrong


def _as_json(pa: Any, scalar: Any, where: str) -> Any:
    """Convert a value to JSON: a map to an object, a decimal to a number, dates and times to text; or raise WrongLine.

    Keys with null values are left out, because every row of a column has the keys of all rows.
    """
    kind, types, value = scalar.type, pa.types, None
    if not scalar.is_valid:
        return None
    if types.is_struct(kind):
        found = {name: _as_json(pa, value, f"{where}.{name}") for name, value in scalar.items()}
        return {name: value for name, value in found.items() if value is not None}
    if types.is_map(kind):
        pairs = [(_as_json(pa, pair[0], where), _as_json(pa, pair[1], where)) for pair in scalar.values]
        if len({name for name, _ in pairs if isinstance(name, str)}) < len(pairs):
            raise WrongLine(f"expected different texts as keys of a map in {short(where)}, found {short([name for name, _ in pairs])}")
        return dict(pairs)
    if _is_list(pa, kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        return [_as_json(pa, value, where) for value in scalar.values]
    if isinstance(kind, pa.BaseExtensionType):
        value = scalar.as_py()
        return value if isinstance(value, bool) else _as_json(pa, scalar.value, where)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind) or types.is_union(kind):
        return _as_json(pa, scalar.value, where)
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind):
        value = scalar.cast(pa.string()).as_py()
        is_known = not value.startswith("<")  # pyarrow writes years that are out of range in this way
    elif types.is_decimal(kind):
        exact = scalar.as_py()
        value = int(exact) if kind.scale <= 0 else float(exact)
        is_known = exact == decimal.Decimal(repr(value))
    elif is_known := _is_text(pa, kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        value = scalar.as_py()
        value = value.item() if isinstance(value, np.generic) else value
    if not is_known:
        raise WrongLine(
            f"expected values that JSON can express in {short(where)}, found {kind}{'' if value is None else f' ({short(value)})'}"
        )
    return value


def _name(value: Any, names: Sequence[str]) -> Any:
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


def _class_names(schema: Any, name: str) -> list[str]:
    """Return the names of a column's classes, or [] if there are none. Hugging Face's datasets stores them in the schema's metadata."""
    try:
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][name]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return []
    return names if isinstance(names, list) and all(isinstance(each, str) for each in names) else []


@contextlib.contextmanager
def _errors_reported(pa: Any, file: Path, form: Form) -> Iterator[None]:
    """Turn pyarrow's errors into OSErrors with the name of the file."""
    try:
        yield
    except InputError:
        raise
    except MemoryError:
        raise OSError(errno.ENOMEM, f"a part of this file, {NAMES[form]}, needs more memory than there is", str(file)) from None
    except (pa.ArrowException, OSError, ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        words = f"it begins like {NAMES[form]}, but is damaged, cut off or not supported ({first_line(error)[:200]})"
        raise OSError(errno.EINVAL, words, str(file)) from None
