"""Checkpoints that an `ocp.CheckpointManager` of the user's writes and restores."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jpipe.checkpoints.orbax_item import ITEM, Tree, escape_names, read_tree, tree_specs, unescape_names
from jpipe.checkpoints.records import MARKER
from jpipe.errors import InputError
from jpipe.processes._membership import Processes
from jpipe.runtime._snapshot import layer_of, with_optimizers


def check_can_save(manager: ocp.CheckpointManager, processes: Processes | None, keep: int | None) -> None:
    """Check that a manager can save: it writes the arrays of process 0 only, and removes checkpoints by options of its own.

    Raises:
        InputError: there are several processes, `keep` is given, or the manager's folder has checkpoints that a run wrote.
    """
    if processes is not None and processes.count > 1:
        raise InputError("folder: expected the folder of the run, because there are several processes, found an ocp.CheckpointManager")
    if keep is not None:
        raise InputError("keep: expected None, because an ocp.CheckpointManager has max_to_keep among its options; set it there")
    if (run := run_of(manager)) is not None:
        raise InputError(
            f"folder: expected an ocp.CheckpointManager of a folder of its own, found one of the checkpoints of the run '{run}', "
            f"which have hashes; pass '{run}', or a manager of another folder"
        )


def save(manager: ocp.CheckpointManager, step: int, layers: Mapping[str, Tree], facts: Any) -> None:
    """Save layers, as `Snapshot.layers` returns them, if the manager's options want a checkpoint of this step.

    Raises:
        InputError: the manager expects other items than one tree.
    """
    tree = escape_names(jax.tree.map(np.asarray, jax.device_get(dict(layers))))
    try:
        manager.save(step, args=ocp.args.PyTreeSave(tree), custom_metadata=None if facts is None else {"facts": facts})
    except ValueError:  # its message may contain all arrays
        raise InputError(
            f"folder: expected an ocp.CheckpointManager that saves one tree, found one of '{manager.directory}' that does not accept "
            "ocp.args.PyTreeSave; make it without item_names, item_handlers and handler_registry"
        ) from None


def run_of(manager: ocp.CheckpointManager) -> Path | None:
    """Return the folder of the run whose checkpoints the manager sees, if `jpipe.checkpoints` wrote them; these have hashes."""
    folder = Path(manager.directory)
    written = folder.name == "checkpoints" and any((folder / str(step) / MARKER).exists() for step in manager.all_steps())
    return folder.parent if written else None


def find_step(manager: ocp.CheckpointManager, step: int | None) -> int | None:
    """Return `step`, or the newest step if it is None; None if there is no checkpoint.

    Raises:
        InputError: there is no such step.
    """
    manager.wait_until_finished()
    saved = sorted(manager.all_steps())
    if step is not None and step not in saved:
        raise InputError(
            f"step: expected one of {', '.join(map(str, saved)) or 'none at all'}, those in '{manager.directory}', found {step}"
        )
    return step if step is not None else saved[-1] if saved else None


def layer_specs(manager: ocp.CheckpointManager, step: int) -> dict[str, Tree]:
    """Return shapes and dtypes of the layers of a checkpoint, each with its optimizer state; no array is read.

    Raises:
        InputError: it is not a checkpoint that `save` wrote.
    """
    return with_optimizers(_specs(manager, step))


def read_layers(manager: ocp.CheckpointManager, step: int, names: Sequence[str]) -> dict[str, Tree]:
    """Read layers of a checkpoint.

    Args:
        manager: of the checkpoint.
        step: of the checkpoint.
        names: the layers to read.

    Returns:
        `{layer id: nested dicts of NumPy arrays}`, each with its optimizer state.

    Raises:
        InputError: it is not a checkpoint that `save` wrote.
    """
    specs = _specs(manager, step)
    needed = {name for name in specs if name in names or layer_of(name, names) is not None}
    tree = escape_names({name: specs[name] for name in needed})
    layers = with_optimizers(unescape_names(read_tree(_item(manager, step), tree)))
    return {name: layers[name] for name in names}


def _specs(manager: ocp.CheckpointManager, step: int) -> Tree:
    try:
        specs: Tree = unescape_names(tree_specs(_item(manager, step)))
        if all(isinstance(parts, dict) for parts in specs.values()):
            return specs
        problem = "an array in place of a layer"
    except Exception as error:  # Orbax and TensorStore raise errors of many kinds
        problem = (str(error).splitlines() or [""])[0][:200]
    raise InputError(
        f"{manager.directory}: expected a checkpoint of step {step} that jpipe.checkpoints.save wrote, found {problem}; to begin with the "
        "parameters of another program, pass them to Pipeline.init"
    )


def _item(manager: ocp.CheckpointManager, step: int) -> Path:
    """Return the Orbax item of a step, whatever prefix and digits the manager gives to names of steps."""
    for path in sorted(Path(manager.directory).iterdir()):
        if re.fullmatch(rf"(.*_)?0*{step}", path.name):
            return path / ITEM
    raise FileNotFoundError(f"no folder of step {step}")
