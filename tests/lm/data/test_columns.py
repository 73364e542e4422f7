"""Data in columns: each kind of file gives the same batches as JSON lines with the same rows, and mistakes are named."""

import contextlib
import csv
import datetime
import decimal
import gzip
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from jpipe import InputError
from jpipe_lm.data import splits
from jpipe_lm.data.chat import read_chat
from jpipe_lm.data.chat.conversations import conversation
from jpipe_lm.data.document_files import Files
from jpipe_train import cli
from jpipe_train.data import data, sources
from jpipe_train.data.files import wrong_lines
from jpipe_train.data.files.arrow import Column
from jpipe_train.data.files.records import records
from jpipe_train.data.files.wrong_lines import WrongLines
from tests.lm.data.conftest import SENTENCES, quiet, same
from tests.lm.data.prepared import prepare_files
from tests.train.conftest import changed

ROOT = Path(__file__).parents[3]
ROWS = [
    {"text": f'{SENTENCES[i % 3]} {i}, "so"', "prompt": f"what is {i}?", "answer": f"{i}\nis {i}", "label": ["no", "yes"][i % 2]}
    for i in range(80)
]
CONVERSATIONS = [
    {"messages": [{"role": "user", "content": f"fox {i}?"}, {"role": "assistant", "content": f"dog {i}"}], "tools": None} for i in range(40)
]
IDS = [{"input_ids": [i % 7, 3, 200 + i % 5] * (1 + i % 3)} for i in range(80)]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {% generation %}{{ m['content'] }}{% endgeneration %}\n{% endfor %}"
LABELS = {"head": "classification", "labels": ["no", "yes"]}


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(rows: list[dict], delimiter: str = ",") -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0], delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


def parquet(rows: list[dict]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=30)
    return sink.getvalue().to_pybytes()


def arrow(rows: list[dict], opened=pa.ipc.new_stream, **options) -> bytes:
    sink, whole = pa.BufferOutputStream(), pa.Table.from_pylist(rows)
    with opened(sink, whole.schema, **options) as writer:
        writer.write_table(whole, max_chunksize=30)
    return sink.getvalue().to_pybytes()


def feather(rows: list[dict]) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.feather.write_feather(pa.Table.from_pylist(rows), sink, compression="lz4")
    return sink.getvalue().to_pybytes()


KINDS = {  # by the name of the file; content decides where that tells
    "jsonl": lines,
    "a.jsonl.gz": lambda rows: gzip.compress(lines(rows)),
    "a.json.zst": lambda rows: zstd(lines(rows)),
    "a.csv": table,
    "a.tsv": lambda rows: table(rows, "\t"),
    "gz": lambda rows: gzip.compress(table(rows)),
    "parquet": parquet,
    "a.arrow": lambda rows: arrow(rows, pa.ipc.new_file),
    "stream": arrow,
    "a.feather": feather,
}


def saved(folder: Path, rows: list[dict], metadata: dict | None = None) -> Path:
    """Write a folder as `save_to_disk` of datasets does."""
    folder.mkdir(parents=True)
    parts = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, parts, strict=True):
        whole = pa.Table.from_pylist(part).replace_schema_metadata(metadata)
        with pa.ipc.new_stream(str(folder / name), whole.schema) as writer:
            writer.write_table(whole, max_chunksize=1000)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_format_type": None, "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def saved_dict(folder: Path, **splits: list[dict]) -> Path:
    """Write a folder as `DatasetDict.save_to_disk` does."""
    for name, rows in splits.items():
        saved(folder / name, rows)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def config(tiny, path: Path, tokenizer: str | None, form: str = "text", model: dict | None = None, **keys):
    fields = {"format": form, "path": str(path), "validation_fraction": 0.3, **keys}
    fields |= {} if tokenizer is None else {"tokenizer": tokenizer}
    return changed(tiny | {"data": fields, "model": tiny["model"] | {"vocab_size": 300, "seq_len": 64} | (model or {})})


def equal(one: data.Data, other: data.Data) -> bool:
    assert len(one.validation) == len(other.validation) >= 1
    return all(same(one.train[i], other.train[i]) for i in range(2)) and same(one.validation[0], other.validation[0])


@pytest.fixture
def written(tmp_path):
    def write(name: str, content: bytes) -> Path:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write


@pytest.mark.parametrize("form", ["text", "prompts", "labels"])
def test_each_kind_of_file_gives_the_batches_of_json_lines(form, tiny, tokenizer, written, tmp_path):
    model = LABELS if form == "labels" else {}
    expected = data.load(config(tiny, written("rows.jsonl", lines(ROWS)), tokenizer, form, model))
    for name, content in KINDS.items():
        path = written(f"{name}.d/{name}", content(ROWS))
        assert equal(expected, data.load(config(tiny, path if len(name) % 2 else path.parent, tokenizer, form, model))), name
    assert equal(expected, data.load(config(tiny, saved(tmp_path / "saved", ROWS), tokenizer, form, model)))


def test_conversations_in_columns_are_those_of_json_lines(tiny, tokenizer, written, tmp_path, capsys):
    template = written("template.jinja", TEMPLATE.encode())

    def of(path: Path):
        return config(tiny, path, tokenizer, "chat", chat_template=str(template))

    odd = [
        row | {"tools": [{"name": "f"}], "messages": [{**row["messages"][0], "name": "x"}, *row["messages"][1:]]} for row in CONVERSATIONS
    ]
    for rows in (CONVERSATIONS, [*odd[:20], *CONVERSATIONS[20:]]):  # columns have every key in every row
        expected = data.load(of(written("a.jsonl", lines(rows))))
        for name, content in (("a.parquet", parquet), ("a.arrow", arrow)):
            assert equal(expected, data.load(of(written(name, content(rows))))), name
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(of(tmp_path / "a.parquet").model_dump(exclude_unset=True)))
    assert cli.main(["data", "show", str(file), "--count", "1"]) == 0
    assert capsys.readouterr().out.startswith(f"'{tmp_path / 'a.parquet'}', row 1: ")


TIME = datetime.datetime(2024, 2, 29, 12, 30, 15, 7)
VALUES = {  # by Arrow's type: what a file has, and what a line of JSON has for it; None: JSON has no such value
    pa.timestamp("us"): (TIME, "2024-02-29 12:30:15.000007"),
    pa.timestamp("ns"): (1, "1970-01-01 00:00:00.000000001"),
    pa.timestamp("ms", "UTC"): (TIME.replace(microsecond=0), "2024-02-29 12:30:15.000Z"),
    pa.timestamp("s"): (10**15, None),
    pa.date32(): (TIME.date(), "2024-02-29"),
    pa.date64(): (TIME.date(), "2024-02-29"),
    pa.time64("us"): (TIME.time(), "12:30:15.000007"),
    pa.decimal128(5, 2): (decimal.Decimal("1.20"), 1.2),
    pa.decimal256(40, 0): (decimal.Decimal(10**30), 10**30),
    pa.decimal128(30, 20): (decimal.Decimal("1.00000000000000000001"), None),
    pa.map_(pa.string(), pa.list_(pa.int8())): ([("a", [1]), ("b", [])], {"a": [1], "b": []}),
    pa.map_(pa.string(), pa.float16()): ([], {}),
    pa.map_(pa.int8(), pa.int8()): ([(1, 2)], None),
    pa.float16(): (np.float16(0.5), 0.5),
    pa.bool_(): (True, True),
    pa.large_list(pa.dictionary(pa.int8(), pa.string())): (["a", None], ["a", None]),
    pa.struct([("a", pa.int8()), ("b", pa.null())]): ({"a": 1}, {"a": 1}),
    pa.duration("s"): (datetime.timedelta(1), None),
    pa.duration("ns"): (1, None),
    pa.month_day_nano_interval(): ((1, 2, 3), None),
    pa.binary(): (b"a", None),
    pa.large_binary(): (b"a", None),
    pa.binary(1): (b"a", None),
}
PLACES = {  # whatever a row of a conversation may have beside the keys that are read
    "message": lambda x: {"messages": [{"role": "user", "content": "a", "x": x}]},
    "part": lambda x: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": x}]}]},
    "arguments": lambda x: {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": x}}}]}]},
    "tool": lambda x: {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "x": x}]},
}


def nested(example, kind: pa.DataType) -> pa.DataType:
    """Return the type of a value in which `...` has another type."""
    if example is ...:
        return kind
    if isinstance(example, dict):
        return pa.struct([(name, nested(value, kind)) for name, value in example.items()])
    return pa.list_(nested(example[0], kind)) if isinstance(example, list) else pa.string()


@pytest.mark.parametrize("place", PLACES)
def test_values_of_every_type_are_those_of_json_or_an_error_that_names_them(place, tmp_path):
    """Dates and times are text, maps are objects, and decimals are numbers, wherever they are."""
    row, file = PLACES[place], tmp_path / "a.parquet"
    for kind, (value, expected) in VALUES.items():
        whole = pa.struct([(name, nested(example, kind)) for name, example in row(...).items()])
        table = pa.Table.from_struct_array(pa.array([row(value), row(None)], whole))
        wrong = WrongLines("data.path")
        try:
            pq.write_table(table, file)
        except pa.ArrowNotImplementedError:  # Parquet has no such type
            with pa.ipc.new_file(str(file), table.schema) as writer:
                writer.write_table(table)
        found = [row.value for row in records([file], wrong, read_chat.COLUMNS, conversation, lambda value: value.key, 0.0)]
        if expected is not None:
            wrong.check()
            assert json.loads(found[0].key) == json.loads(conversation(row(expected)).key), kind
            assert b'"x"' not in found[1].key, kind
            continue
        with pytest.raises(InputError, match=r"^data\.path: '.*a\.parquet', row 1: expected .* in '.*x', found "):
            wrong.check()


def test_rows_of_token_ids_are_documents_as_they_are(tiny, tokenizer, written, tmp_path):
    expected = data.load(config(tiny, written("ids.jsonl", lines(IDS)), None, "tokens"))
    for path in (written("a", parquet(IDS)), written("b.arrow", arrow(IDS)), saved(tmp_path / "saved", IDS)):
        loaded = data.load(config(tiny, path, None, "tokens"))
        assert equal(expected, loaded)
        assert loaded.digest() == expected.digest()
    files = Files([str(tmp_path / "a")], "tokens")
    prepare_files(files, tokenizer, str(tmp_path / "tokens"), quiet(), 0.3)
    folder = changed(
        tiny
        | {
            "data": {"format": "tokens", "path": str(tmp_path / "tokens")},
            "model": config(tiny, path, None, "tokens").model.model_dump(exclude_unset=True),
        }
    )
    assert equal(expected, data.load(folder))
    whole = splits.read(config(tiny, path, None, "tokens"))
    tokens = [part.read(0, part.size) for part in (whole.train, whole.validation)]
    assert sorted(np.concatenate(tokens).tolist()) == sorted(number for row in IDS for number in row["input_ids"])
    empty = written("a.jsonl", lines([*IDS, {"input_ids": []}]))
    assert data.load(config(tiny, empty, None, "tokens")).remarks[0] == f"1 empty document left out, the first is '{empty}', line 81"


def test_a_splits_folder_trains_on_train_and_validates_on_validation(tiny, tokenizer, written, tmp_path, capsys):
    train, held_out = ROWS[:60], ROWS[60:]
    beside = {"validation_path": str(written("v.jsonl", lines(held_out)))}
    expected = data.load(
        changed(
            tiny | {"data": {"format": "text", "path": str(written("t.jsonl", lines(train))), "tokenizer": tokenizer, **beside}},
            model={"vocab_size": 300, "seq_len": 64},
        )
    )
    folder = saved_dict(tmp_path / "dict", train=train, test=ROWS[:5], validation=held_out)
    assert equal(expected, data.load(config(tiny, folder, tokenizer)))
    for name, rows in {
        "train-00000-of-00002": train[:30],
        "train-00001-of-00002": train[30:],
        "validation-00000-of-00001": held_out,
        "test-0": ROWS,
    }.items():
        written(f"hub/data/{name}.parquet", parquet(rows))
    written("hub/README.md", b"# about")
    assert equal(expected, data.load(config(tiny, tmp_path / "hub", tokenizer)))
    for source in (folder, tmp_path / "hub"):
        out = tmp_path / f"{source.name}-tokens"
        assert cli.main(["data", "prepare", str(source), "--tokenizer", tokenizer, "--out", str(out)]) == 0
        prepared = changed(tiny | {"data": {"format": "tokens", "path": str(out)}}, model={"vocab_size": 300, "seq_len": 64})
        assert equal(expected, data.load(prepared))
    loaded = data.held_out(config(tiny, folder, tokenizer), str(folder / "test"))
    assert len(loaded.validation.elements) >= 1
    with pytest.raises(InputError, match=r"'.*/dict' has the splits train, test, validation; name one of them, such as '.*/dict/train'"):
        data.held_out(config(tiny, folder, tokenizer), str(folder))


def test_a_class_label_has_its_own_names(tiny, tokenizer, tmp_path):
    numbers = [{"text": row["text"], "label": ROWS.index(row) % 2} for row in ROWS]  # 0 is no, 1 is yes
    features = {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}
    folder = saved(tmp_path / "saved", numbers, {"huggingface": json.dumps({"info": {"features": features}})})
    turned = data.load(config(tiny, folder, tokenizer, "labels", LABELS | {"labels": ["yes", "no"]}))
    other = data.load(config(tiny, folder, tokenizer, "labels", LABELS | {"labels": ["wrong", "right"]}))
    np.testing.assert_array_equal(turned.train[0][1][:], 1 - other.train[0][1][:])


def test_text_is_compressed_or_in_rows_beside_files_of_text(tiny, tokenizer, written, tmp_path):
    long = "".join(f"{sentence} {i}\n" for i in range(60) for sentence in SENTENCES)
    plain = data.load(config(tiny, written("a.txt", long.encode()), tokenizer))
    for name, content in (("b", gzip.compress(long.encode())), ("c", zstd(long.encode()))):
        assert equal(plain, data.load(config(tiny, written(name, content), tokenizer)))
    mixed = written("mixed/rows.jsonl", lines(ROWS)).parent
    written("mixed/a.txt", long.encode())
    split = splits.read(config(tiny, mixed, tokenizer))
    decoded = [split.tokenizer.decoded(part.read(0, part.size).tolist()) for part in (split.train, split.validation)]
    assert long in decoded[0]
    assert sum(row["text"] in "".join(decoded) for row in ROWS) == len(ROWS)
    as_text = splits.read(config(tiny, mixed / "rows.jsonl", tokenizer, text_key=None))
    assert as_text.tokenizer.decoded(as_text.train.read(0, 30).tolist()).startswith('{"text": "the quick')


MISTAKES = {
    "column": (
        parquet([{"id": 1, "body": "a"}]),
        {},
        r"data\.path: expected the column 'text' in '.*/file', found 'id', 'body'; set data\.text_key$",
    ),
    "type": (
        arrow([{"text": 1}]),
        {},
        r"expected text in the column 'text' of '.*/file', found int64, and the columns 'text'; set data\.text_key$",
    ),
    "null": (
        parquet([{"text": "a"}, {"text": None}]),
        {},
        r"'.*/file', row 2: expected text in 'text', found null; correct it, or set data\.text_key",
    ),
    "cut Parquet": (
        parquet(ROWS)[:-200],
        {},
        r"data\.path: cannot read '.*/file': it begins like a Parquet file, but is damaged, cut off or not",
    ),
    "cut Arrow": (arrow(ROWS)[:-800], {}, r"cannot read '.*/file': it begins like an Arrow file, but is damaged"),
    "cut Arrow file": (arrow(ROWS, pa.ipc.new_file)[:-30], {}, r"cannot read '.*/file': it begins like an Arrow file, but is damaged"),
    "cut gzip": (gzip.compress(lines(ROWS))[:-20], {}, r"cannot read '.*/file': it is compressed with gzip, but damaged or cut off"),
    "cut zstd": (zstd(lines(ROWS))[:-20], {}, r"cannot read '.*/file': it is compressed with zstd, but damaged or cut off"),
    "false gzip": (b"\x1f\x8b" + bytes(90), {}, r"it is compressed with gzip, but damaged or cut off"),
    "Parquet in gzip": (
        gzip.compress(parquet(ROWS)),
        {},
        r"cannot read '.*/file': it is a Parquet file inside gzip, which cannot be read; unpack it first",
    ),
    "quote": (
        b"text\tlabel\n" + b"a\tb\n" * 9 + b'"Yes" is it\tb\n',
        {},
        r"line 11: a tab expected after '\"'; a cell that begins with a quote must end with a quote, and each quote inside must be doubled",
    ),
    "key": (
        lines([{"body": "a"}] * 9),
        {},
        r"data\.path: 9 lines are wrong: '.*/file', line 1: expected the key 'text', found .*; correct them, or set data\.text_key",
    ),
    "ids": (
        parquet([{"input_ids": ["a"]}]),
        {"form": "tokens"},
        r"expected lists of integers in the column 'input_ids' of '.*', found list<.*; set data\.tokens_key",
    ),
    "id": (
        parquet([{"input_ids": [1, -2]}]),
        {"form": "tokens"},
        r"row 1: expected ids from 0 to 16,777,215 in 'input_ids', found -2; correct it, or set data\.tok",
    ),
    "no id": (
        lines([{"input_ids": [1, True]}] * 3),
        {"form": "tokens"},
        r"line 1: expected a list of integers in 'input_ids', found \[1, True\]",
    ),
    "null id": (
        parquet([{"input_ids": [1, None]}]),
        {"form": "tokens"},
        r"row 1: expected a list of integers in 'input_ids', found null among them",
    ),
    "vocabulary": (
        parquet([{"input_ids": [1, 300]}] * 9),
        {"form": "tokens"},
        r"model\.vocab_size: expected at least 301, for the tokens of '.*'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_the_file_and_what_to_change(mistake, tiny, tokenizer, written):
    content, keys, message = MISTAKES[mistake]
    with pytest.raises(InputError, match=message):
        data.load(config(tiny, written("file", content), None if keys else tokenizer, **keys))


def test_a_folder_that_is_no_whole_dataset_is_an_error(tiny, tokenizer, tmp_path):
    def load(folder: Path):
        return data.load(config(tiny, folder, tokenizer))

    folder = saved(tmp_path / "saved", ROWS)
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        InputError, match=r"expected the file '.*data-00001-of-00002.arrow', which state.json names, found none; copy the folder"
    ):
        load(folder)
    for names in (["../secret"], ["/etc/passwd"], [".."], [3], "x"):
        (folder / "state.json").write_text(json.dumps({"_data_files": names}))
        with pytest.raises(InputError, match=r"expected names of files in '.*state\.json', found .*; save the dataset again"):
            load(folder)
    (folder / "state.json").write_text("[" * 10**5)
    with pytest.raises(InputError, match=r"expected a JSON object in '.*state\.json'"):
        load(folder)
    (folder / "state.json").write_text(json.dumps({"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(
        InputError, match=r"has a file of row indices, as old versions of datasets wrote it; load the dataset with datasets, and save"
    ):
        load(folder)
    with pytest.raises(InputError, match=r"expected a split 'train' in '.*', found test; name one, such as '.*/test'"):
        load(saved_dict(tmp_path / "dict", test=ROWS))


def test_a_missing_pyarrow_is_named_with_the_command_that_installs_it(tiny, tokenizer, written, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name, what in (("parquet", "a Parquet file"), ("stream", "an Arrow file"), ("a.json.zst", "compressed with zstd")):
        with pytest.raises(InputError, match=rf"' is {what}: expected the library pyarrow .* install it with pip install pyarrow$"):
            data.load(config(tiny, written(name, KINDS[name](ROWS)), tokenizer))
    assert data.load(config(tiny, written("a.jsonl.gz", KINDS["a.jsonl.gz"](ROWS)), tokenizer))


def test_any_damage_is_reported(written):
    """A changed byte gives rows or an error, and never another exception or a signal."""
    chance, columns = random.Random(0), [Column("text", "text_key", "text"), Column("prompt")]
    for name in ("parquet", "stream", "a.arrow", "a.json.zst", "a.jsonl.gz"):
        content = KINDS[name](ROWS)
        for _ in range(60):
            changed_content = bytearray(content)
            for _ in range(chance.choice((1, 1, 4))):
                changed_content[chance.randrange(len(content))] = chance.randrange(256)
            path = written(name, bytes(changed_content[: chance.choice((len(content), chance.randrange(8, len(content))))]))
            with contextlib.suppress(OSError, InputError):
                assert len(list(records([path], WrongLines("data.path"), columns, dict, lambda _: b"", 0.0))) <= 10**6


def test_any_damage_in_the_footer_of_a_parquet_file_is_reported(written):
    """Of some damaged columns pyarrow can give no facts, and ends the process when it is asked for them."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": ["a", "b"]}), sink, store_schema=False, use_dictionary=False)
    content = sink.getvalue().to_pybytes()
    for place in range(len(content) - 8 - int.from_bytes(content[-8:-4], "little"), len(content) - 8):
        for byte in (0, 255, content[place] ^ 1):
            path = written("a.parquet", content[:place] + bytes([byte]) + content[place + 1 :])
            with contextlib.suppress(OSError, InputError):
                assert (
                    len(list(records([path], WrongLines("data.path"), [Column("text", "text_key", "text")], dict, lambda _: b"", 0.0)))
                    <= 10**6
                )


def test_a_text_that_many_rows_share_takes_its_memory_once(written):
    """Decoded for all rows of a batch, the texts would take a gigabyte."""
    pool = pa.default_memory_pool()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": pa.DictionaryArray.from_arrays(np.zeros(1024, np.int32), ["x" * 2**20])}), sink, store_schema=False)
    path = written("bomb.parquet", sink.getvalue().to_pybytes())
    del sink
    assert path.stat().st_size < 2**20
    before, columns = pool.bytes_allocated(), [Column("text", "text_key", "text")]
    for row in records([path], WrongLines(""), columns, lambda record: len(record["text"]), lambda _: b"", 0.0):
        assert row.value == 2**20
        assert pool.bytes_allocated() - before < 2**27


def test_lines_that_unpack_to_more_than_the_limit_are_an_error(tiny, tokenizer, written, monkeypatch):
    monkeypatch.setattr(wrong_lines, "LONGEST", 1000)
    for name, content in (("a.jsonl.gz", b"x" * 10**6), ("a.csv.gz", b"text\n" + b"x" * 10**6)):
        with pytest.raises(InputError, match=r"line [12]: expected at most 1,000 bytes, found more"):
            data.load(config(tiny, written(name, gzip.compress(content)), tokenizer))
    with pytest.raises(InputError, match=r"row 1: expected at most 1,000 characters in 'text', found 2,000"):
        data.load(config(tiny, written("a.parquet", parquet([{"text": "x" * 2000}])), tokenizer))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv.gz", "a.tsv", "a.json"])
def test_files_about_a_dataset_are_left_out_where_there_are_rows(name, written):
    for about in ("README.md", "LICENSE", "notes.txt"):
        written(f"folder/{about}", b"")
    folder = written("folder/dataset_infos.json", b'{"default": 1}\n').parent
    about = ["LICENSE", "README.md", "dataset_infos.json", "notes.txt"]
    assert (sources.find_files(str(folder))[0], sources.left_out(str(folder), None)) == (about, ())
    written(f"folder/{name}", lines([{"text": "a"}] * 2))
    assert sources.find_files(str(folder))[0] == [name, "notes.txt"]
    assert sources.left_out(str(folder)) == (f"left out of '{folder}', which has files with rows: LICENSE, README.md, dataset_infos.json",)


def test_a_readme_beside_rows_is_no_document_and_the_run_says_so(tiny, tokenizer, written, tmp_path, capsys):
    folder = written("rows/data.jsonl", lines(ROWS)).parent
    rows = {form: data.load(config(tiny, folder, tokenizer, form, LABELS if form == "labels" else {})) for form in ("text", "labels")}
    written("rows/README.md", b"# about")
    line = f"left out of '{folder}', which has files with rows: README.md"
    for form, expected in rows.items():
        of_form = config(tiny, folder, tokenizer, form, LABELS if form == "labels" else {})
        assert equal(expected, data.load(of_form))
        assert (expected.remarks.count(line), data.load(of_form).remarks.count(line)) == (0, 1)
        assert line in data.held_out(of_form, str(folder)).remarks
    assert cli.main(["data", "prepare", str(folder), "--tokenizer", tokenizer, "--out", str(tmp_path / "tokens")]) == 0
    printed = capsys.readouterr().out
    assert f"{line}\n" in printed
    assert "tokens: 80 documents" in printed


def test_a_snapshot_of_the_hub_is_read_through_its_links(tiny, tokenizer, written, tmp_path):
    (tmp_path / "snapshot").mkdir()
    for part, rows in {"train": ROWS[:60], "validation": ROWS[60:]}.items():
        blob = written(f"blobs/{part}", parquet(rows))
        written(f"hub/{part}-00000-of-00001.parquet", blob.read_bytes())
        (tmp_path / "snapshot" / f"{part}-00000-of-00001.parquet").symlink_to(f"../blobs/{part}")
    assert equal(*(data.load(config(tiny, tmp_path / name, tokenizer)) for name in ("hub", "snapshot")))


MEASURE = """
import resource, sys
from pathlib import Path
import jax
import pyarrow.ipc, pyarrow.parquet
from jpipe_lm.data import prepare, texts
jax.numpy.zeros(3).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = sum(len(piece.text) for piece in texts.pieces(["a"], [Path(sys.argv[1])], "text", 0.1, texts.Keys(), "data.path"))
print(size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow  # it writes 300 MB, in one row group, as careless programs do
@pytest.mark.parametrize(
    ("kind", "thousands"), [("parquet", 100), ("stream", 100), pytest.param("parquet", 700, marks=pytest.mark.exhaustive)]
)
def test_memory_does_not_grow_with_a_file_of_columns(kind, thousands, tmp_path):
    chance, file = np.random.default_rng(0), tmp_path / "large"
    rows = [chance.integers(97, 122, 3000, np.uint8).tobytes().decode() for _ in range(1000)]
    whole = pa.table({"text": pa.chunked_array([pa.array(rows)] * thousands), "other": np.arange(1000 * thousands)})
    if kind == "parquet":
        pq.write_table(whole, file, row_group_size=len(whole), use_dictionary=False, compression="none")
    else:
        with pa.ipc.new_stream(str(file), whole.schema) as writer:
            writer.write_table(whole, max_chunksize=1000)
    assert file.stat().st_size > 3e6 * thousands
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'train'}:{ROOT / 'planner'}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MEASURE, str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3 * thousands, check=True)
    size, kilobytes = map(int, done.stdout.split())
    assert size == 3 * 10**6 * thousands
    assert kilobytes < 150_000
