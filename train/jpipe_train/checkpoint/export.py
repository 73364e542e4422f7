"""`jpipe export`: the weights of a run by name, in a safetensors file or as an Orbax checkpoint."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save

import jpipe
from jpipe import InputError
from jpipe.checkpoints import files as checkpoint_files
from jpipe.checkpoints.orbax_item import write_tree
from jpipe.files import expanded, new_folder, resolved, shown, unused, write_atomically, writing
from jpipe_train.checkpoint.best import Step, best_step
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.console.terminal import count

ENDING = ".safetensors"
Weights = Literal["newest", "ema"]


def write_file(request: ExportRequest, report: Callable[[str], None]) -> None:
    """Write a safetensors file, as `main` does."""
    main(request.source, request.path, request.step, report, request.weights)


def write_orbax(request: ExportRequest, report: Callable[[str], None]) -> None:
    """Write an Orbax item with the names of arrays in an export."""
    main(request.source, request.path, request.step, report, request.weights, "orbax")


def write_model(request: ExportRequest, report: Callable[[str], None]) -> None:
    """Write an Orbax item with the names of arrays in the whole model from which the layers were cut."""
    main(request.source, request.path, request.step, report, request.weights, "model")


def main(
    run: str,
    out: str,
    step: Step,
    report: Callable[[str], None],
    weights: Weights = "newest",
    layout: Literal["jpipe", "orbax", "model"] = "jpipe",
) -> None:
    """Write the parameters and layer state of a checkpoint into a file or folder, which appears complete or not at all.

    Args:
        run: the folder of the run.
        out: the new file, or with `layout` "orbax" the new folder.
        step: the step of the checkpoint, or "best"; None: the newest complete one.
        report: gets a line for what was written, and one for each newer checkpoint that is damaged.
        weights: the newest parameters, or their moving average.
        layout: a safetensors file, or an Orbax item with the names as nested dicts; "model" is such an item with the names that the arrays
            have in the whole model from which the layers were cut, stacked where it has them stacked.

    Raises:
        InputError: no such run or checkpoint, a damaged one, one without an average, or `out` cannot be written.
    """
    path = _new_file(out) if layout == "jpipe" else unused(out, "--out")
    folder = resolved(run, "export")
    jax.config.update("jax_platforms", "cpu")  # Orbax starts JAX's devices; a GPU may be another program's, and none is needed
    chosen = step_of(folder, step, "export", report)
    layers = _averaged(folder, chosen, checkpoint_files.read_layers(folder, chosen))
    arrays = by_name(layers if weights == "newest" else with_ema(layers, chosen))
    if layout == "model":
        arrays = of_whole_model(arrays, checkpoint_files.read_facts(folder, chosen))
    size = (_write_safetensors if layout == "jpipe" else _write_orbax)(path, out, arrays, chosen)
    report(f"{out}: {count(len(arrays), 'array')}, {size:,} bytes, step {chosen} of {run}")


def _write_safetensors(path: Path, out: str, arrays: Mapping[str, Any], step: int) -> int:
    """Write arrays into a file and return its size."""
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}  # safetensors would shuffle other orders
    try:
        content = save(ordered, {"jpipe": f"{jpipe.__version__}, step {step}"})
    except SafetensorError as error:
        raise InputError(f"export: a safetensors file cannot hold this model: {error}; use --layout orbax") from None
    with writing("--out", out):
        write_atomically(path, content)
    return len(content)


def _write_orbax(path: Path, out: str, arrays: Mapping[str, Any], step: int) -> int:
    """Write arrays as the Orbax item `path` and return the size of its files."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *outer, last = name.split("/")
        inner = tree
        for part in outer:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise InputError(f"export: a tree cannot hold '{name}', because an array has the name of its dict; leave out --layout")
        if inner.setdefault(last, array) is not array:
            raise InputError(f"export: a tree cannot hold '{name}', because a dict has the same name; leave out --layout")
    with new_folder(path, "--out") as unfinished:
        write_tree(unfinished, tree)
        return sum(file.stat().st_size for file in unfinished.rglob("*") if file.is_file())


def by_name(layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of a checkpoint by name.

    Args:
        layers: the layers from `checkpoint_files.read_layers` or `layer_specs`.

    Returns:
        The newest parameters by "layer id/path", as without `delay_correction`, in float32 if the checkpoint has masters; and the layer
        state of the first replica by "layer id state/path".

    Raises:
        InputError: two of them have the same name.
    """
    arrays: dict[str, Any] = {}
    for layer_id, parts in layers.items():
        if jpipe.runtime.layer_of(layer_id, layers.keys() - {layer_id}) is not None:
            continue  # the layer state of another replica
        parts = jpipe.runtime.without_prediction(parts)
        newest = by_path(jpipe.runtime.masters_in(parts) or parts.get("params", {}).get("0", {}))
        if shared := jpipe.runtime.shared_place(layer_id, layers):  # one array, by the name of the first parameter that uses it
            layer_id, newest = shared[0], dict(zip(shared[1:], newest.values(), strict=True))
        trees = {layer_id: newest, state_name(layer_id): by_path(parts.get("state", {}))}
        for before, tree in trees.items():
            for path, leaf in tree.items():
                if (name := f"{before}/{path}") in arrays:
                    raise InputError(f"export: two arrays of the checkpoint would both be '{name}'; read it with Orbax")
                arrays[name] = leaf
    return arrays


def of_whole_model(arrays: Mapping[str, Any], facts: Any) -> dict[str, Any]:
    """Return arrays by their paths in the whole model from which the layers were cut.

    Args:
        arrays: as `by_name` returns them.
        facts: the facts of the checkpoint, with the places of the arrays in the whole model.

    Raises:
        InputError: the layers were not cut from a model, or the facts are damaged.
    """
    locations = facts.get("model") if isinstance(facts, Mapping) else None
    if locations is None:
        raise InputError("--layout: expected a run with a whole model as model.target, found one of layers; leave it out, or give orbax")
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
    """Return an array from its slices by index; each slice also names the axes along which the index counts."""
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
    for index, (array, _) in parts.items():
        position: list[Any] = [slice(None)] * len(shape)
        for axis, i in zip(axes, index, strict=True):
            position[axis] = i
        whole[tuple(position)] = array
    return whole


def with_ema(layers: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return layers with the moving average of the parameters in place of the parameters, in the same dtypes."""
    averaged, has_average = {}, False
    for layer_id, parts in layers.items():
        parts = jpipe.runtime.without_prediction(parts)
        masters, optimizer = jpipe.runtime.masters_in(parts), parts.get("optimizer")
        newest = by_path(masters or parts.get("params", {}).get("0", {}))
        inner = optimizer.get("state") if masters and isinstance(optimizer, Mapping) else optimizer
        averages = by_path(inner.get("weights_ema", {})) if isinstance(inner, Mapping) else {}
        has_average = has_average or bool(averages)
        # A frozen parameter is its own average.
        params = {path: np.asarray(averages.get(path, leaf)).astype(leaf.dtype) for path, leaf in newest.items()}
        averaged[layer_id] = {"params": {"0": params}} | {name: parts[name] for name in ("state",) if name in parts}
    if not has_average:
        raise InputError(
            f"--weights: the checkpoint of step {step} has no moving average of the weights (layer '{next(iter(layers))}'); "
            "leave it out, or train with optimizer.ema_decay"
        )
    return averaged


def _averaged(folder: Path, step: int, layers: dict[str, Any]) -> dict[str, Any]:
    """Return layers with the mean of the layer state over the replicas, if the run's plan has `sync_state`."""
    facts = checkpoint_files.read_facts(folder, step)
    plan = facts.get("plan") if isinstance(facts, Mapping) else None
    if isinstance(plan, str) and not jpipe.Plan.from_json(plan, where=f"the plan of the checkpoint of step {step}").sync_state:
        return layers
    return jpipe.runtime.average_replicas(layers)


def by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by their paths, such as "dense/kernel"; a tree that is one array has the path "array".

    Raises:
        InputError: two leaves have the same path.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "array"
        if name in leaves:
            raise InputError(f"checkpoint: two arrays of a layer would have the name '{name}'; rename one of them in the model")
        leaves[name] = leaf
    return leaves


def state_name(layer_id: str) -> str:
    """Return the name that the state of a layer has in an export, in place of its id."""
    return f"{layer_id} state"


def step_of(folder: Path, step: Step, where: str, report: Callable[[str], None]) -> int:
    """Choose a checkpoint of a run.

    Args:
        folder: the run's.
        step: the step of the checkpoint, or "best"; None: the newest complete one.
        where: the config key or command, for messages.
        report: gets a line for each newer one that is damaged.

    Raises:
        InputError: no such run or checkpoint; "best", and the run keeps none.
    """
    check_steps(folder, step, where)
    if isinstance(step, str):
        return best_step(folder, f"{where}: --step best")
    chosen = checkpoint_files.newest_good(folder, lambda damaged: report(str(damaged))) if step is None else step
    if chosen is None:
        raise InputError(f"{where}: none of the checkpoints in '{shown(folder / 'checkpoints')}' is whole; take another run")
    return chosen


def check_steps(folder: Path, step: Step, where: str) -> None:
    """Check that a run has checkpoints, and one at `step` if that is given. No checkpoint is read.

    Args:
        folder: the run's.
        step: the step of the checkpoint; None or "best" allows any.
        where: the config key or command, for messages.

    Raises:
        InputError: no such run or checkpoint.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            os.stat(folder / "checkpoints")
        steps = checkpoint_files.steps(folder)
    except OSError as error:
        raise InputError(f"{where}: cannot read '{shown(folder)}': {error.strerror}; give the folder of a run") from None
    if not steps:
        actual = "found none" if folder.is_dir() else f"but there is no folder '{shown(folder)}'"
        raise InputError(
            f"{where}: expected checkpoints in '{shown(folder / 'checkpoints')}', {actual}; give the folder of a run that wrote some"
        )
    if isinstance(step, int) and step not in steps:
        raise InputError(f"--step: expected one of {', '.join(map(str, steps))}, the checkpoints in '{shown(folder)}', found {step}")


def _new_file(out: str) -> Path:
    file = expanded(out, "--out")
    if file.suffix != ENDING:
        raise InputError(f"--out: expected a name that ends in {ENDING}, found '{out}'")
    if os.path.lexists(file):
        raise InputError(f"--out: '{out}' already exists; choose another name, or remove it first")
    if not os.path.isdir(file.absolute().parent):
        raise InputError(f"--out: there is no folder for '{out}'; make it first, or choose another")
    return file
