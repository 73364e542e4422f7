"""Texts with labels: the rows that they become, and mistakes in them, each reported with its file and line."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library

from jpipe import InputError
from jpipe_train.config.config import Config
from jpipe_train.data import data
from tests.lm.data.conftest import same
from tests.train.conftest import changed

CLASSES = {"head": "classification", "labels": ["no", "yes"]}
CHOICES = {"head": "multiple_choice", "labels": 2}


def config(tiny, tokenizer: Path, path: Path, model: dict, **keys):
    fields = {"format": "labels", "path": str(path), "tokenizer": str(tokenizer), "validation_fraction": 0.4, **keys}
    model = {"vocab_size": 300, "seq_len": 40, "depth": 1, "width": 8, "heads": 2, **model}
    return changed(tiny | {"data": fields, "model": model}, train={"batch_size": 2})


def written(path: Path, *records: object) -> Path:
    """Write JSON lines, or text as it is."""
    path.write_text("".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records))
    return path


def rows(count: int = 20) -> list[dict]:
    return [{"text": f"the fox {i}", "label": ["no", "yes"][i % 2]} for i in range(count)]


def by_content(loaded, part) -> dict:
    """Return the label of each row by its tokens without padding, over one round."""
    batches = getattr(loaded, part)
    found = {}
    for i in range(min(len(batches), 20)):  # training data have no end
        inputs, labels = batches[i]
        for tokens, segments, label in zip(inputs["tokens"][:], inputs["segments"][:], labels[:], strict=True):
            found[tuple(tokens[segments == 1].tolist())] = label
    return found


def test_rows_have_the_tokens_of_the_library_their_types_and_padding(tiny, tokenizer_files, tmp_path):
    records = [{"one": f"the fox {i}", "two": "lazy dog", "label": i % 2} for i in range(20)]
    path = written(tmp_path / "a.jsonl", *records)
    loaded = data.load(config(tiny, tokenizer_files["bert"], path, CLASSES | {"kind": "bert"}, text_key="one", second_key="two"))
    rules = library.Tokenizer.from_file(str(tokenizer_files["bert"]))
    expected = {tuple(rules.encode(r["one"], r["two"]).ids): r["label"] for r in records}
    found = by_content(loaded, "train") | by_content(loaded, "validation")
    assert expected.items() >= found.items()
    assert len(found) >= 19  # the last row held out may fill no batch
    inputs, labels = loaded.train[0]
    whole = rules.encode(records[0]["one"], records[0]["two"])
    assert (labels.shape, labels.dtype) == ((2,), np.int32)
    for row in range(2):
        size = int(inputs["segments"][:][row].sum())
        assert inputs["types"][:][row][:size].tolist()[:3] == whole.type_ids[:3]
        assert (inputs["types"][:][row].sum(), inputs["types"][:][row][size:].sum()) == (sum(whole.type_ids), 0)
        assert (inputs["tokens"][:][row][size:] == rules.token_to_id("[PAD]")).all()
    assert data.load(config(tiny, tokenizer_files["bert"], path, CLASSES | {"kind": "bert"}, text_key="one")).digest() != loaded.digest()


def test_tables_and_json_lines_of_the_same_examples_are_the_same(tiny, tokenizer, tmp_path):
    json_lines = written(tmp_path / "a.jsonl", *({"text": f'a "fox",\n {i}', "label": i % 2} for i in range(20)))
    table = written(
        tmp_path / "a.csv", "\ufefflabel,other,text\n\n", *(f'{["no", "yes"][i % 2]},0,"a ""fox"",\n {i}"\n' for i in range(20))
    )
    loaded = [data.load(config(tiny, tokenizer, path, CLASSES)) for path in (json_lines, table)]
    assert same(loaded[0].train[0], loaded[1].train[0])
    assert same(loaded[0].validation[0], loaded[1].validation[0])
    assert set(loaded[0].train[0][0]) == {"tokens", "segments"}  # a decoder has no types
    tabs = written(tmp_path / "a.tsv", "text\tlabel\n", *(f'a "fox {i}\t{i % 2}\n' for i in range(20)))
    same_lines = written(tmp_path / "b.jsonl", *({"text": f'a "fox {i}', "label": i % 2} for i in range(20)))
    assert same(*(data.load(config(tiny, tokenizer, path, CLASSES)).train[0] for path in (tabs, same_lines)))


def test_choices_of_an_example_stay_together_and_numbers_stay_numbers(tiny, tokenizer, tmp_path):
    records = [{"text": "the fox", "question": f"which {i}?", "choices": ["dog", f"words {i}"], "label": i % 2} for i in range(20)]
    path = written(tmp_path / "a.jsonl", *records)
    loaded = data.load(config(tiny, tokenizer, path, CHOICES, second_key="question"))
    inputs, labels = loaded.train[0]
    assert (inputs["tokens"].shape, labels.shape) == ((2, 2, 40), (2,))
    rules = library.Tokenizer.from_file(tokenizer)
    expected = {}
    for r in records:
        ids = [rules.encode(r["text"], f"{r['question']} {choice}").ids for choice in r["choices"]]
        expected[tuple(ids[0]), tuple(ids[1])] = r["label"]
    for example in range(2):
        tokens, segments = inputs["tokens"][:][example], inputs["segments"][:][example]
        key = tuple(tuple(row[segment == 1].tolist()) for row, segment in zip(tokens, segments, strict=True))
        assert expected[key] == labels[:][example]
    numbers = written(tmp_path / "b.jsonl", *({"text": f"fox {i}", "label": [i, i / 2, str(i)][i % 3]} for i in range(20)))
    loaded = data.load(config(tiny, tokenizer, numbers, {"head": "regression"}))
    assert loaded.train[0][1].dtype == np.float32
    values = by_content(loaded, "train") | by_content(loaded, "validation")
    assert {float(value) for value in values.values()} == {[i, i / 2, i][i % 3] for i in range(20)}


def test_what_is_too_long_is_an_error_or_is_cut_as_transformers_cuts(tiny, tokenizer_files, tmp_path):
    path = written(
        tmp_path / "a.jsonl", *rows(), {"text": "a lazy dog " * 20, "label": "no"}, {"text": "over the fox " * 20, "label": "no"}
    )
    model = CLASSES | {"kind": "bert"}
    wrong = r"line \d+: expected at most 40 tokens \(model.seq_len\), found \d+; "
    message = rf"2 lines are wrong: '.*a\.jsonl', {wrong}'.*a\.jsonl', {wrong}correct them, raise model\.seq_len, or cut such texts with "
    with pytest.raises(InputError, match=message):
        data.load(config(tiny, tokenizer_files["bert"], path, model))
    loaded = data.load(config(tiny, tokenizer_files["bert"], path, model, too_long="cut"))
    assert loaded.remarks == ("2 texts cut to the 40 tokens of a row",)
    rules = library.Tokenizer.from_file(str(tokenizer_files["bert"]))
    rules.enable_truncation(40)
    cut = tuple(rules.encode("a lazy dog " * 20).ids)
    assert cut in by_content(loaded, "train") | by_content(loaded, "validation")
    assert cut[-1] == rules.token_to_id("[SEP]")


def test_all_of_another_file_is_held_out(tiny, tokenizer, tmp_path):
    one, other = written(tmp_path / "a.jsonl", *rows()), written(tmp_path / "b.jsonl", *rows(5))
    run = config(tiny, tokenizer, one, CLASSES)
    assert len(data.held_out(run, str(other)).validation.elements) == 5
    assert 0 < len(data.held_out(run).validation.elements) < 20
    beside = config(tiny, tokenizer, one, CLASSES, validation_fraction=0.05, validation_path=str(other))
    assert [len(by_content(data.load(beside), "validation")), len(data.held_out(beside).validation.elements)] == [4, 5]


def test_all_rows_are_validated_where_fewer_than_a_batch_are_held_out(tiny, tokenizer, tmp_path):
    one, other = written(tmp_path / "a.jsonl", *rows(40)), written(tmp_path / "b.jsonl", *rows(7))
    run = config(tiny, tokenizer, one, CLASSES, validation_fraction=0.05, validation_path=str(other))
    run = run.model_copy(update={"train": run.train.model_copy(update={"batch_size": 8})})
    assert [len(labels) for (_, labels), _ in data.load(run).with_some_validation().held_out(1)] == [7]


NAMES, NUMBERS = CLASSES, {"head": "classification", "labels": 3}


@pytest.mark.parametrize(
    ("name", "content", "model", "keys", "message"),
    [
        ("a.jsonl", '{"label": 0}\n', NAMES, {}, r"a\.jsonl', line 1: expected the key 'text', found \['label'\]"),
        ("a.jsonl", '{"text": "a"}\n', NAMES, {}, r"line 1: expected the key 'label', found \['text'\]"),
        ("a.jsonl", '\n{"text": "a", "label": "maybe"}\n', NAMES, {}, r"line 2: .* label of model.labels .*'no', 'yes'.* found 'maybe'"),
        ("a.jsonl", '{"text": "a", "label": 3}\n', NUMBERS, {}, r"line 1: expected a label of model.labels \(0 to 2\) in 'label', found 3"),
        ("a.jsonl", '{"text": "a", "label": -1}\n', NUMBERS, {}, "found -1"),
        ("a.jsonl", '{"text": "a", "label": 1.0}\n', NUMBERS, {}, "found 1.0"),
        ("a.jsonl", '{"text": "a", "label": 0}\n', {"head": "classification", "labels": ["1", "2"]}, {}, "found 0"),
        ("a.jsonl", '{"text": 3, "label": 0}\n', NAMES, {}, "expected text in 'text', found int"),
        ("a.jsonl", '{"text": "a", "label": 0}\n', NAMES, {"second_key": "b"}, "expected the key 'b'"),
        ("a.jsonl", '{"text": "a", "label": "x"}\n', {"head": "regression"}, {}, "expected a number in 'label', found 'x'"),
        ("a.csv", "text,label\na,1_000\n", {"head": "regression"}, {}, "line 2: expected a number in 'label', found '1_000'"),
        ("a.jsonl", '{"text": "a", "label": 1e400}\n', {"head": "regression"}, {}, "line 1: expected a number in 'label', found inf"),
        ("a.jsonl", '{"text": "a", "label": NaN}\n', {"head": "regression"}, {}, "expected a number in 'label'"),
        ("a.jsonl", '{"text": "a", "choices": ["b"], "label": 0}\n', CHOICES, {}, r"expected a list of 2 choices .* found 1 choices"),
        ("a.jsonl", '{"text": "a", "choices": "bc", "label": 0}\n', CHOICES, {}, r"expected a list of 2 choices .* found str"),
        ("a.jsonl", '{"text": "a", "choices": ["b", 1], "label": 0}\n', CHOICES, {}, "expected text in 'choices', found int"),
        ("a.jsonl", "[]\n" * 7, NAMES, {}, "7 lines are wrong: .*and 2 more"),
        ("a.jsonl", '{"text": "", "label": 0}\n', NAMES, {}, "line 1: expected text, found a text without any token"),
        ("a.csv", "text,label\na,no\nb\n", NAMES, {}, r"a\.csv', line 3: expected 2 fields, as in the first line, found 1"),
        ("a.csv", 'text,label\n"a" b,no\n', NAMES, {}, r"a\.csv', line 2: "),
        ("a.csv", "text,label\nb,no\n\xff,no\n", NAMES, {}, r"line 3: expected text in UTF-8, found the byte 0xff at 0"),
        ("a.csv", "text,label,text\na,no,b\n", NAMES, {}, r"a\.csv', line 1: expected each column once, found 'text' twice"),
        ("a.csv", "words,label\nb,no\n", NAMES, {}, r"expected the column 'text' in '.*a\.csv', found 'words', 'label'; set data"),
        ("a.csv", "", NAMES, {}, r"expected at least 2 examples for training \(train.batch_size\) and 1 for validation, found 0 and 0"),
        ("a.jsonl", '{"text": "a", "label": 0}\n' * 9, NAMES, {}, r"found (0 and 9|9 and none) in .*; give more data, or "),
    ],
)  # fmt: skip
def test_mistakes_name_file_and_line(name, content, model, keys, message, tiny, tokenizer, tmp_path):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=message):
        data.load(config(tiny, tokenizer, tmp_path / name, model, **keys))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"format": "labels"}}, "data.format labels needs a built-in model with model.head classification"),
        ({"model": NUMBERS}, "model.head classification needs data.format labels, found auto; change one of them"),
        (
            {"model": NUMBERS, "loss": {"chunk": 8}, "data": {"format": "labels"}},
            "loss.chunk has no effect with model.head classification",
        ),
        (
            {"model": NUMBERS, "data": {"format": "labels"}, "tune": {"lora": {}}},
            "tune.lora alone would not train the new model.head classification",
        ),
        (
            {"model": NUMBERS, "data": {"format": "labels"}, "tune": {"lora": {}, "train_only": ["head/norm"]}},
            "tune.lora alone would not train the new model.head classification",
        ),
        (
            {"model": NUMBERS, "data": {"format": "labels", "choices_key": "a"}},
            "data.choices_key has no effect with model.head classification; remove it, or use multiple_choice",
        ),
        ({"data": {"text_key": "a"}}, "text_key has no effect with format bytes: text_key is for text and labels; remove text_key"),
        ({"model": NUMBERS, "data": {"format": "labels", "text_key": None}}, "text_key: expected a column for format labels, found null"),
        ({"eval": {"metrics": {"f": "f1_macro"}}}, "f1_macro needs a built-in model with 2 to 256 labels .*, found none"),
    ],
)
def test_keys_that_do_not_fit_each_other(sections, message, tiny):
    if sections.get("data", {}).get("format") == "labels":
        tiny = tiny | {"data": {"path": "a", "tokenizer": "b"}}
    with pytest.raises(ValueError, match=message):
        Config.model_validate({name: tiny.get(name, {}) | sections.get(name, {}) for name in tiny.keys() | sections.keys()})
