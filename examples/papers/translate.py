"""Translate sentences with a trained GNMT, always choosing the likeliest next token, and find BLEU.

`python -m examples.papers.translate RUN`: translations go to standard output, everything else to standard error.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import jpipe
from examples.papers.data import sentences, translation
from examples.papers.models.gnmt import gnmt
from jpipe import InputError
from jpipe.files import expanded, read_text, resolved
from jpipe_lm.data.tokenizer import Tokenizer
from jpipe_train.checkpoint.weights import SavedWeights, choose
from jpipe_train.config import config_file
from jpipe_train.console import interrupt
from jpipe_train.console.exit_codes import failed
from jpipe_train.console.options import Weights
from jpipe_train.console.terminal import count, printable

ROWS = 64  # sentences at a time
_MOST_BYTES = 2**30  # of a file of sentences
_FIRST_OF_TARGET = "decoder_embed"
MODEL, DATA = "examples.papers.models.gnmt:gnmt", "examples.papers.data.translation:load"  # the targets of runs that this translates with


@dataclass(frozen=True)
class Request:
    """The arguments of the command line.

    Attributes:
        run: the folder of the run.
        source: a file of sentences; None: those that the run is validated on.
        reference: a file with their translations, for BLEU; None: those that the run is validated on if `source` is None.
        step: of the checkpoint; None: the newest that is whole.
        weights: the newest, or their moving average.
    """

    run: str
    source: str | None = None
    reference: str | None = None
    step: int | None = None
    weights: Weights = "newest"


def translate(request: Request, write: Callable[[str], None], say: Callable[[str], None]) -> float | None:
    """Translate sentences with the checkpoint of a run.

    Args:
        request: the arguments of the command line.
        write: receives each translation, with a line break.
        say: receives each other message, a line.

    Returns:
        BLEU, from 0 to 100; None without references.

    Raises:
        InputError: the run does not exist, or is not one of GNMT on parallel text; a file cannot be read; sacrebleu is not installed but
            there are references; a sentence is empty or too long.
    """
    folder = resolved(request.run, "translate")
    checkpoint = choose(folder, request.step, "translate", say)
    config = config_file.load_resolved(folder / "config.yaml")
    if (config.model.target, config.data.target) != (MODEL, DATA):
        other = config.model.target or f"model.kind {config.model.kind}"
        raise InputError(f"translate: expected a run of model.target {MODEL} with data.target {DATA}, found {other}; give another run")
    folder_of_text = config.data.arguments["folder"]
    source_length, target_length = (config.data.arguments.get(name, 50) for name in ("source_length", "target_length"))
    tokenizer = translation.load_tokenizer(folder_of_text)
    lines, name, references = _texts(request, folder_of_text)
    bleu = None if references is None else _bleu()
    rows = _rows(source_length, tokenizer, lines, name)
    params = {name: np.asarray(array) for name, array in SavedWeights(checkpoint, request.weights).read().items()}
    stack = gnmt(**config.model.arguments)
    translations: list[str] = []
    decode = jax.jit(lambda params, row: greedy(stack, params, row, target_length, int(tokenizer.end or 0)))
    specs = stack.specs({**rows[0], "target": np.zeros((ROWS, target_length), np.int32)})
    params = {layer_id: _placed(layer_id, params, spec.params, stack) for layer_id, spec in specs.items()}
    for row in rows:
        interrupt.check()
        tokens = np.asarray(decode(params, row))
        for sentence in tokens[: len(lines) - len(translations)]:
            ends = np.flatnonzero(sentence == tokenizer.end)
            translations.append(tokenizer.decoded(sentence[: ends[0] if ends.size else None].tolist()).strip())
            write(f"{translations[-1]}\n")
    say(f"{request.run}, step {checkpoint.step}: {count(len(translations), 'sentence')} of {name}")
    if bleu is None:
        return None
    score = bleu(translations, references)
    say(f"BLEU {score:.2f}")
    return score


def greedy(stack: jpipe.LayerStack, params: Any, inputs: Any, length: int, end: int) -> Int[Array, "b t"]:
    """Translate a batch greedily, choosing the likeliest next token; the encoder runs once.

    Args:
        stack: a GNMT.
        params: by layer id, shared ones included.
        inputs: {"source" (b, s), "source_length" (b)}.
        length: tokens; what comes after the end of a sentence is ignored.
        end: the token that ends a sentence, and starts a translation.
    """
    cut = stack.ids.index(_FIRST_OF_TARGET)
    encoder, decoder = stack.ids[:cut], stack.ids[cut:]

    def applied(ids: Sequence[str], x: Any) -> Any:
        return stack.apply(ids, params, {layer_id: {} for layer_id in ids}, x, key=None, microbatch=None, train=False)[0]

    begun = jnp.full((inputs["source"].shape[0], length + 1), end, jnp.int32)
    stream = applied(encoder, {**inputs, "target": begun[:, :-1]})

    def further(t: Any, tokens: Any) -> Any:
        logits = jax.lax.dynamic_index_in_dim(applied(decoder, {**stream, "target": tokens[:, :-1]}), t, 1, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(tokens, logits.argmax(-1).astype(jnp.int32), t + 1, 1)

    return jax.lax.fori_loop(0, length, further, begun)[:, 1:]


def _texts(request: Request, folder: str) -> tuple[list[str], str, list[str] | None]:
    """Read the sentences to translate.

    Returns:
        The sentences, where they come from, and references or None.
    """
    references: list[str] | None = None
    if request.source is None:
        name = "validation.source"
        lines, references = sentences.lines_of(folder, name), sentences.lines_of(folder, "validation.target")
    else:
        lines, name = _lines(request.source, "--source"), request.source
    if request.reference is not None:
        references = _lines(request.reference, "--reference")
    if references is not None and len(references) != len(lines):
        raise InputError(f"--reference: expected {len(lines):,} lines, as many as sentences in '{name}', found {len(references):,}")
    if not lines:
        raise InputError(f"--source: expected sentences in '{name}', found none; give a file with one to a line")
    return lines, name, references


def _lines(path: str, option: str) -> list[str]:
    text = read_text(
        expanded(path, option),
        _MOST_BYTES,
        f"{option}: cannot read '{path}'",
        "give a file with a sentence to a line",
        f"{option}: expected text in UTF-8 in '{path}', found other bytes",
    )
    return [line.strip() for line in text.removesuffix("\n").split("\n")] if text else []


def _bleu() -> Callable[[list[str], Any], float]:
    """Return the function that computes BLEU.

    Raises:
        InputError: the library for it is not installed.
    """
    try:
        import sacrebleu
    except ImportError:
        raise InputError(
            "translate: BLEU is found by sacrebleu, which is not installed; pip install sacrebleu, or give --source without --reference"
        ) from None
    return lambda translations, references: float(sacrebleu.corpus_bleu(translations, [references]).score)


def _rows(length: int, tokenizer: Tokenizer, lines: list[str], name: str) -> list[dict[str, np.ndarray]]:
    """Batch the sentences by `ROWS` rows; the last batch is filled up with its last sentence."""
    tokens = [each.astype(np.int32) for each in tokenizer.encoded(lines)]
    sentences.usable([np.asarray([each.size for each in tokens])], [length], [name], "refuse")
    assert tokenizer.end is not None
    rows = [translation.source_row(each, tokenizer.end, length) for each in tokens]
    rows += [rows[-1]] * (-len(rows) % ROWS)
    return [jax.tree.map(lambda *same: np.stack(same), *rows[first : first + ROWS]) for first in range(0, len(rows), ROWS)]


def _placed(layer_id: str, arrays: dict[str, np.ndarray], specs: Any, stack: jpipe.LayerStack) -> Any:
    """Return the parameters of one layer, including those that it shares with another layer."""

    def of(path: Any, spec: Any) -> np.ndarray:
        name = f"{layer_id}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
        first = arrays.get(name, arrays.get(f"embed{name.removeprefix(_FIRST_OF_TARGET)}"))
        if first is None or first.shape != spec.shape:
            raise InputError(
                f"translate: expected '{name}' of shape {list(spec.shape)} in the checkpoint, found none; its config has changed"
            )
        return first

    return jax.tree_util.tree_map_with_path(of, specs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: of the command line, by default those of this process.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m examples.papers.translate", description="Translate sentences with a trained GNMT.")
    parser.add_argument("run", metavar="RUN", help="the folder of the run, such as runs/0001")
    parser.add_argument("--source", metavar="FILE", help="a sentence to a line (default: those that the run is validated on)")
    parser.add_argument("--reference", metavar="FILE", help="their translations, for BLEU (default without a source: those of the run)")
    parser.add_argument("--step", metavar="N", type=int, help="of the checkpoint (default: the newest that is whole)")
    parser.add_argument("--weights", choices=("newest", "ema"), default="newest", help="ema: their moving average")
    try:
        translate(Request(**vars(parser.parse_args(arguments))), _write, _say)
    except InputError as error:
        return failed(error)
    return 0


def _write(line: str) -> None:
    print(printable(line.removesuffix("\n")), flush=True)


def _say(line: str) -> None:
    print(f"translate: {printable(line)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
