"""Text from a stream of tokens."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jpipe_lm.data import tokenizer
from jpipe_lm.generate import token_text
from jpipe_lm.generate.token_text import Stream

TEXT = "naïve  – 🙂🙃 日本\n end"


def byte_tokenizer(tmp_path) -> token_text.Conversion:
    return token_text.of_bytes()


def byte_level(tmp_path) -> token_text.Conversion:
    """Build a tokenizer like GPT-2's, with tokens of one byte and of two bytes from different characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first, second = (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("🙂🙃")[0][0][i] for i in (3, 4))
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, first + second])}, [(first, second)]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    return loaded(tokenizer, tmp_path)


def with_fallback(tmp_path) -> token_text.Conversion:
    """Build a tokenizer like Llama 2's: spaces are ▁, dropped at the start, and unknown characters are bytes."""
    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "n", "a", "v", "e", "d", "–"]
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(known)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return loaded(tokenizer, tmp_path)


def loaded(library_tokenizer: tokenizers.Tokenizer, tmp_path) -> token_text.Conversion:
    library_tokenizer.save(str(tmp_path / "tokenizer.json"))
    return token_text.of_tokenizer(tokenizer.load(tmp_path / "tokenizer.json", "--tokenizer"))


@pytest.mark.parametrize("kind", [byte_tokenizer, byte_level, with_fallback])
@pytest.mark.parametrize("start", [0, 3, 8])
def test_text_comes_piece_by_piece_and_characters_whole(kind, start, tmp_path):
    tokenizer = kind(tmp_path)
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    assert len(tokens) > 20
    before = next(n for n in range(len(tokens)) if tokenizer.decode(tokens[:n]) == TEXT[:start])
    stream = Stream(tokenizer.decode, tokens[:before])
    pieces = [stream.add(token) for token in tokens[before:]]
    assert "".join(pieces) == TEXT[start:]
    assert stream.remainder() == ""
    assert max(map(len, pieces)) <= 2  # nothing waits that need not


def test_bytes_that_are_not_text_become_replacement_characters_by_the_end():
    tokens = [*b"a\xff\xff\xff\xff\xffb\xf0\x9f\x99"]
    stream = Stream(token_text.of_bytes().decode, [])
    pieces = [stream.add(token) for token in tokens]
    assert "".join(pieces) == "a" + 5 * "\ufffd" + "b"
    assert stream.remainder() == "\ufffd"


def test_the_last_token_of_a_long_prompt_matters_and_the_first_does_not(tmp_path):
    tokenizer = with_fallback(tmp_path)
    stream = Stream(tokenizer.decode, tokenizer.encode(TEXT * 9))
    assert stream.add(tokenizer.encode("d")[0]) == " "
