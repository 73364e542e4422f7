"""Files are recognized by their content: other kinds of data are not read as bytes silently, and text is never refused."""

import bz2
import csv
import gzip
import io
import json
import lzma
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from jpipe import InputError
from jpipe_lm.data import prepare
from jpipe_lm.data.document_files import Files
from jpipe_lm.data.texts import Keys
from jpipe_train.config.config import Config
from jpipe_train.data import data
from jpipe_train.data.files import kinds
from tests.lm.data.conftest import quiet
from tests.lm.data.prepared import prepare_files

ROWS = [{"prompt": f"what is {i}, or {i + 1}?", "answer": f'the "number"\nis {i}', "n": i} for i in range(40)]


def written(write) -> bytes:
    """Return the bytes that a function writes to a file."""
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(rows, delimiter: str = ",", **options) -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0], delimiter=delimiter, **options)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def in_zip() -> bytes:
    def write(file):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a.txt", "text")

    return written(write)


def in_tar() -> bytes:
    def write(file):
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("a.txt"))

    return written(write)


def image(form: str) -> bytes:
    return written(lambda file: Image.new("RGB", (5, 5)).save(file, form))


ARRAY = {"weight": np.ones((3, 4), np.float32)}
NOT_TEXT = {
    "jsonl": (lines(ROWS), "JSON lines with prompt, answer, n; set data.format: prompts and data.tokenizer, or set data.format: bytes"),
    "text.jsonl": (
        lines([{"text": "a"}, {"text": "b"}]),
        "JSON lines with text; set data.format: text and data.tokenizer, or set data.format: bytes",
    ),
    "long.jsonl": (lines([{"text": "word " * 30_000}] * 2), "JSON lines; "),
    "marked.jsonl": (b"\xef\xbb\xbf" + lines(ROWS).replace(b"\n", b"\r\n\r\n"), "JSON lines with prompt, answer, n"),
    "json": (json.dumps(ROWS, indent=2).encode(), "a list of JSON; write one line for each object, for example with jq"),
    "data.json": (
        json.dumps({"version": "1", "data": ROWS}, indent=2).encode(),
        "a JSON object with its rows inside; write one line for",
    ),
    "long data.json": (
        json.dumps({"data": [{"text": "word " * 30_000}]}, indent=2).encode(),
        "a JSON object with its rows inside; write",
    ),
    "data.json in a line": (json.dumps({"data": ROWS}).encode(), "JSON lines with data; "),
    "of pandas": (json.dumps({"prompt": {"0": "a", "1": "b"}}, indent=1).encode(), "a JSON object with its rows inside; "),
    "text.json": (json.dumps({"text": "a", "n": 1}, indent=2).encode(), "a JSON object over several lines; write one line"),
    "text.json in a line": (b'{"text": "a"}\n', "JSON lines with text; "),
    "texts.json": (json.dumps(["word " * 99, "b"], indent=2).encode(), "a list of JSON; write one line for each object"),
    "rows.json": (json.dumps([["a", 1], ["b", 2]]).encode(), "a list of JSON; "),
    "numbers.json": (json.dumps([[0.5, 1], [2, 3]] * 9999).encode(), "a list of JSON; "),
    "indented objects": (b"".join(json.dumps(row, indent=1).encode() for row in ROWS), "JSON objects over several lines each; "),
    "lists": (b'["a", 1]\n' * 9, "lists of JSON; "),
    "damaged.jsonl": (lines(ROWS) + b"{", "JSON lines with prompt, answer, n; set data.format: prompts"),
    "csv": (table(ROWS), r"a table \(CSV\) with prompt, answer, n; set data\.format: prompts and data\.tokenizer"),
    "text.csv": (table([{"text": row["prompt"], "label": "yes"} for row in ROWS]), r"a table \(CSV\) with text, label"),
    "quoted.csv": (table(ROWS, quoting=csv.QUOTE_ALL), r"a table \(CSV\) with prompt, answer, n"),
    "spaced.csv": (b"name, year\nada, 1815\nalan, 1912\n", r"a table \(CSV\) with name, year"),
    "pandas.csv": (b",name,2019\n0,ada,3\n1,alan,4\n", r"a table \(CSV\) with , name, 2019"),
    "numbers.csv": (b"1,2.5,3\n4,5,6e3\n7,-8,9\n", r"a table \(CSV\); "),
    "semicolons": (table(ROWS, ";"), "a table with semicolons between columns"),
    "tsv": (table(ROWS, "\t"), r"a table with tabs between columns \(TSV\) with prompt"),
    "quoted.tsv": (table(ROWS, "\t", quoting=csv.QUOTE_ALL), r"a table with tabs between columns \(TSV\) with prompt, answer, n"),
    "parallel.tsv": (b"Good morning, all!\tGuten Morgen!\n" * 9, r"a table with tabs between columns \(TSV\); "),
    "parquet": (b"PAR1\x15\x04" + bytes(60) + b"PAR1", r"a Parquet file; its rows are read by data\.format: text \(data\.text_key\), "),
    "orc": (b"ORC\n\x12" + bytes(60) + b"ORC\x10", "an ORC file"),
    "arrow": (b"ARROW1\0\0" + bytes(60), "an Arrow file"),
    "arrow stream": (b"\xff\xff\xff\xff\x10\0\0\0" + bytes(60), "an Arrow file"),
    "feather": (b"FEA1\0\0\0\0" + bytes(60), "a Feather file of the first version; write it again with a newer pyarrow"),
    "avro": (b"Obj\x01\x04\x16avro.schema", "an Avro file"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(60), "an HDF5 file"),
    "sqlite": (b"SQLite format 3\0" + bytes(60), "an SQLite database"),
    "npy": (written(lambda file: np.save(file, np.ones(3))), "a NumPy file"),
    "npz": (
        written(lambda file: np.savez(file, np.ones(3))),
        r"a NumPy archive \(.npz\); its numbers are read by data.format: arrays",
    ),
    "zip": (in_zip(), "a zip archive"),
    "tar": (in_tar(), "a tar archive; unpack it with tar -xf, or set data.format: bytes"),
    "safetensors": (safetensors.numpy.save(ARRAY), "a safetensors file"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(60), "a GGUF file"),
    "pickle": (b"\x80\x04\x95\x0b" + bytes(7) + b"]\x94(K\x01\x8c\x01a\x94e.", "a pickle, which jpipe never loads"),
    "gz": (gzip.compress(b"text"), "compressed with gzip; unpack it, or set data.format: text and data.tokenizer, which unpacks it"),
    "zst": (b"\x28\xb5\x2f\xfd" + bytes(60), "compressed with zstd"),
    "xz": (lzma.compress(b"text"), "compressed with xz"),
    "bz2": (bz2.compress(b"text"), "compressed with bzip2"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "a PDF; convert it to text, such as with pdftotext"),
    **{
        form: (image(form), "an image; data.target: examples.papers.data.images:load learns")
        for form in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")
    },
    "wav": (b"RIFF\x24\0\0\0WAVEfmt ", "sound or video"),
    "mp4": (b"\0\0\0\x20ftypisom" + bytes(60), "sound or video"),
    "utf-16": ("some text\n".encode("utf-16") * 9, "in UTF-16 or UTF-32; convert it with iconv -t UTF-8"),
}


def configured(tiny, path: Path | str, **keys: str) -> Config:
    return Config.model_validate(tiny | {"data": {"path": str(path), "validation_fraction": 0.5, **keys}})


@pytest.mark.parametrize("kind", NOT_TEXT)
def test_data_of_another_kind_are_refused_with_advice(kind, tiny, tmp_path):
    content, message = NOT_TEXT[kind]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0.txt").write_text("some text\n")
    file = tmp_path / "data" / "1"  # its name says nothing
    file.write_bytes(content)
    for path in (file, file.parent):
        with pytest.raises(InputError, match=rf"^data\.path: expected text, found that '{file}' is {message}") as caught:
            data.load(configured(tiny, path))
        assert str(caught.value).endswith(", or set data.format: bytes to learn its bytes")
    with pytest.raises(InputError, match=r"^data\.validation_path: expected text, found that"):
        data.load(Config.model_validate(tiny | {"data": {"path": str(file.with_name("0.txt")), "validation_path": str(file)}}))
    file.write_bytes(content * 50)
    assert data.load(configured(tiny, file, format="bytes")).train[0][0][:1].shape == (1, 8)  # whoever asks for it gets it


PROSE = """Tyger Tyger, burning bright,
In the forests of the night;
What immortal hand or eye,
Could frame thy fearful symmetry?
"""
TEXTS = {
    "verse": PROSE,
    "a comma a line": "Roses are red, violets are blue,\nSugar is sweet, and so are you,\nHoney is brown, and grass is green,\n" * 3,
    "a comma in each line": "Roses are red, violets blue\nSugar is sweet, and so are you\nThe day is long, the night is too\n" * 3,
    "Markdown": '# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```json\n{"a": 1}\n```\n',
    "Markdown's table alone": "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n",
    "log": "".join(f"2024-01-0{i} 12:00:00,123 INFO started\n" for i in range(1, 9)),
    "C": "int a;\nint b;\nint c;\n",
    "list": "apples,\npears,\nplums,\n",
    "Python": "a, b = 1, 2\nc, d = 3, 4\ne, f = 5, 6\n",
    "a dict in Python": '{"a": 1,\n "b": 2}\n',
    "braces": "{a}\n{b}\n{c}\n",
    "settings": '{\n "name": "a",\n "files": ["b", "c"],\n "scripts": {"d": "e"}\n}\n',
    "links": "[[Category: a]]\n[[1]](#cite), [2]\n",
    "a list in Python": "[1, 2]\n",
    "quoted": '["Yes," he said, "or no"]\n',
    "numbered": "".join(f"some words, {i}\n" for i in range(90)),
    "one object": '{"private": true}\n',
    "indented": "def f():\n\treturn 1\n\ndef g():\n\treturn 2\n",
    "Makefile": "all:\n\tcc a.c\n\nclean:\n\trm a\n",
    "begins like others": "PAR1S is a city\nORC is a creature\nBM\nGIF89a\nGGUF\n",
    "letters": "MZ and ID3 and II* are words\n",
    "empty": "",
    "a word": "word",
    "a line without end": "word " * 20_000,
    "no English": "Привет, мир!\nКак дела, друг?\nВсё хорошо, спасибо!\n" * 9,
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_not_refused(name, tmp_path):
    (tmp_path / "a.csv").write_text(TEXTS[name])  # whatever its name says
    assert kinds.kind_of(tmp_path / "a.csv") is None


def test_source_and_documents_are_text(tmp_path):
    root = Path(__file__).parents[3]
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::4]
    files = [
        *library,
        *root.glob("docs/**/*.md"),
        *root.glob("jpipe/**/*.py"),
        *root.glob("configs/*.yaml"),
        root / "LICENSE",
        root / "Makefile",
    ]
    assert len(files) > 150
    assert {file: kind for file in files if (kind := kinds.kind_of(file))} == {}


def test_bytes_without_a_known_form_may_be_learned(tiny, tmp_path):
    (tmp_path / "genome").write_bytes(np.random.default_rng(0).integers(0, 256, 4000, np.uint8).tobytes())
    assert data.load(configured(tiny, tmp_path / "genome")).train[0][0].shape == (4, 8)


def test_a_folder_of_tokens_is_recognized(tiny, documents, tokenizer, tmp_path):
    prepare_files(Files([str(documents)]), tokenizer, str(tmp_path / "tokens"), quiet(), 0.3)
    with pytest.raises(InputError, match=r"data\.path: '.*/tokens' is a folder of tokens from .*; set data\.format: tokens, or set data"):
        data.load(configured(tiny, tmp_path / "tokens"))


def test_only_text_and_rows_are_prepared_unless_requested(tokenizer, tmp_path):
    (tmp_path / "a.json").write_bytes(json.dumps(ROWS).encode())
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    as_it_is = ", or --format text --text-key none to read it as text$"
    for files, message in (
        (
            Files([str(tmp_path / "a.json")]),
            f"expected text, found that '{tmp_path}/a.json' is a list of JSON; write one line .*{as_it_is}",
        ),
        (
            Files([str(tmp_path / "a.jsonl")]),
            "expected text, found that .* is JSON lines with prompt, answer, n; add --format prompts, or --format text --text-key none to",
        ),
        (
            Files([str(tmp_path / "a.jsonl")], keys=Keys("n")),
            r"40 lines are wrong: .*expected text in 'n', found int; .* or set --text-key$",
        ),
        (
            Files([str(tmp_path / "a.jsonl")], keys=Keys(None)),
            "expected text, found that .* is JSON lines with prompt, answer, n; .* or --format text --text-key none to read it as text$",
        ),
    ):
        for make in (
            lambda files: prepare_files(files, tokenizer, str(tmp_path / "out"), quiet(), 0.0),
            lambda files: prepare.make_tokenizer(files, 300, str(tmp_path / "t.json"), quiet()),
        ):
            with pytest.raises(InputError, match=rf"^SOURCE: {message}"):
                make(files)
    as_text = Files([str(tmp_path / "a.jsonl")], "text", Keys(None))
    assert prepare_files(as_text, tokenizer, str(tmp_path / "out"), quiet(), 0.0).kind == "text"


JSON = {
    "list": (json.dumps(ROWS, indent=2), "a list of JSON"),
    "data": (json.dumps({"data": ROWS}, indent=2), "a JSON object with its rows inside"),
    "document": (json.dumps({"text": "a"}, indent=2), "a JSON object over several lines"),
}


@pytest.mark.parametrize("form", JSON)
def test_json_in_another_form_than_lines_is_no_text_unless_requested(form, tiny, tokenizer, tmp_path):
    content, name = JSON[form]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.txt").write_text("some text\n" * 50)
        (tmp_path / folder / "1").write_text(content)
    (tmp_path / "b" / "1").rename(tmp_path / "b" / "1.txt")
    keys = {"format": "text", "tokenizer": tokenizer}
    model = {"model": tiny["model"] | {"vocab_size": 300}}
    for path in (tmp_path / "a", tmp_path / "a" / "1", tmp_path / "b"):
        with pytest.raises(
            InputError, match=rf"^data\.path: expected text, or rows with a text, found .* is {name}; .* jq .* data\.text_key to null"
        ):
            data.load(configured(tiny | model, path, **keys))
    assert data.load(configured(tiny | model, tmp_path / "a", text_key=None, **keys)).rows
    with pytest.raises(InputError, match=r"^SOURCE: expected text, or rows with a text, .* or set --text-key to none to read it as text$"):
        prepare_files(Files([str(tmp_path / "a")], "text"), tokenizer, str(tmp_path / "out"), quiet(), 0.0)


def test_files_with_the_name_of_rows_are_not_learned_as_bytes(tiny, tmp_path):
    """Not even those in which few lines, a broken one or a single column leave their kind open."""
    for name, content in (
        ("a.csv", "text\n" + "some words\n" * 9),
        ("a.tsv", "a\tb\n"),
        ("a.JSONL", '{"n": 1}\n'),
        ("b.csv", "a,b\n1\n1,2\n"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(
            InputError, match=rf"^data\.path: expected text, found that '.*{name}' is .*, or set data.format: bytes to learn"
        ):
            data.load(configured(tiny, tmp_path / name))
    (tmp_path / "c.csv").touch()
    for name in "de":
        (tmp_path / f"{name}.txt").write_text("some words\n" * 9)
    assert data.load(configured(tiny, tmp_path / "[cde].*")).rows


@pytest.mark.parametrize("form", ["bytes", "text", "prompts", "chat", "tokens", "labels", "preferences", "arrays"])
def test_a_path_that_no_file_has_is_an_error_in_each_format(form, tiny, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("template").write_text("{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}")
    keys = {"format": form, "validation_fraction": 0.05}
    keys |= {} if form in ("bytes", "tokens", "arrays") else {"tokenizer": tokenizer}
    keys |= {"chat_template": "template"} if form == "chat" else {}
    model = tiny["model"] | {"vocab_size": 300} | ({"head": "regression"} if form == "labels" else {})
    model = {"model": {"target": "a:b"} if form == "arrays" else model} | ({"loss": {"name": "dpo"}} if form == "preferences" else {})
    for path in ("a" * 300, "a/" * 2500, "loop", "loop/a"):
        for read in (data.load, lambda config: data.held_out(config, config.data.path)):
            with pytest.raises(InputError, match=r"^data\.path: .*(File name too long|does not exist|cannot read).*"):
                read(configured(tiny | model, path, **keys))
