"""Documents in shards, windows and packed examples equal a direct computation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe import InputError
from jpipe_lm.data.documents import Documents, Shard
from jpipe_lm.data.windows import Examples, Windows


def sharded(shards: list[list[int]]) -> tuple[Documents, list[int]]:
    """Return documents of these lengths by shard, their tokens counted from 0, and the document of each token."""
    parts, number, owners, at = [], 0, [], 0
    for i, lengths in enumerate(shards):
        tokens = np.arange(at, at + sum(lengths), dtype=np.uint16)
        ends = np.cumsum(lengths).astype(np.uint64)
        parts.append(Shard(f"shard {i}", tokens.size, lambda tokens=tokens: tokens, lambda ends=ends: ends))
        for length in lengths:
            owners += [number] * length
            number += 1
        at += tokens.size
    return Documents(parts, 2**16), owners


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(1, 12))
def test_windows_know_which_document_each_token_is_in(shards, seq_len):
    documents, owners = sharded(shards)
    windows, apart = Windows(documents, seq_len), Windows(documents, seq_len, apart=True)
    shorter = 1 < len(owners) <= seq_len  # it is padded
    assert len(windows) == len(apart) == (1 if shorter else (len(owners) - 1) // seq_len)
    if shorter:
        tokens, labels = windows[0]
        unused = seq_len + 1 - len(owners)
        assert tokens.tolist() == [*range(len(owners) - 1), *[0] * unused]
        assert labels.tolist() == [*range(1, len(owners)), *[-1] * unused]
        inputs, targets = apart[0]
        assert inputs["segments"].tolist() == [owner + 1 for owner in owners[:-1]] + [0] * unused
        assert targets.tolist()[: -unused or None] == [p if owners[p] == owners[p - 1] else -1 for p in range(1, len(owners))]
        return
    for i in range(len(windows)):
        start = i * seq_len
        tokens, labels = windows[i]
        assert tokens.tolist() == list(range(start, start + seq_len))
        assert labels.tolist() == list(range(start + 1, start + seq_len + 1))
        inputs, targets = apart[i]
        assert inputs["tokens"].tolist() == tokens.tolist()
        window_owners = owners[start : start + seq_len]
        assert inputs["segments"].tolist() == [owner - window_owners[0] + 1 for owner in window_owners]
        follows = [owners[p] == owners[p + 1] for p in range(start, start + seq_len)]
        assert targets.tolist() == [p + 1 if same else -1 for p, same in zip(range(start, start + seq_len), follows, strict=True)]


def packed(lengths: list[int], prompts: list[int], seq_len: int, *, cut: bool = False) -> Examples:
    tokens, ends = np.arange(sum(lengths), dtype=np.uint16), np.cumsum(lengths)
    answers = ends - lengths + np.asarray(prompts)
    return Examples(Documents.of(tokens, 2**16, ends, answers), seq_len, cut=cut)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(2, 9), st.integers(0, 8)), min_size=1, max_size=20), st.integers(8, 20))
def test_examples_are_packed_whole_in_their_order_and_answers_alone_are_learned(drawn, seq_len):
    lengths, prompts = [length for length, _ in drawn], [min(prompt, length - 1) for length, prompt in drawn]
    rows = packed(lengths, prompts, seq_len)
    expected, row, start = [], [], 0
    for length, prompt in zip(lengths, prompts, strict=True):  # next fit
        if sum(len(tokens) for tokens, _ in row) + length - 1 > seq_len:
            expected.append(row)
            row = []
        whole = list(range(start, start + length))
        row.append((whole[:-1], [token if token - start >= max(prompt, 1) else -1 for token in whole[1:]]))
        start += length
    expected.append(row)
    assert len(rows) == len(expected)
    for i, row in enumerate(expected):
        inputs, labels = rows[i]
        padding = seq_len - sum(len(tokens) for tokens, _ in row)
        assert inputs["tokens"].tolist() == [token for tokens, _ in row for token in tokens] + [0] * padding
        assert inputs["segments"].tolist() == [k for k, (tokens, _) in enumerate(row, 1) for _ in tokens] + [0] * padding
        assert labels.tolist() == [label for _, example_labels in row for label in example_labels] + [-1] * padding


def test_examples_that_are_too_long_are_refused_or_cut():
    lengths, prompts = [4, 12, 12], [2, 3, 9]
    with pytest.raises(
        InputError,
        match=r"data\.path: example 1: expected at most 9 tokens \(model\.seq_len 8, plus one\), found 12, and more in 1 other; sh",
    ):
        packed(lengths, prompts, 8)
    rows = packed(lengths, prompts, 8, cut=True)
    assert (len(rows), rows.left_out) == (2, 1)  # the prompt of the last alone is longer than a row
    inputs, labels = rows[1]
    assert inputs["tokens"].tolist() == list(range(4, 12))
    assert labels.tolist() == [-1, -1, *range(7, 13)]


def test_tokens_out_of_range_and_ends_that_do_not_rise_are_named():
    tokens = np.asarray([1, 2, 9, 4, 5, 6], np.uint16)
    with pytest.raises(InputError, match=r"every token of the text to be from 0 to 8, found 9 at 2; write the file again"):
        Documents.of(tokens, 9).read(1, 4)
    shards = [Shard(name, 3, lambda: np.zeros(3, np.uint16)) for name in ("'a.bin'", "'b.bin'")]
    shards[1] = Shard("'b.bin'", 3, lambda: np.full(3, 5, np.uint16))
    with pytest.raises(InputError, match=r"every token of 'b\.bin' to be from 0 to 4, found 5 at 0"):
        Documents(shards, 5).read(2, 5)
    for ends in ([2, 2, 6], [4, 2, 6]):
        wrong = Documents.of(tokens, 10, np.asarray(ends, np.uint64), np.asarray([0, 2, 4], np.uint64))
        with pytest.raises(InputError, match="expected ascending ends of documents inside the text"):
            wrong.examples()
        with pytest.raises(InputError, match="expected ascending ends of documents inside the text"):
            wrong.begins(0, 6)
