"""Folders of tokens are written completely or not at all, and contain the tokenizer's tokens."""

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library

from jpipe import InputError
from jpipe_lm.data import prepare, texts
from jpipe_lm.data.document_files import Files
from jpipe_lm.data.files import token_files
from jpipe_lm.data.texts import Keys
from jpipe_lm.data.tokenizer import batched
from jpipe_train import cli
from tests.lm.data.conftest import SENTENCES, quiet
from tests.lm.data.prepared import prepare_files

ROOT = Path(__file__).parents[3]


def test_a_folder_holds_the_tokens_of_every_text(documents, tokenizer, tmp_path, capsys):
    out = tmp_path / "tokens"
    assert cli.main(["data", "prepare", str(documents), "--tokenizer", tokenizer, "--out", str(out), "--shard-tokens", "100"]) == 0
    folder, index = token_files.read_index(str(out), "data.path")
    rules = library.Tokenizer.from_file(tokenizer)
    end = rules.token_to_id("<|endoftext|>")
    every = [[*rules.encode(file.read_text()).ids, end] for file in sorted(documents.iterdir()) if file.stat().st_size]
    texts = []
    for part in (index.train, index.validation):
        read = token_files.documents(folder, index, part)
        ends = np.flatnonzero(read.begins(0, read.size)).tolist()
        texts += [read.read(a, b).tolist() for a, b in zip(ends, [*ends[1:], read.size], strict=True)]
    assert sorted(texts) == sorted(every)
    assert len(texts) == 58
    for shard in index.train[:-1]:
        assert shard.tokens >= 100 > shard.tokens - max(map(len, every))
    for shard in (*index.train, *index.validation):
        content = (out / f"{shard.name}.bin").read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (2 * shard.tokens, shard.sha256)
    assert (out / "tokenizer.json").read_bytes() == Path(tokenizer).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents", "tokens"]
    size = sum(file.stat().st_size for file in documents.iterdir())
    tokens, shards = sum(map(len, every)), len(index.train) + len(index.validation)
    printed = capsys.readouterr().out
    held_out = sum(shard.tokens for shard in index.validation)
    assert f"{out}: 58 documents, {tokens:,} tokens ({held_out:,} for validation) of a vocabulary of 300\n" in printed
    assert f"{out}: {shards} shards of uint16, {2 * tokens:,} bytes of tokens from {size:,} bytes of files\n" in printed
    assert f"2 empty documents left out, the first is '{documents}/07.txt'\n" in printed


def test_json_lines_of_texts_and_of_prompts_make_folders(tokenizer, tmp_path):
    lines = [{"q": f"question {i}?", "a": f"answer {i}"} for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rules = library.Tokenizer.from_file(tokenizer)
    for form in ("text", "prompts"):
        files = Files([str(tmp_path / "a.jsonl")], form, Keys("q", "q", "a"))
        index = prepare_files(files, tokenizer, str(tmp_path / form), quiet(), 0.3)
        assert sum(shard.documents for shard in (*index.train, *index.validation)) == 50
        read = token_files.documents(tmp_path / form, index, index.train)
        assert index.validation
        assert read.have_answers == (form == "prompts")
    starts, ends, answers, answer_ends = read.examples()
    assert answer_ends.tolist() == ends.tolist()
    for start, end, answer in zip(starts.tolist(), ends.tolist(), answers.tolist(), strict=True):
        prompt, reply = rules.decode(read.read(start, answer).tolist()), rules.decode(read.read(answer, end).tolist())
        assert {"q": prompt, "a": reply} in lines


def test_a_large_vocabulary_takes_four_bytes_a_token(tokenizer, tmp_path):
    content = json.loads(Path(tokenizer).read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 70_000, "content": "<|far|>"})
    content["model"]["vocab"]["<|far|>"] = 70_000
    (tmp_path / "large.json").write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("one <|far|> two\nand three\n")
    index = prepare_files(Files([str(tmp_path / "a.txt")]), str(tmp_path / "large.json"), str(tmp_path / "out"), quiet(), 0.0)
    assert (index.dtype, index.vocab_size, index.validation) == ("uint32", 70_001, [])
    assert 70_000 in token_files.documents(tmp_path / "out", index, index.train).read(0, 5)


@pytest.mark.parametrize("at", ["add", "close"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), InputError("line 3")])
def test_an_unfinished_folder_leaves_nothing(error, at, documents, tokenizer, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(prepare._Shards, at, fail)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whatever is raised
        prepare_files(Files([str(documents)]), tokenizer, str(tmp_path / "out"), quiet())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents"]
    if isinstance(error, OSError):
        assert "--out: cannot write" in str(caught.value)
        assert "No space left on device; choose another folder" in str(caught.value)
    elif isinstance(error, KeyboardInterrupt):
        assert str(caught.value) == f"interrupted; nothing is written to {tmp_path / 'out'}"
    else:
        assert caught.value is error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "{documents}"], r"--out: '.*documents' already exists; choose another name, or remove it first"),
        (["missing.txt"], r"SOURCE: 'missing\.txt' does not exist; give a file, a folder or a glob"),
        (["--validation-fraction", "1"], r"--validation-fraction: expected a number from 0 to less than 1, found 1\.0"),
        (["--shard-tokens", "0"], r"--shard-tokens: expected at least 1, found 0"),
        (["--tokenizer", "{documents}/00.txt"], r"--tokenizer: '.*00\.txt': expected a tokenizer\.json of the tokenizers library"),
        (["--end-of-text", "nope"], r"expected a tokenizer with the token 'nope', found none"),
        (
            ["{documents}/07.txt"],
            r"data prepare: expected documents for training and for validation, found 0 documents in .*, none for training",
        ),
        (["--format", "prompts", "{documents}/00.txt"], r"00\.txt', line 1: expected a JSON object"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_in_preparing_is_one_line(words, message, documents, tokenizer, tmp_path, capsys):
    words = [word.format(documents=documents) for word in words]
    options = {"--tokenizer": tokenizer, "--out": str(tmp_path / "new")}
    usual = [part for name, value in options.items() if name not in words for part in (name, value)]
    sources = [] if any(not word.startswith("--") for word in words[::2]) or "--format" in words else [str(documents)]
    assert cli.main(["data", "prepare", *words, *usual, *sources]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert re.search(message, printed), printed
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_is_trained_from_text(documents, tmp_path, capsys):
    out = tmp_path / "tokenizer.json"
    assert cli.main(["data", "tokenizer", str(documents), "--vocab-size", "270", "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"{out}: 270 tokens\n")
    rules = library.Tokenizer.from_file(str(out))
    for text in (*SENTENCES, "ünï ☃ \x00\n", " leading"):
        assert rules.decode(rules.encode(text).ids) == text
    assert len(rules.encode(SENTENCES[0]).ids) < len(SENTENCES[0])
    before = out.read_bytes()
    assert cli.main(["data", "tokenizer", str(documents), "--vocab-size", "270", "--out", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    out.unlink()
    assert cli.main(["data", "tokenizer", str(documents), "--vocab-size", "270", "--out", str(out)]) == 0
    assert out.read_bytes() == before
    assert cli.main(["data", "tokenizer", str(documents), "--vocab-size", "100", "--out", str(tmp_path / "b")]) == 2
    assert "--vocab-size: expected 257 (the bytes and 1 special token) to 16777216, found 100" in capsys.readouterr().err
    (documents / "x.txt").write_bytes(b"\xff")
    assert cli.main(["data", "tokenizer", str(documents), "--vocab-size", "270", "--out", str(tmp_path / "b")]) == 2
    assert "expected text in UTF-8" in capsys.readouterr().err


def test_a_tokenizer_of_conversations_reads_the_contents_of_messages(tmp_path, capsys):
    contents = ["abab " * 20, [{"type": "text", "text": "ab"}], None]
    messages = [{"role": "assistant", "content": content, "tool_calls": [{}]} for content in contents]
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 3)
    words = ["data", "tokenizer", str(tmp_path / "a.jsonl"), "--vocab-size", "300", "--out"]
    assert cli.main([*words, str(tmp_path / "a.json")]) == 2
    assert "add --format chat" in capsys.readouterr().err
    assert cli.main([*words, str(tmp_path / "a.json"), "--format", "chat"]) == 0
    vocabulary = library.Tokenizer.from_file(str(tmp_path / "a.json")).get_vocab()
    assert "ab" in vocabulary
    assert "role" not in vocabulary


def test_memory_does_not_grow_with_the_text(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "PIECE", 1000)
    monkeypatch.setattr(texts, "_BATCH", 4000)
    alive, most = 0, 0

    def counted(pieces, _):
        nonlocal alive, most
        for batch in batched(pieces, lambda piece: len(piece.text), texts._BATCH):
            alive = sum(len(piece.text) for piece in batch)
            most = max(most, alive)
            yield from ((piece, np.ones(5, np.uint32)) for piece in batch)

    monkeypatch.setattr(texts, "tokenized", counted)
    (tmp_path / "a.txt").write_text("some words\n" * 50_000)
    prepare_files(Files([str(tmp_path / "a.txt")]), tokenizer, str(tmp_path / "out"), quiet())
    assert most < 10_000


def test_sources_may_have_the_same_names_or_no_letters(tokenizer, tmp_path):
    paths = [str(tmp_path / name / "x.txt") for name in ("a", os.fsdecode(b"\xff"))]
    for path in paths:
        Path(path).parent.mkdir()
        Path(path).write_text("some words")
    index = prepare_files(Files(paths), tokenizer, str(tmp_path / "out"), quiet())
    assert [sum(shard.documents for shard in part) for part in (index.train, index.validation)] == [1, 1]
    assert index.source.endswith("/?/x.txt")


def test_a_file_in_several_sources_is_read_once(documents, tokenizer, tmp_path, capsys):
    os.symlink(documents / "00.txt", tmp_path / "link.txt")
    paths = [str(documents), str(documents / "0*.txt"), str(documents / "00.txt"), str(tmp_path / "link.txt")]
    assert cli.main(["data", "prepare", *paths, "--tokenizer", tokenizer, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "SOURCE: 10 files found more than once; each is read once\n" in printed
    assert "out: 58 documents" in printed


def test_a_folder_is_written_where_a_link_to_its_parent_leads(documents, tokenizer, tmp_path):
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "link")
    prepare_files(Files([str(documents)]), tokenizer, str(tmp_path / "link" / "out"), quiet())
    assert (tmp_path / "real" / "out" / "tokens.json").is_file()


def test_links_are_not_followed_when_a_folder_is_written(documents, tokenizer, tmp_path):
    os.symlink(tmp_path / "elsewhere", tmp_path / "out")
    with pytest.raises(InputError, match="already exists"):
        prepare_files(Files([str(documents)]), tokenizer, str(tmp_path / "out"), quiet())
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.exhaustive)],
    ids=["Ctrl-C", "killed"],
)
def test_a_process_that_ends_early_leaves_no_folder_that_looks_complete(number, code, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"some words, {i}\n" for i in range(10**6)))
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from jpipe_train import cli; sys.exit(cli.main())"
    )
    out = tmp_path / "out"
    command = [sys.executable, "-c", program, "data", "prepare", str(tmp_path / "a.txt"), "--tokenizer", tokenizer, "--out", str(out)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while not list(tmp_path.glob(".jpipe-*/train-00000.bin")):
                assert time.monotonic() < deadline
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.01)
            process.send_signal(number)
            printed, wrong = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, wrong) == (code, "")
    assert not out.exists()
    left = list(tmp_path.glob(".jpipe-*"))
    if number == signal.SIGINT:
        assert printed.endswith(f"interrupted; nothing is written to {out}\n")
        assert not left
    for folder in left:
        with pytest.raises(
            InputError, match=r"cannot read '.*tokens\.json': No such file or directory; give a folder that jpipe data prep"
        ):
            token_files.read_index(str(folder), "data.path")
