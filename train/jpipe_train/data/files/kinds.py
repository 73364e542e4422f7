"""Recognize the kind of data in a file by its content: whether it is text, and which reader its rows need."""

import codecs
import csv
import errno
import json
import os
import re
from collections.abc import Callable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jpipe.files import open_to_read
from jpipe_train.data.files import streams

JSON_LINES, NPY, NPZ = "JSON lines", "a NumPy file", "a NumPy archive (.npz)"
_HEAD = 2**16  # the number of bytes at the beginning of a file that are examined
_SAMPLE = 50  # the number of lines among them that are examined
_FEW_ROWS = 3  # the least number of lines in a table, including the header
_MORE_ROWS = 5  # the least number of lines in a table without a header

_FORMATS = "data.format: text (data.text_key), prompts (data.prompt_key, data.answer_key), chat, labels and arrays"
_ROWS = f"its rows are read by {_FORMATS}"
_LINES = "convert it to Parquet or JSON lines, such as with pandas"
_THEN = f"; its rows are read by {_FORMATS}"
_PACKED = "unpack it, or set data.format: text and data.tokenizer, which unpacks it"
_CUSTOM = "read it in a function of your own (data.target: module:function)"
_NUMPY = "its numbers are read by data.format: arrays (data.inputs_key, data.targets_key)"
_PICKLE = "write text, JSON lines or token files"
_IMAGE = "data.target: examples.papers.data.images:load learns from folders of images"
_MEDIA = "write text about it, or read it in a function of your own (data.target: module:function)"


class Kind(NamedTuple):
    """A kind of data."""

    name: str  # a phrase that completes the sentence "it is …", such as "a Parquet file"
    hint: str  # what the user can do with such a file
    columns: tuple[str, ...] = ()  # the keys of JSON lines, or the names of the columns of a table
    # the reader of its rows, or None if its rows cannot be read
    reader: Literal["parquet", "arrow file", "arrow stream", "json lines", "table"] | None = None
    delimiter: str = ","  # the character between the cells of a table
    is_json: bool = False  # whether it is JSON without a line for each row

    @property
    def is_unpacked(self) -> bool:
        """Whether it is a compressed file that is decompressed while it is read."""
        return self.hint == _PACKED


def kind_of(path: Path, key: str | None = None) -> Kind | None:
    """Return the kind of data in a file, or None if it may be plain text; a JSON object with the user's `key` is not plain text.

    Raise OSError if the file cannot be read, or is not a regular file.
    """
    with open_to_read(path) as file:
        return _kind_of_whole(file, key)


def content_of(path: Path, key: str | None = None) -> Kind | None:
    """Return the kind of data in a file, decompressed if it is compressed, or None if it is plain text.

    The content decides. If text could be of several kinds, the name of the file decides, as in `kind_by_name`. Raise OSError if the file
    cannot be read, is not regular, or is compressed and of a kind that can only be read uncompressed, and InputError if it is compressed
    with zstd, and pyarrow is not installed.
    """
    with open_to_read(path) as file:
        packed = streams.compression(file.peek(4))
        if packed is None:
            kind = _kind_of_whole(file, key)
        else:
            stream = streams.unpacked(file, path)
            head = stream.read(_HEAD)
            kind = _kind_of(head, len(head) + len(stream.peek(1)), head[-4:], key)
    if packed is not None and kind is not None and kind.reader not in ("json lines", "table"):
        raise OSError(errno.EINVAL, f"it is {kind.name} inside {packed}, which cannot be read; unpack it first", str(path))
    if kind is not None and (kind.columns or kind.reader != "table"):
        return kind
    return kind_by_name(path, None if kind is None else kind.delimiter)


def kind_by_name(path: Path, delimiter: str | None = None) -> Kind | None:
    """Return the kind of rows that the name of a file suggests, or None. It helps if a file has too few lines to recognize its kind."""
    ending = Path(path.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix
    if ending in _DELIMITER_BY_NAME:
        delimiter = delimiter or _DELIMITER_BY_NAME[ending]
        return Kind(_DELIMITERS[delimiter], _ROWS, (), "table", delimiter)
    return Kind(JSON_LINES, _ROWS, (), "json lines") if ending in (".jsonl", ".ndjson") else None


def rows_in(path: Path, key: str | None = None) -> Kind | None:
    """Return the result of `content_of` if the rows of the file can be read, otherwise None."""
    kind = content_of(path, key)
    return None if kind is None or kind.reader is None else kind


def _kind_of_whole(file: BufferedReader, key: str | None) -> Kind | None:
    """Return the kind of an open file, without decompressing it."""
    size, head = os.fstat(file.fileno()).st_size, file.read(_HEAD)
    file.seek(max(size - 4, 0))
    return _kind_of(head, size, file.read(4), key)


def _kind_of(head: bytes, size: int, tail: bytes, key: str | None) -> Kind | None:
    """Return the kind of content with this beginning, size and last four bytes; `key` as in `kind_of`."""
    for name, hint, is_it in _SIGNATURES:
        if is_it(head, size, tail):
            return Kind(name, hint, reader=_READERS.get(head[:4]) if hint == _ROWS else None)
    text = head.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="replace")
    is_whole = len(head) == size
    lines = [line.removesuffix("\r") for line in text.split("\n")[: None if is_whole else -1] if line.strip()][:_SAMPLE]
    return _json_lines(lines, text, key, is_whole=is_whole) or _json(text, key) or _table(lines)


_Test = Callable[[bytes, int, bytes], bool]
"""A function of the beginning, the size and the last four bytes of a file that returns whether it is of a kind."""


def _starts(*beginnings: bytes, at: int = 0) -> _Test:
    return lambda head, *_: head.startswith(beginnings, at)


def _is_parquet(head: bytes, _size: int, tail: bytes) -> bool:
    return head.startswith((b"PAR1", b"PARE")) and (tail == head[:4] or not _is_text(head))


def _is_orc(head: bytes, *_: Any) -> bool:
    return head.startswith(b"ORC") and not _is_text(head)


def _is_safetensors(head: bytes, size: int, _: bytes) -> bool:
    length = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and 2 <= length <= min(size - 8, 10**8)


def _is_bmp(head: bytes, size: int, _: bytes) -> bool:
    return head.startswith(b"BM") and int.from_bytes(head[2:6], "little") == size


def _is_npz(head: bytes, *_: Any) -> bool:
    """Return whether the content is a zip archive that begins with a NumPy file."""
    return head.startswith(b"PK\x03\x04") and head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(b".npy")


def _is_text(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut off
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


_READERS: dict[bytes, Literal["parquet", "arrow file", "arrow stream"]] = {
    b"PAR1": "parquet",
    b"PARE": "parquet",
    b"ARRO": "arrow file",
    b"\xff" * 4: "arrow stream",
}
_SIGNATURES: tuple[tuple[str, str, _Test], ...] = (
    ("a Parquet file", _ROWS, _is_parquet),
    ("an ORC file", f"{_LINES} (read_orc and to_parquet){_THEN}", _is_orc),
    ("an Arrow file", _ROWS, _starts(b"ARROW1\0\0", b"\xff" * 4)),
    ("a Feather file of the first version", f"write it again with a newer pyarrow{_THEN}", _starts(b"FEA1\0\0\0\0")),
    ("an Avro file", f"{_LINES}{_THEN}", _starts(b"Obj\x01")),
    ("an HDF5 file", _CUSTOM, _starts(b"\x89HDF\r\n\x1a\n")),
    ("an SQLite database", f"{_LINES}{_THEN}", _starts(b"SQLite format 3\0")),
    (NPY, _NUMPY, _starts(b"\x93NUMPY")),
    (NPZ, _NUMPY, _is_npz),
    ("a safetensors file", "to start with its weights, name it in warm_start.file", _is_safetensors),
    ("a GGUF file", "it has weights, not data", _starts(b"GGUF\1\0\0\0", b"GGUF\2\0\0\0", b"GGUF\3\0\0\0")),
    ("a pickle, which jpipe never loads", _PICKLE, _starts(b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")),
    (
        "a zip archive (PyTorch files are zip archives with a pickle, which jpipe never loads)",
        "unpack it",
        _starts(b"PK\x03\x04", b"PK\x05\x06"),
    ),
    ("compressed with gzip", _PACKED, _starts(b"\x1f\x8b")),
    ("compressed with zstd", _PACKED, _starts(b"\x28\xb5\x2f\xfd")),
    ("compressed with xz", "unpack it with unxz, or tar -xf", _starts(b"\xfd7zXZ\0")),
    ("compressed with bzip2", "unpack it with bunzip2, or tar -xf", lambda head, *_: re.match(rb"BZh[1-9]1AY&SY", head) is not None),
    ("compressed with LZ4", "unpack it with unlz4", _starts(b"\x04\x22\x4d\x18")),
    ("compressed with Snappy", "unpack it", _starts(b"\xff\x06\0\0sNaPpY")),
    ("a 7z archive", "unpack it", _starts(b"7z\xbc\xaf\x27\x1c")),
    ("a RAR archive", "unpack it", _starts(b"Rar!\x1a\x07")),
    ("a tar archive", "unpack it with tar -xf", _starts(b"ustar\0", b"ustar  \0", at=257)),
    ("a PDF", "convert it to text, such as with pdftotext", _starts(b"%PDF-")),
    ("an old Office document", "save it as text", _starts(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")),
    ("an image", _IMAGE, _starts(b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"II*\0", b"MM\0*")),
    ("an image", _IMAGE, _is_bmp),
    ("an image", _IMAGE, lambda head, *_: head.startswith((b"GIF87a", b"GIF89a")) and b"\0" in head),
    ("an image", _IMAGE, lambda head, *_: head[:4] == b"RIFF" and head[8:12] == b"WEBP"),
    ("sound or video", _MEDIA, lambda head, *_: head[:4] == b"RIFF" and head[8:12] in (b"WAVE", b"AVI ")),
    ("sound or video", _MEDIA, _starts(b"OggS\0", b"fLaC\0", b"ID3\x02", b"ID3\x03", b"ID3\x04", b"\x1aE\xdf\xa3")),
    ("sound or video", _MEDIA, lambda head, *_: head[:3] == b"\0\0\0" and head[4:8] == b"ftyp"),
    ("a program", "give text", _starts(b"\x7fELF", b"\xca\xfe\xba\xbe", b"\xcf\xfa\xed\xfe", b"MZ\x90\0")),
    ("in UTF-16 or UTF-32", "convert it with iconv -t UTF-8", _starts(b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")),
)


_STRING = r'"(?:[^"\\]|\\.)*"'
_OBJECT = re.compile(rf"\s*\{{\s*{_STRING}\s*:")
_LIST = re.compile(rf"\s*\[\s*(?:\{{\s*{_STRING}\s*:|{_STRING}\s*,\s*[\"\[{{\d-]|\[\s*(?:{_STRING}|-?\d[^\s,\]]{{0,50}})\s*\]?\s*,)")
"""The beginning of a list of objects, of texts, or of lists."""
_INSIDE = re.compile(r':\s*(?:\[\s*(?:\{\s*"|\[)|\{\s*"0"\s*:)')
"""A list of objects or of lists inside an object, or a column in the form that pandas writes."""


def _json_lines(lines: Sequence[str], text: str, key: str | None, *, is_whole: bool) -> Kind | None:
    """Recognize JSON lines: every line is an object, and there are at least two lines.

    A single object counts if it is longer than the sample, has the key `key`, or contains a list of objects or of lists, or a column in the
    form that pandas writes.
    """
    if not lines and not is_whole and _OBJECT.match(text):
        return Kind(JSON_LINES, _ROWS, reader="json lines")
    keys: dict[str, None] = {}
    for line in lines:
        if not _OBJECT.match(line):  # cheaper than parsing, and few texts pass it
            return None
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return None
        keys |= dict.fromkeys(value)
    is_data = len(lines) > 1 or key in keys or (keys and _INSIDE.search(text))
    return Kind(JSON_LINES, _ROWS, tuple(keys), "json lines") if is_data else None


def _json(text: str, key: str | None) -> Kind | None:
    """Recognize other forms of JSON: a list, several objects, or one object over several lines that contains rows or has the key `key`."""
    text = text.strip()
    is_list = _LIST.match(text) is not None
    if not is_list and not _OBJECT.match(text):
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # the JSON is longer than the sample, or damaged
        value, end = None, len(text)
    what, way = "a list of JSON", "jq -c '.[]'"
    if text[end:].lstrip()[:1] == text[0]:
        if not is_list and "\n" not in text[:end]:  # a later line is damaged
            return Kind(JSON_LINES, _ROWS, tuple(value), "json lines")
        what, way = ("lists of JSON", way) if is_list else ("JSON objects over several lines each", "jq -c .")
    elif isinstance(value, dict) and isinstance(value.get(key), str):
        what, way = "a JSON object over several lines", "jq -c ."
    elif not is_list:
        what, way = "a JSON object with its rows inside", "jq -c '.data[]'"
        if not _INSIDE.search(text):
            return None
    return Kind(what, f"write one line for each object, for example with {way}{_THEN}", is_json=True)


_DELIMITERS = {"\t": "a table with tabs between columns (TSV)", ",": "a table (CSV)", ";": "a table with semicolons between columns (CSV)"}
_NAME = re.compile(r"#?[^\W\d].{0,49}")
_ENDS_OF_SENTENCES = (".", "!", "?", ":", "…")
_DELIMITER_BY_NAME = {".csv": ",", ".tsv": "\t"}


def _table(lines: Sequence[str]) -> Kind | None:
    """Recognize a table in text: all rows have equally many columns, and the first row is a plausible header or all cells are numbers.

    Prose with commas is not a table: it has spaces after commas, and its lines have different numbers of commas.
    """
    for delimiter, name in _DELIMITERS.items():
        if not lines or delimiter not in lines[0]:
            continue
        rows = _cells(lines, delimiter)
        if len(rows) < _FEW_ROWS or len(rows[0]) < 2 or any(len(row) != len(rows[0]) for row in rows):
            continue
        if all(is_number(cell) for row in rows for cell in row):
            return Kind(name, _ROWS, (), "table", delimiter)
        if _is_header(rows[0], rows[1:]):
            return Kind(name, _ROWS, tuple(cell.strip() for cell in rows[0]), "table", delimiter)
        if delimiter == "\t" and len(rows) >= _MORE_ROWS and all(row[0].strip() for row in rows):
            return Kind(name, _ROWS, (), "table", delimiter)
    return None


def _cells(lines: Sequence[str], delimiter: str) -> list[list[str]]:
    """Split rows into cells, and leave out the last row if it may continue after the sample."""
    try:
        rows = list(csv.reader([f"{line}\n" for line in lines], delimiter=delimiter, strict=True))
    except csv.Error:  # a quoted cell continues in the next line, or the quotes do not belong to cells
        try:
            rows = list(csv.reader([f"{line}\n" for line in lines], delimiter=delimiter))[:-1]
        except csv.Error:
            return []
    return rows


def _is_header(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the cells of the first row are names of columns.

    A year may be a name. An empty cell may be one, too, because pandas writes it above row numbers.
    """
    names = [cell.strip() for cell in header]
    usual = [bool(_NAME.fullmatch(name)) and not name.endswith(_ENDS_OF_SENTENCES) and len(name.split()) <= 5 for name in names]
    unusual = [name for name, is_usual in zip(names, usual, strict=True) if not is_usual]
    spaced = any(cell[:1].isspace() for cell in header[1:])
    if len(set(names)) < len(names) or not any(usual) or (spaced and unusual):
        return False
    if not all(is_number(name) or (name == "" == names[0]) for name in unusual):
        return False
    return not (unusual or spaced) or any(all(map(is_number, column)) for column in zip(*rows, strict=True))


def is_number(cell: str) -> bool:
    """Return whether a cell is written as a number, in ASCII and without underscores, which Python allows in numbers."""
    try:
        float(cell)
    except ValueError:
        return False
    return cell.isascii() and "_" not in cell
