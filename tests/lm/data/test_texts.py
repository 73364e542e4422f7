"""Tokenizers are read within limits; texts are split and joined to documents without changes."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library

from jpipe import InputError
from jpipe_lm.data import document_files, texts
from jpipe_lm.data import tokenizer as tokenizers
from jpipe_lm.data.document_files import Assembler, Files
from jpipe_lm.data.texts import Keys, Piece
from jpipe_train.data.files import wrong_lines
from jpipe_train.data.files.wrong_lines import Place


def load(path, end_of_text="auto"):
    return tokenizers.load(str(path), "data.tokenizer", end_of_text)


def test_a_tokenizer_determines_the_vocabulary_size_and_the_end_of_text(tokenizer_files):
    decoder, bert = (load(tokenizer_files[kind]) for kind in ("decoder", "bert"))
    assert decoder.vocab_size == decoder.rules.get_vocab_size() <= 300
    assert (decoder.begin, decoder.end) == ((), decoder.id_of("<|endoftext|>"))
    assert (bert.begin, bert.end) == ((), bert.id_of("[SEP]"))
    assert load(tokenizer_files["decoder"], None).end is None
    assert load(tokenizer_files["bert"], "[PAD]").end == 0
    with pytest.raises(
        InputError, match=r"decoder\.json': expected a tokenizer with the token '<\|endof\|>', found none; did you mean '<\|end"
    ):
        load(tokenizer_files["decoder"], "<|endof|>")
    with pytest.raises(InputError, match=r"expected a tokenizer with the token \[MASK\] or <mask>, found none"):
        decoder.id_of("[MASK]", "<mask>")


def test_special_tokens_at_the_start_of_a_text_start_each_document(tokenizer, tmp_path):
    rules = library.Tokenizer.from_file(tokenizer)
    rules.add_special_tokens(["<|begin|>", "<|end|>"])
    begin, end = rules.token_to_id("<|begin|>"), rules.token_to_id("<|end|>")
    rules.post_processor = library.processors.TemplateProcessing("<|begin|> $A <|end|>", None, [("<|begin|>", begin), ("<|end|>", end)])
    rules.enable_truncation(3)
    rules.enable_padding(length=10)
    rules.save(str(tmp_path / "tokenizer.json"))
    loaded = load(tmp_path / "tokenizer.json")
    assert (loaded.begin, loaded.end) == ((begin,), end)
    (tokens,) = loaded.encoded(["the quick brown fox"])
    assert loaded.rules.decode(tokens.tolist()) == "the quick brown fox"


def words_of(vocabulary: dict[str, int]) -> bytes:
    """Return a tokenizer.json of these words, written by hand because the library would count to the largest id."""
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": next(iter(vocabulary))}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model}).encode()


def test_a_tokenizer_lists_its_ids(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(words_of({"b": 7, "a": 2}))
    loaded = load(tmp_path / "tokenizer.json")
    assert (loaded.ids.tolist(), loaded.vocab_size) == ([2, 7], 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found one that fails: Expecting value"),
        (b"{}", "found one that fails: Cannot instantiate Tokenizer"),
        (b'{"model": {}, "model": {}}', "found one that fails: expected each key of an object once, found a key twice"),
        (b"\xff\xfe", "found one that fails: "),
        (b"[" * 10**6, "found one that fails: maximum recursion depth exceeded"),
        (b'{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}', "expected 1 to 16,777,216 tokens"),
        (words_of({"a": 0, "b": 2**31}), "expected ids below 16,777,216, found 2,147,483,648; give a tokenizer with smaller"),
        (None, "cannot read .*: it is larger than 128 MiB"),
    ],
    ids=["empty", "no keys", "twice", "bytes", "deep", "no tokens", "large id", "large"],
)
def test_a_file_that_is_not_a_tokenizer_is_refused(content, message, tmp_path):
    path = tmp_path / "tokenizer.json"
    if content is None:
        with open(path, "wb") as file:
            file.truncate(tokenizers.MOST_BYTES + 1)
    else:
        path.write_bytes(content)
    with pytest.raises(InputError, match=rf"^data\.tokenizer: .*{message}"):
        load(path)


def test_any_error_in_the_library_becomes_a_message(tokenizer, monkeypatch):
    class Panic(BaseException):
        pass

    class Broken:
        def encode_batch_fast(self, *_, **__):
            raise Panic("index out of bounds")

    loaded = load(tokenizer)
    with pytest.raises(InputError, match=r"cannot tokenize, found one that fails: it panics"):
        tokenizers.Tokenizer(Broken(), b"", loaded.where, (), None, loaded.path).encoded(["a"])


def test_a_long_text_is_split_where_the_tokenizer_splits_it(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "PIECE", 40)
    monkeypatch.setattr(texts, "_BLOCK", 7)
    lines = [f"word{'s' * (i % 5)}; ünï\n" + ("    indented\n" if i % 3 == 0 else "") + ("\n\n" if i % 7 == 0 else "") for i in range(200)]
    text = "".join(lines)
    (tmp_path / "a").write_text(text)
    pieces = list(texts.pieces(["a"], [tmp_path / "a"], "text", 0.0, Keys(), "data.path"))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum(piece.size for piece in pieces) == len(text.encode())
    assert len(pieces) > 30
    loaded = load(tokenizer)
    parts = [tokens for _, tokens in texts.tokenized(pieces, loaded)]
    np.testing.assert_array_equal(np.concatenate(parts), loaded.encoded([text])[0])


def prefixing(kind: str) -> library.Tokenizer:
    """Return a tokenizer with a token for each letter, which puts a space before a text, as those of this kind do."""
    symbols = [*library.pre_tokenizers.ByteLevel.alphabet()] if kind == "bytes" else ["<unk>", "▁", *"\n ünïabdegiklmnorstuw;", "▁w", "▁i"]
    vocabulary = {symbol: i for i, symbol in enumerate([*symbols, "Ġw"] if kind == "bytes" else symbols)}
    merges = [("Ġ", "w")] if kind == "bytes" else [("▁", "w"), ("▁", "i")]
    rules = library.Tokenizer(library.models.BPE(vocabulary, merges, unk_token=None if kind == "bytes" else "<unk>"))
    parts = library.normalizers
    if kind == "prepend":
        rules.normalizer = parts.Sequence([parts.Prepend("▁"), parts.Replace(" ", "▁")])
    else:
        pre_tokenizers = library.pre_tokenizers
        rules.pre_tokenizer = (
            pre_tokenizers.ByteLevel(add_prefix_space=True) if kind == "bytes" else pre_tokenizers.Metaspace(prepend_scheme=kind)
        )
    return rules


@pytest.mark.parametrize("kind", ["prepend", "first", "always", "bytes"])
@pytest.mark.parametrize("line", ["word; ünï\n    indented\nwide\n", "word ünï wide "], ids=["lines", "words"])
def test_a_space_that_a_tokenizer_prepends_is_only_at_the_start_of_a_text(kind, line, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "PIECE", 40)
    prefixing(kind).save(str(tmp_path / "tokenizer.json"))
    loaded = load(tmp_path / "tokenizer.json")
    (tmp_path / "a").write_text(line * 30)
    pieces = list(texts.pieces(["a"], [tmp_path / "a"], "text", 0.0, Keys(), "data.path"))
    assert len(pieces) > 5
    parts = [tokens for _, tokens in texts.tokenized(pieces, loaded)]
    np.testing.assert_array_equal(np.concatenate(parts), loaded.encoded([line * 30])[0])
    (tmp_path / "p").write_text('{"prompt": "word:", "answer": "wide"}\n{"prompt": "", "answer": "wide"}')
    answers = [tokens.tolist() for _, tokens in texts.tokenized(texts.pieces(["p"], [tmp_path / "p"], "prompts", 0, Keys(), ""), loaded)]
    wide = loaded.encoded(["wide"])[0].tolist()
    assert answers[3] == wide
    assert answers[1] == [loaded.id_of("w"), *wide[1:]]


def test_a_text_without_lines_is_parted_between_words_or_anywhere(monkeypatch):
    monkeypatch.setattr(texts, "PIECE", 10)
    assert texts._good_end("a word or another, and more of them") == 18  # behind "another,"
    assert texts._good_end("x" * 50) == 20


def assembled(pieces: list[Piece], tokenizer: str, monkeypatch) -> tuple[Assembler, list[list[str]]]:
    """Return an assembler and the documents that it wrote, decoded to text."""
    loaded, done = load(tokenizer), []

    class Sink:
        under_way: list[int] = []  # noqa: RUF012 - replaced, never changed

        def add(self, tokens):
            self.under_way = [*self.under_way, *tokens.tolist()]

        def end(self, answers, place):
            words = loaded.rules.decode(self.under_way, skip_special_tokens=False)
            done.append(words if answers is None else (loaded.rules.decode(self.under_way[: answers[0][0]]), words))
            assert answers is None or answers[0][1] == len(self.under_way)
            self.under_way = []

    assembler = Assembler({False: Sink(), True: Sink()}, loaded.begin, loaded.end)
    monkeypatch.setattr(texts, "pieces", lambda *_: pieces)
    for tokens in document_files.read(Files(()), [], [], 0.0, "", loaded):
        assembler.add(tokens)
    return assembler, done


def text_piece(text: str, *, last: bool = True) -> Piece:
    return Piece(text, "text", last, False, Place(Path("a.txt")), len(text))


def test_each_document_ends_with_the_end_of_text_once(tokenizer, monkeypatch):
    end = "<|endoftext|>"
    pieces = [
        text_piece("one ", last=False),
        text_piece("more"),
        text_piece(""),
        text_piece(f"two{end}three{end}"),
        text_piece(f"{end}{end}"),
        text_piece("four"),
    ]
    assembler, documents = assembled(pieces, tokenizer, monkeypatch)
    assert documents == [f"one more{end}", f"two{end}", f"three{end}", f"four{end}"]
    assert (assembler.documents, assembler.empty) == (4, 2)
    assert next(assembler.remarks()) == "2 empty documents left out, the first is 'a.txt'"


def test_prompts_and_answers_are_one_document(tokenizer, tmp_path, monkeypatch):
    lines = [{"prompt": "2 + 2 = ", "answer": "4"}, {"prompt": "nothing", "answer": ""}, {"prompt": "", "answer": "all"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    pieces = list(texts.pieces(["a"], [tmp_path / "a.jsonl"], "prompts", 0.0, Keys(), "data.path"))
    assembler, documents = assembled(pieces, tokenizer, monkeypatch)
    assert documents == [("2 + 2 = ", "2 + 2 = 4<|endoftext|>"), ("", "all<|endoftext|>")]
    assert next(assembler.remarks()).endswith("a.jsonl', line 3")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"line 2: expected a JSON object, found '\{\\n': Expecting property name"),
        (b"[1]", r"line 2: expected a JSON object such as \{\"prompt\": …\}, found list"),
        (b'{"prompt": "x"}', r"line 2: expected the key 'answer', found \['prompt'\]; correct it, or name other keys"),
        (b'{"prompt": "x", "answer": 4}', r"line 2: expected text in 'answer', found int"),
        (b'{"prompt": "\xff", "answer": ""}', r"line 2: expected text in UTF-8, found the byte 0xff at 12"),
        (rb'{"prompt": "\ud800", "answer": ""}', r"line 2: expected characters in 'prompt', found half a character"),
        (b"[" * 10**5, r"line 2: expected a JSON object, found '\[+\.*'?"),
        (b'{"answer": "", "prompt": ' + b"9" * 5000 + b"}", r"line 2: expected a JSON object"),
    ],
    ids=["cut off", "list", "key", "type", "bytes", "surrogate", "deep", "number"],
)
def test_a_wrong_line_is_named(line, message, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "good", "answer": "line"}\n' + line + b"\n")
    with pytest.raises(InputError, match=rf"^data\.path: '{tmp_path}/a\.jsonl', {message}"):
        list(texts.pieces(["a"], [tmp_path / "a.jsonl"], "prompts", 0.0, Keys(), "data.path"))


def test_wrong_lines_are_counted_and_the_first_five_named(tmp_path):
    lines = [json.dumps({"prompt": "good", "answer": "line"}) if i % 2 else "{" for i in range(14)]
    for name in "ab":
        (tmp_path / name).write_text("\n".join(lines))
    pieces = texts.pieces(["a", "b"], [tmp_path / "a", tmp_path / "b"], "prompts", 0.0, Keys(), "data.path")
    with pytest.raises(InputError) as caught:
        list(pieces)
    message = str(caught.value)
    assert re.findall(r"/([ab])', line (\d+): expected a JSON object, found '", message) == [("a", str(line)) for line in (1, 3, 5, 7, 9)]
    assert message.startswith("data.path: 14 lines are wrong: '")
    assert message.endswith("; and 9 more; correct them, or name other keys")


def test_an_endless_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(wrong_lines, "LONGEST", 10)
    (tmp_path / "a.jsonl").write_bytes(b"x" * 12)
    with pytest.raises(InputError, match="line 1: expected at most 10 bytes, found more"):
        list(texts.pieces(["a"], [tmp_path / "a.jsonl"], "text", 0.0, Keys(), "data.path"))


@pytest.mark.parametrize("block", [2**20, 3])
def test_invalid_utf8_is_found(block, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "_BLOCK", block)
    (tmp_path / "a.txt").write_bytes("ünï".encode() + b"x\xfe")
    with pytest.raises(InputError, match=r"expected text in UTF-8 in '.*a\.txt', found the byte 0xfe at 6; convert the file"):
        list(texts.pieces(["a"], [tmp_path / "a.txt"], "text", 0.0, Keys(), "data.path"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x04]\x94(K\x00K\x01e.", "a pickle, which jpipe never loads"),
        (b"PK\x03\x04\xff", r"a zip archive \(PyTorch files are zip archives"),
        (b"FEA1\0\0\0\0\xff", "a Feather file of the first version"),
    ],
    ids=["pickle", "zip", "feather"],
)
def test_files_that_are_not_text_are_recognized(content, words, tmp_path):
    (tmp_path / "a").write_bytes(content)
    for form in ("text", "prompts"):
        with pytest.raises(InputError, match=rf"found the byte .* \(it seems to be {words}"):
            list(texts.pieces(["a"], [tmp_path / "a"], form, 0.0, Keys(), "data.path"))


@pytest.mark.parametrize("content", ["ab\ncd\nef\ngh\n", "ünïcödé" * 3], ids=["lines", "one line"])
def test_a_single_text_is_held_out_from_a_line_on(content, tmp_path):
    (tmp_path / "a.txt").write_text(content)
    train, held_out = texts.pieces(["a"], [tmp_path / "a.txt"], "text", 0.4, Keys(), "data.path")
    assert train.text + held_out.text == content
    assert (train.held_out, held_out.held_out) == (False, True)
    assert held_out.text
    assert train.text.endswith("\n") == ("\n" in content)


def test_which_json_lines_are_held_out_depends_on_their_text_only(tmp_path):
    lines = [json.dumps({"text": f"line {i}"}) for i in range(200)]

    def held_out(name: str, some: list[str]) -> set[str]:
        (tmp_path / name).write_text("\n".join(some))
        return {piece.text for piece in texts.pieces([name], [tmp_path / name], "text", 0.2, Keys(), "") if piece.held_out}

    selected = held_out("a", lines)
    assert 20 < len(selected) < 60
    assert held_out("b", lines[50:] + lines[:50]) == selected
    assert held_out("c", lines[:100]) == selected & {f"line {i}" for i in range(100)}


def declared(**parts) -> bytes:
    """Return a tokenizer.json with these parts."""
    return json.dumps(json.loads(words_of({"a": 0, "b": 1})) | parts).encode()


def chain(kind: str, name: str, steps: list) -> dict:
    return {kind: {"type": "Sequence", name: steps}}


def replace(pattern: str, content: str, kind: str = "String") -> dict:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def charsmap(text: str) -> dict:
    """Return the map of SentencePiece in which no trie leads to this text; the library reads it only where a text is tokenized."""
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + text.encode() + b"\0").decode()}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TWICE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2, "pair": [], "special_tokens": {}}
MANY = TWICE | {
    "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "b", "type_id": 0}}],
    "special_tokens": {"b": {"id": "b", "ids": [1] * 1001, "tokens": ["b"] * 1001}},
}
ADDED = {"id": 2, "content": "a" * 2**16, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
GROWTH = "to make at most 4,096 characters from one, found"
HOSTILE = {
    "issue": (chain("normalizer", "normalizers", [replace("a", "aa")] * 30), f"the normalizer and pre_tokenizer {GROWTH} up to 8,192"),
    "longer": (chain("normalizer", "normalizers", [replace("ab", "abb"), replace("b", "ab")] * 30), GROWTH),
    "expression": (chain("normalizer", "normalizers", [replace("(?=.)", "aa", "Regex")] * 30), GROWTH),
    "class": (chain("normalizer", "normalizers", [replace("[a-z]", "aa", "Regex")] * 30), GROWTH),
    "begin": (chain("normalizer", "normalizers", [{"type": "Prepend", "prepend": "a" * 10**5}]), f"{GROWTH} up to 100,001"),
    "nested": (chain("normalizer", "normalizers", [chain("x", "normalizers", [replace("a", "a" * 200)] * 2)["x"]] * 2), GROWTH),
    "hidden": ({"normalizer": {"type": "Replace", "normalizers": []} | replace("a", "a" * 10**5)}, GROWTH),
    "bytes": (chain("normalizer", "normalizers", [{"type": "ByteLevel"}] * 30), GROWTH),
    "unicode": (chain("normalizer", "normalizers", [replace("a", "\ufdfa"), {"type": "NFKD"}] * 30), GROWTH),
    "map": (chain("normalizer", "normalizers", [charsmap("x" * 10**5)]), GROWTH),
    "steps": (chain("normalizer", "normalizers", [{"type": "Lowercase"}] * 1001), "at most 1,000 steps of the normalizer, found more"),
    "words": (chain("pre_tokenizer", "pretokenizers", [BYTES] * 30), GROWTH),
    "both": (chain("pre_tokenizer", "pretokenizers", [BYTES] * 4) | {"normalizer": replace("a", "a" * 100)}, GROWTH),
    "decoder": (chain("decoder", "decoders", [replace("a", "aa")] * 30), f"the decoder {GROWTH}"),
    "template": (chain("post_processor", "processors", [TWICE] * 30), "each text once in single of the post_processor, found a text twice"),
    "around": (chain("post_processor", "processors", [MANY]), "at most 1,000 tokens around a text in single of the .*, found 1,001"),
    "added": (
        {"added_tokens": [ADDED], "normalizer": replace("a", "a" * 2000)},
        "added_tokens of at most 67,108,864 .*, found 131,072,000",
    ),
    "token": (words_of({"a": 0, "b" * 5000: 1}), "tokens of at most 4,096 characters, found one of 5,000"),
    "slow": ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+a?a+)+$"}, "behavior": "Isolated", "invert": False}}, "found"),
    "prefix": ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": "a" * 2000}}, "found 2,000"),
    "word": ({"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**6, "unk_token": "a"}}, "found 1,000,000"),
}


@pytest.mark.parametrize(("parts", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_tokenizer_that_makes_texts_much_longer_or_takes_long_is_refused(parts, message, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(parts if isinstance(parts, bytes) else declared(**parts))
    with pytest.raises(InputError, match=rf"^data\.tokenizer: .*: expected .*{message}.*"):
        load(tmp_path / "tokenizer.json")


N = library.normalizers
USUAL = {  # as well-known models have them
    "albert": N.Sequence([N.Replace("``", '"'), N.Replace("''", '"'), N.NFKD(), N.StripAccents(), N.Lowercase()]),
    "bert": N.BertNormalizer(),
    "clip": N.Sequence([N.NFC(), N.Replace(library.Regex(r"\s+"), " "), N.Lowercase()]),
    "llama": N.Sequence([N.Prepend("\u2581"), N.Replace(" ", "\u2581")]),
    "signs": N.Sequence([N.Replace(chr(0x2010 + i), "...") for i in range(40)] + [N.Replace(library.Regex(r"[a-z]{2,}|\s\s+"), "ab")] * 40),
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_normalizers_and_expressions_are_read(name, tmp_path):
    rules = library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a"))
    rules.normalizer = USUAL[name]
    expression = library.Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    rules.pre_tokenizer = library.pre_tokenizers.Sequence(
        [library.pre_tokenizers.Split(expression, "isolated"), library.pre_tokenizers.ByteLevel()]
    )
    rules.save(str(tmp_path / "tokenizer.json"))
    load(tmp_path / "tokenizer.json")
