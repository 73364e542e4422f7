"""`jpipe export --layout huggingface`: the weights of a run as a folder that transformers loads."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jpipe
from jpipe import InputError
from jpipe.checkpoints import files as checkpoint_files
from jpipe.files import TEMPORARY, expanded, read_bytes, resolved, shown, to_disk
from train.checkpoint.export import Weights, by_name, step_of, with_ema
from train.checkpoint.huggingface.names import Layout, layout
from train.checkpoint.huggingface.tensors_file import write_tensors
from train.checkpoint.source import Spec
from train.config import config_file, huggingface
from train.config.config import Config
from train.console.terminal import count

LIMIT = 5 * 10**9  # bytes of the tensors of a file
_MOST_TOKENIZER = 2**28  # bytes of `tokenizer.json`; vocabularies of 250,000 take 2**25
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def main(run: str, out: str, step: int | None, report: Callable[[str], None], weights: Weights = "newest", limit: int = LIMIT) -> None:
    """Write the parameters of a checkpoint as a folder in Hugging Face's layout, which appears whole or not at all.

    Args:
        run: the folder of the run.
        out: the folder, a new one.
        step: of the checkpoint; None: the newest that is whole.
        report: gets a line for what was written, and for each newer checkpoint that is damaged.
        weights: the newest parameters, or their moving average.
        limit: bytes of the tensors of a file; more are written into several.

    Raises:
        InputError: no such run or checkpoint, a damaged one, one without an average; a model that has no such layout; or a folder that
            cannot be written.
    """
    place, folder = _new_folder(out), resolved(run, "export")
    jax.config.update("jax_platforms", "cpu")  # Orbax starts JAX's devices; a GPU may be another program's, and none is needed
    chosen = step_of(folder, step, "export", report)
    config = config_file.load_resolved(folder / "config.yaml")
    described = huggingface.written(config.model)
    names = layout(huggingface.described(described))
    if step is not None:  # or else it is verified already
        checkpoint_files.verify(folder, chosen)
    specs = _specs(folder, chosen, names)
    described |= _special(config, described["architectures"][0], described["vocab_size"]) | _dtypes(specs)
    with _appearing(place, out) as unfinished:
        _write_json(unfinished / huggingface.CONFIG, described)
        size = write_tensors(unfinished, specs, _tensors(folder, chosen, names, weights), limit)
        copied = _copy_tokenizer(config, unfinished, report)
    report(f"{out}: {count(len(specs), 'tensor')}, {size:,} bytes{copied}, step {chosen} of {run}")


def _specs(folder: Path, step: int, names: Layout) -> dict[str, Spec]:
    """Of the tensors, by their names and in their order."""
    there = by_name(checkpoint_files.layer_specs(folder, step))
    for row in names:
        if row.ours not in there or there[row.ours].shape != row.shape:
            found = f"found it of shape {list(there[row.ours].shape)}" if row.ours in there else "found no such name"
            raise InputError(
                f"export: expected '{row.ours}' of shape {list(row.shape)} in the checkpoint of step {step}, as in "
                f"{shown(folder / 'config.yaml')}, {found}; the checkpoint is of another model"
            )
    return {name: Spec(shape, str(there[row.ours].dtype)) for row in names for name, shape in zip(row.theirs, row.shapes, strict=True)}


def _tensors(folder: Path, step: int, names: Layout, weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors with their names; one layer is in memory at a time."""
    there = checkpoint_files.layer_specs(folder, step)
    firsts = {name: place[0] for name in there if (place := jpipe.runtime.shared_place(name, there))}
    for layer_id, rows in names.rows.items():
        entries = [layer_id, *(name for name, first in firsts.items() if first == layer_id)]
        layers = checkpoint_files.read_layers(folder, step, entries, verified=True)
        arrays = by_name(layers if weights == "newest" else with_ema(layers, step))
        for row in rows:
            yield from zip(row.theirs, row.split(np.asarray(arrays[row.ours])), strict=True)


def _dtypes(specs: Mapping[str, Spec]) -> dict[str, str]:
    (dtype, *_) = dict.fromkeys(spec.dtype for spec in specs.values())
    return {"dtype": dtype, "torch_dtype": dtype}  # transformers since 5, and before


def _special(config: Config, architecture: str, vocab_size: int) -> dict[str, Any]:
    """The numbers of special tokens, from the folder that the run began with if it is there still; transformers' own may not fit."""
    said: dict[str, Any] = {}
    if config.warm_start.file is not None and huggingface.is_folder(config.warm_start.file):
        with contextlib.suppress(InputError):
            path = resolved(config.warm_start.file, "warm_start.file") / huggingface.CONFIG
            said = huggingface.load_json(path, huggingface.MOST_BYTES)
    return {key: said[key] if _is_token(said.get(key), vocab_size) else None for key in _SPECIAL}


def _is_token(found: Any, vocab_size: int) -> bool:
    numbers = found if isinstance(found, list) and 0 < len(found) < 100 else [found]
    return all(type(number) is int and 0 <= number < vocab_size for number in numbers)


def _copy_tokenizer(config: Config, to: Path, report: Callable[[str], None]) -> str:
    """Copy the tokenizer of the run; what is said of it in the last line."""
    name = getattr(config.data, "tokenizer", None)
    if name is None:
        return ""
    try:
        content = read_bytes(expanded(name, "data.tokenizer"), _MOST_TOKENIZER)
    except OSError as error:
        report(f"{to.name}: without the tokenizer of the run, '{name}', which cannot be read: {error.strerror}")
        return ""
    (to / "tokenizer.json").write_bytes(content)
    return " and the tokenizer"


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n")


def _new_folder(out: str) -> Path:
    path = expanded(out, "--out").absolute()
    if os.path.lexists(path):
        raise InputError(f"--out: '{out}' already exists; choose another name, or remove it first")
    if not path.parent.is_dir():
        raise InputError(f"--out: there is no folder for '{out}'; make it first, or choose another")
    return path


@contextlib.contextmanager
def _appearing(place: Path, out: str) -> Iterator[Path]:
    """A folder under another name, which gets its own if nothing fails inside, and else is removed."""
    unfinished = place.with_name(TEMPORARY.replace("*", secrets.token_hex(8)))
    try:
        unfinished.mkdir()
        try:
            yield unfinished
            for path in unfinished.iterdir():
                to_disk(path)
            to_disk(unfinished)
            os.rename(unfinished, place)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        to_disk(place.parent)
    except OSError as error:
        raise InputError(f"--out: cannot write '{out}': {error.strerror}; choose another folder") from None
