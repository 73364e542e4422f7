"""Write text as a folder of token files (`jpipe data prepare`), and make a tokenizer from text (`jpipe data tokenizer`)."""

import contextlib
import hashlib
import json
import shlex
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

import numpy as np

from jpipe import InputError
from jpipe.errors import shortened
from jpipe.files import create, new_folder, unused, write_atomically, writing
from jpipe_lm.data import document_files, texts
from jpipe_lm.data import tokenizer as tokenizers
from jpipe_lm.data.chat import read_chat, template
from jpipe_lm.data.chat.conversations import conversation
from jpipe_lm.data.chat.renderer import TRAINING_TIME, Renderer
from jpipe_lm.data.chat.tokens import end_of_turn
from jpipe_lm.data.document_files import Answers, Assembler, Files, Tokens
from jpipe_lm.data.files import token_files
from jpipe_lm.data.files.token_files import Index, ShardFacts
from jpipe_lm.data.prepare_request import PrepareRequest
from jpipe_train.console import interrupt
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count, first_line
from jpipe_train.data import sources
from jpipe_train.data.files import kinds
from jpipe_train.data.files.records import records
from jpipe_train.data.files.wrong_lines import Place, WrongLines, check_characters

SPECIAL = {"decoder": ("<|endoftext|>",), "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")}
"""The special tokens of a new tokenizer, for each kind of model."""
_BYTES = 256
_Piece = TypeVar("_Piece", texts.Piece, Tokens)


def prepare(request: PrepareRequest, reporter: Reporter) -> Index:
    """Tokenize files into a new folder, completely or not at all, and return the content of its tokens.json.

    Raise InputError if a file cannot be read or written, or has wrong content.
    """
    if not 0 <= (fraction := request.validation_fraction) < 1:
        raise InputError(f"--validation-fraction: expected a number from 0 to less than 1, found {fraction}; 0 means no validation data")
    if (size := request.shard_tokens) < 1:
        raise InputError(where="--shard-tokens", expected="at least 1", found=size, change="the default is a hundred million")
    text_key = None if request.text_key == "none" else request.text_key
    keys = texts.Keys(text_key, request.prompt_key, request.answer_key, request.tokens_key)
    files = Files(request.source, request.form, keys, request.chat_template)
    target, out = unused(request.out, "--out"), request.out
    loaded = tokenizers.load(request.tokenizer, "--tokenizer", None if request.end_of_text == "none" else request.end_of_text)
    with _interrupt_reported(out), new_folder(target, "--out") as place:
        index, assembler = _written(place, files, loaded, fraction, size, reporter)
    for line in assembler.remarks():
        reporter.say(line)
    for line in described(out, index):
        reporter.say(line)
    return index


def described(out: str, index: Index) -> list[str]:
    """Return lines about the content of a folder of tokens, and how to train on it."""
    shards = [*index.train, *index.validation]
    tokens = sum(shard.tokens for shard in shards)
    documents = sum(shard.documents or 0 for shard in shards)
    held_out = sum(shard.tokens for shard in index.validation)
    size = tokens * token_files.DTYPES[index.dtype].itemsize
    noun = {"text": "document", "prompts": "example", "chat": "conversation"}[index.kind]
    return [
        f"{out}: {_many(documents, noun)}, {_many(tokens, 'token')} ({held_out:,} for validation) of a vocabulary of {index.vocab_size:,}",
        f"{out}: {_many(len(shards), 'shard')} of {index.dtype}, {size:,} bytes of tokens from {index.text_bytes:,} bytes of files",
        f"train with it: jpipe train CONFIG --set data.format=tokens --set data.path={shlex.quote(out)} "
        f"--set model.vocab_size={index.vocab_size}",
    ]


def make_tokenizer(
    files: Files,
    vocab_size: int,
    out: str,
    reporter: Reporter,
    kind: Literal["decoder", "bert"] = "decoder",
    special: Sequence[str] = (),
) -> int:
    """Make a byte-level BPE tokenizer from files, write its tokenizer.json into the new file `out`, and return the number of tokens.

    This is `vocab_size`, or less if the text has too few pairs. The kind of model determines the special tokens; `special` are further
    ones, for example of a chat template. Raise InputError if a file cannot be read or written, or an argument is invalid.
    """
    all_special = list(dict.fromkeys([*SPECIAL[kind], *special]))
    if "" in all_special:
        raise InputError(where="--special", expected="a token such as '<|im_start|>'", found="an empty text", change="remove it")
    least = _BYTES + len(all_special)
    if not least <= vocab_size <= tokenizers.LARGEST_VOCABULARY:
        raise InputError(
            f"--vocab-size: expected {least} (the bytes and {count(len(all_special), 'special token')}) to "
            f"{tokenizers.LARGEST_VOCABULARY}, found {vocab_size}; choose a number in this range"
        )
    if files.form == "tokens":
        raise InputError(where="--format", expected="text, prompts or chat", found="tokens, which have no text", change="give text")
    target = unused(out, "--out")
    rules, trainer = _untrained(vocab_size, kind, all_special)
    with _interrupt_reported(out):
        found = _find(files, reporter)
        try:
            rules.train_from_iterator((piece.text for piece in _shown(_texts(files, found), found, reporter, "reading")), trainer=trainer)
        except InputError:
            raise
        except Exception as error:
            interrupt.check()
            raise InputError(f"data tokenizer: no tokenizer can be made of this text: {first_line(error)}; give other text") from None
        interrupt.check()
    with writing("--out", out):
        write_atomically(target, rules.to_str(pretty=True))
    size = int(rules.get_vocab_size(with_added_tokens=True))
    fewer = "" if size == vocab_size else f", not {vocab_size:,}: the text has no more pairs"
    reporter.say(f"{out}: {size:,} tokens{fewer}")
    return size


def _untrained(vocab_size: int, kind: str, special: list[str]) -> tuple[Any, Any]:
    """Create a byte-level BPE and its trainer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    if kind == "bert":
        around = [(name, special.index(name)) for name in ("[CLS]", "[SEP]")]  # special tokens come first, in their order
        rules.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", around)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return rules, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)


def _written(
    place: Path, files: Files, tokenizer: tokenizers.Tokenizer, validation_fraction: float, shard_tokens: int, reporter: Reporter
) -> tuple[Index, Assembler]:
    """Write all shards and the index into the folder `place`."""
    small = tokenizer.vocab_size <= 2**16
    dtype: Literal["uint16", "uint32"] = "uint16" if small else "uint32"
    shards = [_Shards(place, part, token_files.DTYPES[dtype], shard_tokens, files.kind) for part in ("train", "validation")]
    assembler = Assembler({False: shards[0], True: shards[1]}, tokenizer.begin, tokenizer.end)
    found, end, size = _find(files, reporter), tokenizer.end, 0
    share = 0.0 if found.held_out else validation_fraction
    read = document_files.read(files, found.names, found.paths, share, "SOURCE", tokenizer)
    for tokens in _shown(read, found, reporter, "reading" if files.form == "tokens" else "tokenizing"):
        assembler.add(tokens._replace(held_out=tokens.held_out or tokens.place.file in found.held_out))
        size += tokens.size
    if files.form == "chat":
        chosen = template.find(tokenizer, files.chat_template, "--chat-template")
        with Renderer(chosen, TRAINING_TIME) as renderer:
            end = next(iter(end_of_turn(renderer, tokenizer)[0]), end)
        write_atomically(place / template.SETTINGS, json.dumps(chosen.settings, indent=1) + "\n")
    source = found.source
    for part in shards:
        part.close()
    if not shards[0].facts or (validation_fraction and not shards[1].facts):
        what = "training" if not shards[0].facts else "validation"
        raise InputError(
            f"data prepare: expected documents for training and for validation, found {_many(assembler.documents, 'document')} in "
            f"{source}, none for {what}; give more text, or change --validation-fraction"
        )
    index = Index(
        format="jpipe-tokens/1",
        kind=files.kind,
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        end_of_text=end,
        tokenizer_sha256=tokenizer.sha256,
        source=source[:10_000].encode(errors="replace").decode(),
        text_bytes=size,
        train=shards[0].facts,
        validation=shards[1].facts,
    )
    write_atomically(place / tokenizers.FILE, tokenizer.content)
    write_atomically(place / token_files.INDEX, index.model_dump_json(indent=1) + "\n")
    return index, assembler


class _Found(NamedTuple):
    """The files to read: their names and paths, a phrase about their source, and the files that are only for validation."""

    names: list[str]
    paths: list[Path]
    source: str
    held_out: frozenset[Path]

    @property
    def size(self) -> int:
        """The total size in bytes."""
        return sum(path.stat().st_size for path in self.paths)


class _Shards:
    """A sink that writes the shards of one part (training or validation)."""

    def __init__(self, folder: Path, part: str, dtype: np.dtype[Any], most: int, kind: Literal["text", "prompts", "chat"]) -> None:
        self.facts: list[ShardFacts] = []
        self._folder, self._part, self._dtype, self._most, self._kind = folder, part, dtype, most, kind
        self._file: BinaryIO | None = None

    @property
    def _name(self) -> str:
        return f"{self._part}-{len(self.facts):05d}"

    def add(self, tokens: np.ndarray) -> None:
        if self._file is None:
            self._file = create(self._folder / f"{self._name}.bin")
            self._hash, self._size = hashlib.sha256(), 0
            self._ends, self._answers, self._answer_ends = (array("Q") for _ in range(3))
        content = tokens.astype(self._dtype).tobytes()
        self._file.write(content)
        self._hash.update(content)
        self._size += tokens.size

    def end(self, answers: Answers | None, place: Place) -> None:
        begin = self._ends[-1] if self._ends else 0
        self._answers.extend(begin + first for first, _ in answers or ())
        self._answer_ends.extend(begin + stop for _, stop in answers or ())
        self._ends.append(self._size)
        if self._size >= self._most:
            self.close()

    def close(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self._file = None
        for ending, numbers in ((".ends", self._ends), (".answers", self._answers), (".answer_ends", self._answer_ends)):
            if numbers and (ending != ".answer_ends" or self._kind == "chat"):
                content = np.frombuffer(numbers, np.uint64).astype(token_files.POSITIONS)
                write_atomically(self._folder / f"{self._name}{ending}", content.tobytes())
        answers = len(self._answers) if self._kind == "chat" else None
        hashed = self._hash.hexdigest()
        self.facts.append(ShardFacts(name=self._name, tokens=self._size, documents=len(self._ends), answers=answers, sha256=hashed))


def _texts(files: Files, found: _Found) -> Iterator[texts.Piece]:
    """Yield the text of all files in pieces. The text of a conversation is the contents of its messages, without a template."""
    if files.form != "chat":
        yield from texts.pieces(found.names, found.paths, "prompts" if files.form == "prompts" else "text", 0.0, files.keys, "SOURCE")
        return
    wrong = WrongLines("SOURCE", "or remove it")
    for row in records(found.paths, wrong, read_chat.COLUMNS, _content, str.encode, 0.0):
        yield texts.Piece(row.value, "text", True, row.held_out, row.place, row.size)
    wrong.check()


def _content(record: Mapping[str, Any]) -> str:
    text = "\n".join(conversation(record).contents)
    check_characters(text)
    return text


def _find(files: Files, reporter: Reporter) -> _Found:
    """Find all files. The validation split of a saved `DatasetDict` is held out."""
    if files.form in ("chat", "tokens") and not files.paths:
        what = {"chat": "conversations", "tokens": "token ids"}[files.form]
        raise InputError(where="SOURCE", expected=f"files of {what} for --format {files.form}", found="none", change="name files")
    held_out: set[Path] = set()
    with sources.readable("SOURCE"):
        names, paths = [], []
        for source in files.paths or (None,):
            train, validation = sources.with_validation(source, "SOURCE")
            for part in (train, validation)[: 1 if validation is None else None]:
                more = sources.find_files(part, "SOURCE")
                names += more[0] if validation is None else [f"{Path(str(part)).name}/{name}" for name in more[0]]
                paths += more[1]
                if validation is not None and part == validation:
                    held_out.update(more[1])
                if files.form == "auto" and part is not None:
                    _check_kinds(more[1], files.keys)
        for line in sources.left_out(*files.paths):
            reporter.say(line)
        if len(files.paths) > 1:  # a single path is read as in a run
            names, paths, twice = _once(names, paths)
            if twice:
                reporter.say(f"SOURCE: {_many(twice, 'file')} found more than once; each is read once")
        if len(set(names)) < len(names):  # files in different folders have the same name
            names = [str(path) for path in paths]
    return _Found(names, paths, ", ".join(files.paths) or sources.named(None), frozenset(held_out))


def _check_kinds(paths: Sequence[Path], keys: texts.Keys) -> None:
    """Check that all files seem to be text, or rows with a text.

    Raise InputError if a file is of another kind; the message says what to do with it.
    """
    for path in paths:
        kind = kinds.kind_of(path, keys.text)
        rows = None if kind is None or keys.text is None else kinds.rows_in(path, keys.text)
        if kind is None or (rows is None and kind.is_unpacked and keys.text is not None):
            continue
        if rows is not None and (not rows.columns or keys.text in rows.columns):
            continue
        hint, columns = kind.hint if rows is None else "set --text-key", (rows or kind).columns
        if rows is not None and "messages" in columns:
            hint = "add --format chat"
        elif rows is not None and {keys.prompt, keys.answer} <= set(columns):
            hint = "add --format prompts"
        having = f" with {shortened(columns)[:100]}" if columns else ""
        raise InputError(
            f"SOURCE: expected text, found that '{path}' is {(rows or kind).name}{having}; {hint}, or "
            "--format text --text-key none to read it as text"
        )


def _once(names: Sequence[str], paths: Sequence[Path]) -> tuple[list[str], list[Path], int]:
    """List the name and path of each file once, under its first name; also return the number of files that had several names."""
    first: dict[tuple[int, int], tuple[str, Path]] = {}
    twice = set()
    for name, path in zip(names, paths, strict=True):
        facts = path.stat()
        file = facts.st_dev, facts.st_ino
        if first.setdefault(file, (name, path))[1] is not path:
            twice.add(file)
    return [name for name, _ in first.values()], [path for _, path in first.values()], len(twice)


def _shown(pieces: Iterable[_Piece], found: _Found, reporter: Reporter, words: str) -> Iterator[_Piece]:
    """Yield the pieces that are read from files, and show the progress."""
    with (
        reporter.reading(f"{words} {_many(len(found.paths), 'file')}", found.size) as advance,
        sources.readable("SOURCE"),  # only around reading, because errors in the use of pieces do not come from the files
    ):
        for piece in pieces:
            interrupt.check()
            yield piece
            advance(piece.size)


@contextlib.contextmanager
def _interrupt_reported(out: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; nothing is written to {out}") from None


def _many(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"
