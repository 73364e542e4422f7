"""Read pairs from rows of files: a prompt, a chosen and a rejected answer, each a text or a list of messages."""

import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jpipe import InputError
from jpipe_lm.config.data_config import DataConfig
from jpipe_lm.config.sections import data_of
from jpipe_lm.data import document_rows, splits
from jpipe_lm.data import tokenizer as tokenizers
from jpipe_lm.data.chat import read_chat, template
from jpipe_lm.data.chat.conversations import Conversation, conversation
from jpipe_lm.data.chat.renderer import TRAINING_TIME, Rendered, Renderer
from jpipe_lm.data.chat.tokens import tokenized
from jpipe_lm.preferences.pairs import Answer, PairRows
from jpipe_train.config.config import Config
from jpipe_train.console.terminal import count
from jpipe_train.data import sources
from jpipe_train.data.data import Examples
from jpipe_train.data.files.arrow import Column
from jpipe_train.data.files.records import Row, records
from jpipe_train.data.files.wrong_lines import Place, WrongLine, WrongLines, text_of, value_of

_AT_ONCE = 1000  # pairs that are tokenized together
_WITHOUT_REFERENCE = "simpo", "orpo"


class _Texts(NamedTuple):
    """The prompt of a pair, and its two texts: (prompt, answer) or a rendered conversation."""

    prompt: bytes
    both: tuple[tuple[str, str] | Rendered, ...]


def read(config: Config, path: str | None = None) -> Examples:
    """Read the pairs that `config.data` names. Pairs with equal prompts are all for training, or all for validation.

    Args:
        config: the config of the run.
        path: the path of other pairs; all of them are for validation.

    Raises:
        InputError: pairs cannot be read, or are too long; or the tokenizer has more tokens than the model's vocabulary.
    """
    data = data_of(config)
    splits.check_beside_weights(config)
    tokenizer = tokenizers.load(str(data.tokenizer), "data.tokenizer", data.end_of_text)
    document_rows.check_vocabulary(config, tokenizer.vocab_size)
    pairs: dict[bool, list[tuple[Answer, ...]]] = {False: [], True: []}
    left_out = 0
    with contextlib.ExitStack() as stack:
        renderer = functools.cache(lambda: stack.enter_context(Renderer(template.find(tokenizer, data.chat_template), TRAINING_TIME)))
        for file, share, where in sources.parts_of(data, path):
            with sources.readable(where):
                _, files = sources.find_files(file, where)
                wrong, too_long = WrongLines(where), WrongLines(where, "raise model.seq_len, or cut such answers with data.too_long: cut")
                convert = functools.partial(_texts, data, renderer, wrong)
                rows = records(files, wrong, _columns(data), convert, lambda texts: texts.prompt, share)
                for row, answers in _tokenized(rows, tokenizer):
                    kept = _fitting(answers, config, row.place, wrong, too_long)
                    left_out += not kept
                    pairs[row.held_out] += [kept] if kept else []
                wrong.check()
                too_long.check()
    if left_out and not any(pairs.values()):
        raise InputError(
            where="data.path",
            expected=f"prompts shorter than the {config.model.seq_len} positions of a row (model.seq_len)",
            found=f"that none of the {count(left_out, 'pair')} leaves room for both answers",
            change="raise model.seq_len",
        )
    train, validation = (_rows(part, config, tokenizer) for part in pairs.values())

    def digest() -> str:
        return hashlib.sha256(" ".join([tokenizer.sha256, train.digest(), validation.digest()]).encode()).hexdigest()

    remarks = (f"{count(left_out, 'pair')} left out, because the prompt leaves no room for both answers",) if left_out else ()
    left = sources.left_out_of(data, path)
    unfinished = tuple(part for part in (train, validation) if part.reference is not None and len(part))
    return Examples(train, validation, sources.named(path or data.path), digest, (*remarks, *left), unfinished=unfinished)


def _columns(data: DataConfig) -> list[Column]:
    """Return the columns to read; a conversation needs no prompt of its own."""
    chosen, rejected = Column(data.chosen_key, "chosen_key"), Column(data.rejected_key, "rejected_key")
    return [chosen, rejected, Column(data.prompt_key, "prompt_key", is_needed=False), Column("tools", is_needed=False)]


def _texts(data: DataConfig, renderer: Callable[[], Renderer], wrong: WrongLines, record: Mapping[str, Any]) -> _Texts:
    """Return the texts of a row.

    Raise WrongLine if the row is not a pair.
    """
    keys, prompt = (data.chosen_key, data.rejected_key), record.get(data.prompt_key)
    answers = [value_of(record, key) for key in keys]
    if any(isinstance(answer, list) for answer in answers):
        both = [_conversation(prompt, answer, key, record.get("tools")) for key, answer in zip(keys, answers, strict=True)]
        if both[0].messages[:-1] != both[1].messages[:-1]:
            raise WrongLine(f"expected the same messages before the last one in {keys[0]!r} and {keys[1]!r}, found different ones")
        before = json.dumps(both[0].messages[:-1], sort_keys=True)
        return _Texts(before.encode(), tuple(read_chat.rendered(each, renderer(), wrong)[-1] for each in both))
    before = text_of(value_of(record, data.prompt_key), data.prompt_key)
    for key, answer in zip(keys, answers, strict=True):
        if not text_of(answer, key):
            raise WrongLine(f"expected an answer in {key!r}, found an empty text")
    return _Texts(before.encode(), tuple((before, answer) for answer in answers))


def _conversation(prompt: Any, answer: Any, key: str, tools: Any) -> Conversation:
    """Return the conversation that ends with an answer. Its beginning is in the prompt, as messages or as a text, or before the answer.

    Raise WrongLine if it is not a conversation, or does not end with an answer of the assistant.
    """
    if not isinstance(answer, list):
        raise WrongLine(f"expected a list of messages in {key!r}, as in the other answer, found {type(answer).__name__}")
    is_whole = bool(answer) and isinstance(answer[0], dict) and answer[0].get("role") != "assistant"
    before = prompt if isinstance(prompt, list) else [] if prompt is None or is_whole else [{"role": "user", "content": prompt}]
    found = conversation({"messages": [*before, *answer], "tools": tools})
    if found.messages[-1]["role"] != "assistant" or len(found.messages) < 2:
        raise WrongLine(
            f"expected a prompt, and a message of the assistant at the end of {key!r}, found the role {found.messages[-1]['role']}"
        )
    return found


def _tokenized(rows: Iterable[Row[_Texts]], tokenizer: tokenizers.Tokenizer) -> Iterator[tuple[Row[_Texts], tuple[Answer, ...]]]:
    """Yield each row with its two answers as tokens."""
    for batch in tokenizers.batched(rows, lambda row: 1, _AT_ONCE):
        answers = _answers([text for row in batch for text in row.value.both], tokenizer)
        yield from ((row, tuple(itertools.islice(answers, 2))) for row in batch)


def _answers(texts: Sequence[tuple[str, str] | Rendered], tokenizer: tokenizers.Tokenizer) -> Iterator[Answer]:
    """Yield the tokens of texts: of conversations by `data.chat`, of a prompt and its answer as with `data.format: prompts`."""
    plain = [text for text in texts if not isinstance(text, Rendered)]
    parts = iter(tokenizer.encoded([part for text in plain for part in text], [on for prompt, _ in plain for on in (False, prompt != "")]))
    chats = iter(tokenized([text for text in texts if isinstance(text, Rendered)], tokenizer))
    begin, end = (np.asarray(ids, np.uint32) for ids in (tokenizer.begin, () if tokenizer.end is None else (tokenizer.end,)))
    for text in texts:
        if isinstance(text, Rendered):
            found = next(chats)
            yield Answer(found.tokens, *(found.answers[-1] if len(found.answers) == len(text.answers) > 0 else (0, 0)))
        else:
            prompt, answer = next(parts), next(parts)
            whole = np.concatenate([begin, prompt, answer, end])
            yield Answer(whole, begin.size + prompt.size, whole.size if answer.size else 0)


def _fitting(answers: tuple[Answer, ...], config: Config, place: Place, wrong: WrongLines, too_long: WrongLines) -> tuple[Answer, ...]:
    """Return both answers of a pair, cut to the length of a row if the config says so; () if nothing of one of them is left."""
    most, cuts = config.model.seq_len + 1, data_of(config).too_long == "cut"
    for whole, start, stop in answers:
        if max(start, 1) >= stop:  # the first token of a row is no label
            wrong.add(place, WrongLine("expected two answers with tokens after a prompt, found an answer without one"))
        elif whole.size > most and not cuts:
            too_long.add(place, WrongLine(f"expected at most {most} tokens (model.seq_len, plus one), found {whole.size}"))
    kept = tuple(Answer(whole[:most], max(start, 1), min(stop, most)) for whole, start, stop in answers)
    return kept if all(each.start < each.stop for each in kept) else ()


def _rows(pairs: Sequence[Any], config: Config, tokenizer: tokenizers.Tokenizer) -> PairRows:
    """Return pairs as rows. Without a reference NaN stands for its log-probabilities, so that none can be forgotten."""
    reference = None if config.loss_name in _WITHOUT_REFERENCE else np.full((len(pairs), 2), np.nan, np.float32)
    return PairRows(pairs, config.model.seq_len, tokenizer.padding or 0, reference)
