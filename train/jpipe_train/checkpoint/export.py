"""`jpipe export`: write the weights of a run, by name, as a safetensors file or as an Orbax checkpoint."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save

import jpipe
from jpipe import InputError
from jpipe.checkpoints.orbax_item import write_tree
from jpipe.files import expanded, new_folder, resolved, unused, write_atomically, writing
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.checkpoint.weights import SavedWeights, choose, state_name
from jpipe_train.console.terminal import count

ENDING = ".safetensors"


def open_run(request: ExportRequest, report: Callable[[str], None]) -> SavedWeights:
    """Open the checkpoint of a run; `report` prints a line for each damaged newer checkpoint.

    Raise InputError if the run or the checkpoint does not exist, or the checkpoint is damaged.
    """
    start_cpu()
    return SavedWeights(choose(resolved(request.source, "export"), request.step, "export", report), request.weights)


def start_cpu() -> None:
    """Make JAX use only the CPU. Orbax starts JAX's devices, but needs no GPU, and another program may be using it."""
    jax.config.update("jax_platforms", "cpu")


def write_file(request: ExportRequest, report: Callable[[str], None]) -> None:
    """Write the parameters and layer state of a checkpoint into a safetensors file.

    Raise InputError as in `open_run`, or if the checkpoint lacks the requested moving average; or a safetensors file cannot hold the model,
    or cannot be written.
    """
    path, saved = _new_file(request.path), open_run(request, report)
    arrays = saved.read()
    # safetensors would mix up the numbers of arrays in another memory order
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    try:
        content = save(ordered, {"jpipe": f"{jpipe.__version__}, step {saved.checkpoint.step}"})
    except SafetensorError as error:
        raise InputError(f"export: a safetensors file cannot hold this model: {error}; use --layout orbax") from None
    with writing("--out", request.path):
        write_atomically(path, content)
    report(_words(request, saved, arrays, len(content)))


def write_orbax(request: ExportRequest, report: Callable[[str], None]) -> None:
    """Write an Orbax item: nested dicts with the names of the arrays in an export.

    Raise InputError as in `write_file`, or if an array and a dict have the same name.
    """
    path, saved = unused(request.path, "--out"), open_run(request, report)
    arrays = saved.read()
    report(_words(request, saved, arrays, _write_item(path, arrays)))


def write_model(request: ExportRequest, report: Callable[[str], None]) -> None:
    """Write an Orbax item with the names and stacked arrays of the whole model from which the layers were cut.

    Raise InputError as in `write_orbax`, or if the layers were not cut from a model.
    """
    path, saved = unused(request.path, "--out"), open_run(request, report)
    arrays = of_whole_model(saved.read(), saved.checkpoint.facts)
    report(_words(request, saved, arrays, _write_item(path, arrays)))


def _write_item(path: Path, arrays: Mapping[str, Any]) -> int:
    """Write arrays as the Orbax item `path` and return the size of its files."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *outer, last = name.split("/")
        inner = tree
        for part in outer:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise InputError(f"export: a tree cannot hold '{name}', because another array has the name of its dict; leave out --layout")
        if inner.setdefault(last, array) is not array:
            raise InputError(f"export: a tree cannot hold '{name}', because a dict has the same name; leave out --layout")
    with new_folder(path, "--out") as unfinished:
        write_tree(unfinished, tree)
        return sum(file.stat().st_size for file in unfinished.rglob("*") if file.is_file())


def _words(request: ExportRequest, saved: SavedWeights, arrays: Mapping[str, Any], size: int) -> str:
    """Describe what was written."""
    return f"{request.path}: {count(len(arrays), 'array')}, {size:,} bytes, step {saved.checkpoint.step} of {request.source}"


def of_whole_model(arrays: Mapping[str, Any], facts: Any) -> dict[str, Any]:
    """Return the arrays of the whole model from which the layers were cut, by path.

    The facts of the checkpoint locate them. Raise InputError if the layers were not cut from a model, or the facts are damaged.
    """
    locations = facts.get("model") if isinstance(facts, Mapping) else None
    if locations is None:
        raise InputError(
            "--layout: expected a run with a whole model as model.target, found a run of layers; leave out --layout, or give orbax"
        )
    slices: dict[str, dict[tuple[int, ...], tuple[Any, tuple[int, ...]]]] = {}
    try:
        for kind, by_place in locations.items():
            for name, (path, index, axes) in by_place.items():
                layer_id, _, inner = name.partition("/")
                array = arrays[name if kind == "params" else f"{state_name(layer_id)}/{inner}"]
                slices.setdefault(path, {})[tuple(index)] = array, tuple(axes)
        return {path: _stacked(parts) for path, parts in slices.items()}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise InputError("export: the checkpoint does not say where its arrays are in the whole model; leave out --layout") from None


def _stacked(parts: Mapping[tuple[int, ...], tuple[Any, tuple[int, ...]]]) -> Any:
    """Join the slices of an array. A slice's key is its index and the axes along which the index counts."""
    (first, axes), count = next(iter(parts.values())), max(parts)
    if not axes:
        return first
    first = np.asarray(first)
    shape = list(first.shape)
    for axis, last in zip(axes, count, strict=True):
        shape.insert(axis, last + 1)
    if len(parts) != np.prod([last + 1 for last in count]):
        raise ValueError("a slice is missing")
    whole = np.empty(shape, first.dtype)
    by_index = np.moveaxis(whole, axes, range(len(axes)))
    for index, (array, _) in parts.items():
        by_index[index] = array
    return whole


def _new_file(out: str) -> Path:
    file = expanded(out, "--out")
    if file.suffix != ENDING:
        raise InputError(f"--out: expected a name that ends in {ENDING}, found '{out}'")
    if os.path.lexists(file):
        raise InputError(f"--out: '{out}' already exists; choose another name, or remove it first")
    if not os.path.isdir(file.absolute().parent):
        raise InputError(f"--out: there is no folder for '{out}'; make it first, or choose another")
    return file
