"""The weights in a checkpoint of a run, by name. Choose a checkpoint by its step, the newest or the best, and read its weights."""

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jpipe
from jpipe import InputError
from jpipe.checkpoints import Checkpoint, at, newest, steps
from jpipe.files import shown
from jpipe_train.checkpoint.best import Step, best_step
from jpipe_train.checkpoint.sources.source import Spec
from jpipe_train.console.options import Weights


def check_steps(folder: Path, step: Step, where: str) -> None:
    """Check that a run has checkpoints, and one at `step` if that is a number, and not None or "best". No checkpoint is read."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.stat(folder / "checkpoints")
        known = steps(folder)
    except OSError as error:
        raise InputError(f"{where}: cannot read '{shown(folder)}': {error.strerror}; give the folder of a run") from None
    if not known:
        actual = "found none" if folder.is_dir() else f"but there is no folder '{shown(folder)}'"
        raise InputError(
            f"{where}: expected checkpoints in '{shown(folder / 'checkpoints')}', {actual}; give the folder of a run that wrote some"
        )
    if isinstance(step, int):
        at(folder, step, "--step")


def choose(folder: Path, step: Step, where: str, report: Callable[[str], None]) -> Checkpoint:
    """Choose a checkpoint of a run: of this step, the "best" one, or the newest complete one.

    `report` prints a line for each damaged newer checkpoint. Raise InputError if there is no such run or checkpoint, or if the run keeps no
    best checkpoints.
    """
    check_steps(folder, step, where)
    if isinstance(step, str):
        step = best_step(folder, f"{where}: --step best")
    chosen = newest(folder, lambda damaged: report(str(damaged))) if step is None else Checkpoint(folder, step)
    if chosen is None:
        raise InputError(
            f"{where}: none of the checkpoints in '{shown(folder / 'checkpoints')}' is complete and undamaged; give another run"
        )
    return chosen


class SavedWeights:
    """The weights in a checkpoint with verified files: parameters by "layer id/path", layer state by "layer id state/path".

    If the plan has `sync_state`, layer state is the mean over the replicas, otherwise the state of the first replica.

    Args:
        checkpoint: the checkpoint.
        weights: the newest parameters, without `delay_correction`, in float32 if the checkpoint has master weights; or their moving
            average.

    Attributes:
        checkpoint: the checkpoint.
        layers: the names of the layers and of shared parameters.
        specs: shapes and dtypes of the weights, by name.

    Raises:
        InputError: the checkpoint is damaged, or two arrays have the same name.
    """

    def __init__(self, checkpoint: Checkpoint, weights: Weights = "newest") -> None:
        checkpoint.verify()
        self.checkpoint, self._weights = checkpoint, weights
        entries = checkpoint.specs()
        self.layers = {name: _layer_of(name, entries) for name in entries}
        self.specs = {name: Spec(leaf.shape, str(leaf.dtype)) for name, leaf in by_name(entries).items()}

    def read(self, layer_ids: Collection[str] | None = None) -> dict[str, Any]:
        """Read the weights of some layers, or of all if None. Shared parameters come with the first layer that uses them.

        Raise InputError if the checkpoint has no such layer or no moving average, or cannot be read.
        """
        names = [name for name, layer_id in self.layers.items() if layer_ids is None or layer_id in layer_ids]
        names += [layer_id for layer_id in layer_ids or () if layer_id not in self.layers]  # an unknown layer is an error
        layers = self._average(self.checkpoint.read(names))
        return by_name(layers if self._weights == "newest" else with_ema(layers, self.checkpoint.step))

    def _average(self, layers: dict[str, Any]) -> dict[str, Any]:
        if all(jpipe.runtime.layer_of(name, layers.keys() - {name}) is None for name in layers):
            return layers  # without replicas
        facts = self.checkpoint.facts
        plan = facts.get("plan") if isinstance(facts, Mapping) else None
        where = f"the plan of the checkpoint of step {self.checkpoint.step}"
        if isinstance(plan, str) and not jpipe.Plan.from_json(plan, where=where).sync_state:
            return layers
        return jpipe.runtime.average_replicas(layers)


def _layer_of(name: str, entries: Mapping[str, Any]) -> str:
    """Return the layer that an entry of a checkpoint belongs to, even if it is for another replica or a shared parameter."""
    if shared := jpipe.runtime.shared_place(name, entries):
        return shared[0]
    return jpipe.runtime.layer_of(name, entries.keys() - {name}) or name


def by_name(layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the newest parameters of a checkpoint by "layer id/path", without `delay_correction`, and layer state.

    Parameters are in float32 if the checkpoint has master weights; the state comes from the first replica, by "layer id state/path". Raise
    InputError if two arrays have the same name.
    """
    arrays: dict[str, Any] = {}
    for layer_id, parts in layers.items():
        if jpipe.runtime.layer_of(layer_id, layers.keys() - {layer_id}) is not None:
            continue  # the layer state of another replica
        parts = jpipe.runtime.without_prediction(parts)
        newest = by_path(jpipe.runtime.masters_in(parts) or parts.get("params", {}).get("0", {}))
        if shared := jpipe.runtime.shared_place(layer_id, layers):  # one array, named after the first parameter that uses it
            layer_id, newest = shared[0], dict(zip(shared[1:], newest.values(), strict=True))
        trees = {layer_id: newest, state_name(layer_id): by_path(parts.get("state", {}))}
        for before, tree in trees.items():
            for path, leaf in tree.items():
                if (name := f"{before}/{path}") in arrays:
                    raise InputError(f"export: two arrays of the checkpoint would both be '{name}'; read it with Orbax")
                arrays[name] = leaf
    return arrays


def with_ema(layers: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return layers in which the moving average replaces the parameters, in the same dtypes."""
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
            "leave out --weights, or train with optimizer.ema_decay"
        )
    return averaged


def by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by path, such as "dense/kernel"; a tree that is one array has the path "array".

    Raise InputError if two leaves have the same path.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "array"
        if name in leaves:
            raise InputError(f"checkpoint: two arrays of a layer would have the name '{name}'; rename one of them in the model")
        leaves[name] = leaf
    return leaves


def state_name(layer_id: str) -> str:
    """Return the name of a layer's state in an export."""
    return f"{layer_id} state"
