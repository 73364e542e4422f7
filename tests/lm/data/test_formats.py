"""Batches of each format: their contents, their dependence on (seed, step) only, and reported mistakes."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library

from jpipe import InputError
from jpipe_lm.data import masked
from jpipe_lm.data import tokenizer as tokenizers
from jpipe_lm.data.document_files import Files
from jpipe_lm.data.documents import Documents
from jpipe_lm.data.files import token_files
from jpipe_train.data import data
from tests.lm.data.conftest import quiet, same, whole
from tests.lm.data.prepared import prepare_files
from tests.train.conftest import changed

MODEL = {"vocab_size": 300, "seq_len": 16}


@pytest.fixture
def tokens(documents, tokenizer, tmp_path) -> Path:
    """Return a folder of several shards as `jpipe data prepare` writes it."""
    prepare_files(Files([str(documents)]), tokenizer, str(tmp_path / "tokens"), quiet(), 0.3, 200)
    return tmp_path / "tokens"


@pytest.fixture
def prompts(tmp_path) -> Path:
    """Write JSON lines of questions and answers."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"what is {i}?", "answer": f"{i} is {i}"}) + "\n" for i in range(80)))
    return path


def of_format(tiny, kind: str, request) -> dict:
    """Return the keys of `data` for one format."""
    values = {name: str(request.getfixturevalue(name)) for name in ("documents", "tokenizer")}
    match kind:
        case "bytes":
            return tiny["data"]
        case "text":
            return {"format": "text", "path": values["documents"], "tokenizer": values["tokenizer"], "validation_fraction": 0.3}
        case "tokens":
            return {"format": "tokens", "path": str(request.getfixturevalue("tokens"))}
        case _:
            path = str(request.getfixturevalue("prompts"))
            return {"format": "prompts", "path": path, "tokenizer": values["tokenizer"], "validation_fraction": 0.3}


def configured(tiny, fields: dict, seed: int = 0, **sections):
    longer = {"seq_len": 40} if fields.get("format") == "prompts" else {}
    model = tiny["model"] | MODEL | longer | sections.pop("model", {})
    return changed(tiny | {"data": fields, "model": model, "seed": seed}, **sections)


@pytest.mark.parametrize("kind", ["text", "tokens", "prompts"])
def test_a_batch_depends_on_seed_and_step_only_and_its_rows_are_read_alone(kind, tiny, request):
    fields = of_format(tiny, kind, request)
    one, other = data.load(configured(tiny, fields)), data.load(configured(tiny, fields))
    assert one.digest() == other.digest()
    later = whole(one.train[10**6])
    for step in (5, 0, 10**6):
        assert same(one.train[step], other.train[step])
        inputs, labels = other.train[step]
        assert set(inputs) == {"tokens", "segments"}
        for rows in (*inputs.values(), labels):
            assert (rows.shape, rows.dtype, rows[:].dtype) == ((4, 40 if kind == "prompts" else 16), np.int32, np.int32)
            np.testing.assert_array_equal(rows[2:3], rows[:][2:3])
    for array, again in zip(later, whole(one.train[10**6]), strict=True):
        np.testing.assert_array_equal(array, again)
    seeded = data.load(configured(tiny, fields, seed=1))
    assert not same(one.train[0], seeded.train[0])
    assert same(one.validation[0], seeded.validation[0])


def test_text_and_its_tokens_in_files_give_the_same_batches(tiny, documents, tokenizer, tokens):
    text = {"format": "text", "path": str(documents), "tokenizer": tokenizer, "validation_fraction": 0.3}
    for boundaries in ("keep", "ignore"):
        one = data.load(configured(tiny, text | {"boundaries": boundaries}))
        other = data.load(configured(tiny, {"format": "tokens", "path": str(tokens), "boundaries": boundaries}))
        assert len(one.validation) == len(other.validation)
        for i in range(4):
            assert same(one.train[i], other.train[i])
            assert isinstance(one.train[i][0], dict) == (boundaries == "keep")
        assert one.remarks == (f"2 empty documents left out, the first is '{documents}/07.txt'",)


def test_prompts_and_their_tokens_in_files_give_the_same_batches(tiny, prompts, tokenizer, tmp_path):
    prepare_files(Files([str(prompts)], "prompts"), tokenizer, str(tmp_path / "tokens"), quiet(), 0.3, 200)
    fields = {"format": "prompts", "path": str(prompts), "tokenizer": tokenizer, "validation_fraction": 0.3}
    one = data.load(configured(tiny, fields))
    other = data.load(configured(tiny, {"format": "tokens", "path": str(tmp_path / "tokens")}, model={"seq_len": 40}))
    assert all(same(one.train[i], other.train[i]) for i in range(4))
    rules = library.Tokenizer.from_file(tokenizer)
    inputs, labels = (one.train[0][0], one.train[0][1])
    for segment in range(1, int(inputs["segments"][:][0].max()) + 1):
        at = inputs["segments"][:][0] == segment
        tokens, learned = inputs["tokens"][:][0][at].tolist(), labels[:][0][at].tolist()
        answer = rules.decode([label for label in learned if label >= 0], skip_special_tokens=False)
        assert re.fullmatch(r"(\d+) is \1<\|endoftext\|>", answer)
        assert rules.decode(tokens).startswith(f"what is {answer.split()[0]}?")


def test_documents_may_be_held_out_by_a_path_of_their_own(tiny, documents, tokenizer, tokens, text):
    for fields, other in (
        ({"format": "tokens", "path": str(tokens)}, tokens),
        ({"format": "text", "path": str(documents), "tokenizer": tokenizer}, text),
        ({"format": "bytes", "path": str(documents)}, text),
    ):
        dataset = data.load(configured(tiny, fields | {"validation_path": str(other)}))
        every = dataset.digest()
        assert every == data.load(configured(tiny, fields | {"validation_path": str(other)})).digest()
        held_out = data.load(configured(tiny, fields | ({} if fields["format"] == "tokens" else {"validation_fraction": 0.3}))).validation
        assert not same(dataset.validation[0], held_out[0])


@pytest.fixture
def bert(tokenizer_files) -> tokenizers.Tokenizer:
    return tokenizers.load(tokenizer_files["bert"], "data.tokenizer")


def test_masked_rows_hide_as_many_tokens_in_each_and_tell_whether_the_second_part_follows(bert):
    sep, cls, mask = (bert.id_of(name) for name in ("[SEP]", "[CLS]", "[MASK]"))
    words = np.asarray([5 + i % 250 for i in range(6000)], np.uint16)
    ends = np.arange(50, 6001, 50)
    words[ends - 1] = sep
    rows = masked.Masked(Documents.of(words, bert.vocab_size, ends), bert, 67, 0.15, seed=3)
    kinds, follows, drawn = {"mask": 0, "other": 0, "same": 0}, [], masked.Drawn(rows, epochs=True)
    for i in range(300):
        inputs, labels = drawn[i]
        tokens, types, hidden = inputs["tokens"], inputs["types"], labels["tokens"] >= 0
        assert hidden.sum() == round(0.15 * 64)
        whole_row = np.where(hidden, labels["tokens"], tokens)
        cut = int(np.flatnonzero(types)[0])
        assert (whole_row[0], whole_row[cut - 1], whole_row[-1], tokens.size) == (cls, sep, sep, 67)
        assert types.tolist() == [0] * cut + [1] * (67 - cut)
        assert not hidden[[0, cut - 1, -1]].any()
        assert not np.isin(labels["tokens"][hidden], [sep, cls, mask]).any()
        text = np.concatenate([whole_row[1 : cut - 1], whole_row[cut:-1]])
        runs_on = any(np.array_equal(text, words[at : at + 64]) for at in range(0, 5936, 64))
        assert runs_on == (labels["next"] == masked.FOLLOWS)
        follows.append(int(labels["next"]))
        for token, label in zip(tokens[hidden], labels["tokens"][hidden], strict=True):
            kinds["mask" if token == mask else "same" if token == label else "other"] += 1
    shares = {kind: number / sum(kinds.values()) for kind, number in kinds.items()}
    assert abs(shares["mask"] - 0.8) < 0.03
    assert abs(shares["same"] - 0.1) < 0.03
    assert 0.4 < np.mean(follows) < 0.6
    assert [a.tolist() for a in drawn[7][0].values()] == [a.tolist() for a in masked.Drawn(rows, epochs=True)[7][0].values()]
    again = drawn[7 + len(rows)], drawn[7]
    assert not np.array_equal(again[0][1]["tokens"], again[1][1]["tokens"])


def test_rows_of_masked_text_hide_as_many_tokens_even_where_nearly_all_are_special(bert):
    words = np.full(2000, bert.id_of("[SEP]"), np.uint16)
    words[::30] = 20
    rows = masked.Masked(Documents.of(words, bert.vocab_size, np.arange(1, 2001)), bert, 23, 0.5, seed=0)
    assert {int((rows.row(i, i)[1]["tokens"] >= 0).sum()) for i in range(20)} == {10}


def test_random_tokens_of_masked_rows_are_tokens_that_there_are(tmp_path):
    rules = library.Tokenizer(library.models.WordLevel({"[CLS]": 0, "[SEP]": 1, "[MASK]": 2, "a": 3, "b": 900}, unk_token="a"))
    rules.add_special_tokens(["[CLS]", "[SEP]", "[MASK]"])
    rules.save(str(tmp_path / "holes.json"))
    holes = tokenizers.load(tmp_path / "holes.json", "data.tokenizer")
    rows = masked.Masked(Documents.of(np.full(2000, 3, np.uint16), holes.vocab_size, np.arange(1, 2001)), holes, 103, 0.5, seed=0)
    assert {int(token) for i in range(20) for token in rows.row(i % 10, i)[0]["tokens"]} == {0, 1, 2, 3, 900}


def spoiled(folder: Path, **changes) -> None:
    index = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps(index | changes))


def cut_shard(folder: Path) -> None:
    with open(folder / "train-00000.bin", "r+b") as file:
        file.truncate(100)


def high_token(folder: Path) -> None:
    content = np.fromfile(folder / "train-00000.bin", "<u2")
    content[:] = 999
    content.tofile(folder / "train-00000.bin")


def batches_of(config, number: int) -> None:
    dataset = data.load(config)
    for i in range(number):
        whole(dataset.train[i])


def spoiled_ends(change):
    def spoil(folder: Path) -> None:
        ends = np.fromfile(folder / "train-00000.ends", "<u8")
        change(ends).astype("<u8").tofile(folder / "train-00000.ends")

    return spoil


def other_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (folder / "tokens.json").unlink(),
            r"data\.path: cannot read '.*tokens\.json': No such file or directory; give a folder",
        ),
        (
            lambda folder: (folder / "tokens.json").write_bytes(b"\xff"),
            r"data\.path: expected JSON in '.*tokens\.json', found text that is not",
        ),
        (lambda folder: (folder / "tokens.json").write_text("{"), r"tokens\.json: the whole: expected Invalid JSON"),
        (cut_shard, r"data\.path: expected '.*train-00000\.bin' to have \d\d\d bytes, found 100; copy or prepare the folder again"),
        (lambda folder: (folder / "train-00001.ends").unlink(), r"expected '.*train-00001\.ends' with \d+ bytes, found no such file; copy"),
        (lambda folder: spoiled(folder, dtype="int64"), r"tokens\.json: dtype: expected 'uint16' or 'uint32', found 'int64'"),
        (lambda folder: spoiled(folder, dtype="uint32"), r"found \d+; are these uint16\? tokens\.json says uint32"),
        (
            lambda folder: spoiled(folder, format="jpipe-tokens/2"),
            r"tokens\.json: format: expected 'jpipe-tokens/1', found 'jpipe-tokens/2'",
        ),
        (lambda folder: spoiled(folder, shards=3), r"tokens\.json: unknown key 'shards'"),
        (
            lambda folder: spoiled(folder, train=[{"name": "../x", "tokens": 3}]),
            r"tokens\.json: train\.0\.name: expected 1 to 100 letters.*found '\.\./x'; re",
        ),
        (lambda folder: spoiled(folder, validation=[]), r"data\.path: '.*' has no tokens for validation; name a folder with such"),
        (
            lambda folder: spoiled(folder, vocab_size=900),
            r"model\.vocab_size: expected at least 900, for the tokens of '.*', found 300; set",
        ),
        (
            lambda folder: spoiled(folder, vocab_size=10),
            r"expected every token of '.*\.bin' to be from 0 to 9, found \d+ at \d+; write the",
        ),
        (
            lambda folder: np.fromfile(folder / "train-00000.bin", "<u2").astype("<u4").tofile(folder / "train-00000.bin"),
            r"expected '.*train-00000\.bin' to have \d+ bytes, found \d+; are these uint32\? tokens\.json says uint16",
        ),
        (
            other_tokenizer,
            r"expected '.*tokenizer\.json' to be the tokenizer that made the tokens \(see tokens\.json\), found another tokenizer; copy",
        ),
        (high_token, r"data: expected every token of '.*train-00000\.bin' to be from 0 to 299, found 999 at \d+; write the file again"),
        (
            spoiled_ends(lambda ends: np.full_like(ends, 2**63 + 5)),
            r"expected the last number in '.*train-00000\.ends' to be \d+, the number of tokens, found 9,223,372,036,854,775,813; write",
        ),
        (
            spoiled_ends(lambda ends: ends[::-1]),
            r"expected the last number in '.*train-00000\.ends' to be \d+, the number of tokens, found \d+;",
        ),
        (
            spoiled_ends(lambda ends: np.concatenate([ends[1::-1], ends[2:]])),
            r"data: expected ascending numbers in '.*train-00000\.ends', found \[.*\]; write the folder again",
        ),
    ],
    ids=[
        "none",
        "bytes",
        "text",
        "cut",
        "missing",
        "dtype",
        "other",
        "version",
        "key",
        "name",
        "one",
        "large",
        "small",
        "type",
        "tokenizer",
        "token",
        "far ends",
        "reversed ends",
        "two ends",
    ],
)
def test_a_damaged_or_foreign_folder_is_reported(spoil, message, tiny, tokens):
    spoil(tokens)
    config = configured(tiny, {"format": "tokens", "path": str(tokens)})
    with pytest.raises(InputError, match=message):
        batches_of(config, 8)


def test_the_digest_depends_on_contents_but_not_on_times(tokens, tmp_path):
    def digest(folder: Path) -> str:
        return token_files.digest(*token_files.read_index(str(folder), "data.path"))

    shutil.copytree(tokens, tmp_path / "copy", copy_function=shutil.copyfile)
    assert digest(tokens) == digest(tmp_path / "copy")
    content = bytearray((tokens / "train-00001.bin").read_bytes())
    content[0] ^= 1
    (tmp_path / "copy" / "train-00001.bin").write_bytes(content)
    assert digest(tokens) != digest(tmp_path / "copy")


def test_a_folder_without_document_ends_is_a_running_text(tiny, tokens):
    index = json.loads((tokens / "tokens.json").read_text())
    for part in ("train", "validation"):
        index[part] = [shard | {"documents": None} for shard in index[part]]
    spoiled(tokens, **index)
    fields = {"format": "tokens", "path": str(tokens)}
    assert data.load(configured(tiny, fields)).train[0][0].shape == (4, 16)
    with pytest.raises(InputError, match=r"data\.boundaries: keep needs the ends of documents, found a tokens\.json without"):
        data.load(configured(tiny, fields | {"boundaries": "keep"}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"format": "text"}, "format text needs tokenizer; set tokenizer to a tokenizer.json"),
        ({"format": "tokens"}, "format tokens needs path; set path to a folder that jpipe data prepare wrote"),
        (
            {"format": "tokens", "path": "x", "tokenizer": "t"},
            "tokenizer has no effect with format tokens: tokenizer is for text and prompts",
        ),
        ({"tokenizer": "t"}, "tokenizer has no effect with format bytes"),
        ({"format": "prompts", "path": "x", "tokenizer": "t", "boundaries": "ignore"}, "boundaries has no effect with format prompts"),
        ({"format": "text", "tokenizer": "t", "masked_fraction": 0.2}, "masked_fraction has no effect with objective next"),
        (
            {"format": "text", "tokenizer": "t", "objective": "masked", "boundaries": "keep"},
            "boundaries keep has no effect with objective",
        ),
        ({"validation_path": "x", "validation_fraction": 0.5}, "validation_fraction has no effect with validation_path"),
        ({"target": "a:b", "format": "text"}, "format has no effect with 'a:b'"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys, message, tiny):
    with pytest.raises(ValueError, match=re.escape(message)):
        changed(tiny | {"data": keys})


def test_a_resolved_config_is_a_valid_config(tiny, tokenizer):
    config = changed(tiny | {"data": {"format": "text", "tokenizer": tokenizer}})
    assert type(config).model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("kind", "keys", "sections", "message"),
    [
        (
            "text",
            {},
            {"model": {"vocab_size": 256}},
            r"model\.vocab_size: expected at least \d+, for the tokens of '.*decoder\.json', found 256",
        ),
        (
            "prompts",
            {},
            {"model": {"seq_len": 8}},
            r"prompts\.jsonl', line \d+: expected at most 9 tokens \(model\.seq_len 8, plus one\), found \d+, and more in \d+ other",
        ),
        (
            "prompts",
            {"validation_fraction": 1e-9},
            {},
            r"expected at least 1 row of examples for training and 1 for validation .* found \d+ and 0 in '.*'; give more text, raise",
        ),
        ("prompts", {"answer_key": "reply"}, {}, r"line 1: expected the key 'reply', found \['prompt', 'answer'\]"),
        ("text", {"objective": "masked"}, {}, r"data\.objective: expected next for model\.kind decoder, found masked"),
        ("text", {}, {"model": {"kind": "bert"}}, r"data\.objective: expected masked for model\.kind bert, found next"),
        (
            "text",
            {"objective": "masked"},
            {"model": {"kind": "bert"}},
            r"decoder\.json': expected a tokenizer with the token \[CLS\] or <s>",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_model_is_reported(kind, keys, sections, message, tiny, request):
    with pytest.raises(InputError, match=message):
        data.load(configured(tiny, of_format(tiny, kind, request) | keys, **sections))


@pytest.mark.parametrize("kind", ["bytes", "text", "tokens", "prompts"])
def test_fewer_rows_than_a_batch_are_enough_and_so_are_fewer_tokens_than_a_row(kind, tiny, request):
    seq_len = 5000  # of all formats there is less
    loaded = data.load(configured(tiny, of_format(tiny, kind, request), model={"seq_len": seq_len}))
    assert len(loaded.validation) == 1
    assert loaded.remarks[-2:] == (
        "1 row for training: a batch of 4 repeats rows",
        "1 row for validation: a batch of 4 is filled with padding",
    )
    for inputs, labels in (loaded.train[3], loaded.validation[0]):
        tokens = (inputs["tokens"] if isinstance(inputs, dict) else inputs)[:]
        assert tokens.shape == labels[:].shape == (4, seq_len)
        used = int(np.flatnonzero(labels[:][0] >= 0)[-1]) + 1
        assert 2 < used < seq_len
        assert not tokens[:, used:].any()
        if isinstance(inputs, dict):
            assert not inputs["segments"][:][:, used:].any()
            assert inputs["segments"][:][0, :used].all()
    assert (loaded.train[0][1][:] >= 0).any(axis=1).all()
    assert (loaded.validation[0][1][:] >= 0).any(axis=1).tolist() == [True, False, False, False]


def test_examples_that_are_cut_to_nothing_are_counted(tiny, prompts, tokenizer):
    lines = [{"prompt": "x" * 100, "answer": "y"}, {"prompt": "short", "answer": "y" * 100}]
    prompts.write_text(prompts.read_text() + "\n".join(map(json.dumps, lines * 5)))
    fields = {"format": "prompts", "path": str(prompts), "tokenizer": tokenizer, "validation_fraction": 0.3, "too_long": "cut"}
    dataset = data.load(configured(tiny, fields, model={"seq_len": 30}))
    assert dataset.remarks == ("5 examples left out, because the prompt leaves no room for the answer",)


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_a_warm_start_determines_the_tokenizer(kind, tiny, tokenizer, tokenizer_files, request, tmp_path):
    """Additional tokens after those of the weights make no difference."""
    beside, fields = tmp_path / "weights" / "tokenizer.json", of_format(tiny, kind, request)
    beside.parent.mkdir()
    config = configured(tiny | {"warm_start": {"file": str(beside.parent)}}, fields)
    rules = library.Tokenizer.from_file(tokenizer)
    rules.add_special_tokens(["<|one more|>"])
    rules.save(str(beside))
    data.load(config)
    shutil.copyfile(tokenizer_files["bert"], beside)
    key, file = ("data.tokenizer", "decoder") if kind == "text" else ("data.path", "tokenizer")
    message = rf"^{key}: expected the tokens of '.*weights/tokenizer\.json', .*, found 300 different tokens in '.*{file}"
    with pytest.raises(InputError, match=message + r"\.json', the first is 0, '<\|endoftext\|>' in place of '\[PAD\]'; use that tokenizer"):
        data.load(config)
    data.load(changed(config.model_dump(), warm_start={"file": str(beside.parent), "mode": "partial"}))


def test_losses_and_portions_have_a_unit(tiny, request):
    config = configured(tiny, of_format(tiny, "text", request))
    assert (data.portion(config), data.loss_unit(config)) == ((64, "tokens"), " nats per token")
    assert data.loss_unit(changed(tiny)) == " nats per byte"
