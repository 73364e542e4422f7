"""Checkpoints that an `ocp.CheckpointManager` of the user's writes and restores."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jpipe.checkpoints.orbax_item import Tree, escape_names, restore_arguments, spec_tree, unescape_names
from jpipe.checkpoints.records import MARKER
from jpipe.errors import InputError
from jpipe.processes._membership import Processes
from jpipe.runtime._snapshot import with_optimizers


def check_alone(processes: Processes | None, keep: int | None) -> None:
    """Check that a manager can save: it writes the arrays of process 0 only, and removes checkpoints by options of its own.

    Raises:
        InputError: there are several processes, or `keep` is given.
    """
    if processes is not None and processes.count > 1:
        raise InputError("folder: expected the folder of the run, because there are several processes, found an ocp.CheckpointManager")
    if keep is not None:
        raise InputError("keep: expected None, because an ocp.CheckpointManager has max_to_keep among its options; set it there")


def save(manager: ocp.CheckpointManager, step: int, layers: Mapping[str, Tree], facts: Any) -> None:
    """Save layers, as `Snapshot.layers` returns them, if the manager's options want a checkpoint of this step."""
    tree = escape_names(jax.tree.map(np.asarray, jax.device_get(dict(layers))))
    manager.save(step, args=ocp.args.PyTreeSave(tree), custom_metadata=None if facts is None else {"facts": facts})


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
    return with_optimizers(unescape_names(_specs(manager, step)))


def read_layers(manager: ocp.CheckpointManager, step: int, specs: Mapping[str, Tree], names: Sequence[str]) -> dict[str, Tree]:
    """Read layers of a checkpoint.

    Args:
        manager: of the checkpoint.
        step: of the checkpoint.
        specs: from `layer_specs`.
        names: the layers to read.

    Returns:
        `{layer id: nested dicts of NumPy arrays}`, each with its optimizer state.
    """
    needed = {name for name in specs if name in names or name.rpartition(" replica ")[0] in names}
    stored = unescape_names(_specs(manager, step))
    tree = escape_names({name: parts if name in needed else jax.tree.map(lambda spec: ..., parts) for name, parts in stored.items()})
    arguments = ocp.args.PyTreeRestore(item=tree, restore_args=restore_arguments(tree))
    read = with_optimizers({name: parts for name, parts in unescape_names(manager.restore(step, args=arguments)).items() if name in needed})
    return {name: read[name] for name in names}


def _specs(manager: ocp.CheckpointManager, step: int) -> Tree:
    metadata = manager.item_metadata(step)
    tree = getattr(metadata, "tree", None)
    if not isinstance(tree, dict):
        raise InputError(
            f"{manager.directory}: expected a checkpoint of step {step} that jpipe.checkpoints.save wrote, found none; to start with the "
            "parameters of another program, use warm_start.file or the argument `params` of Pipeline.init"
        )
    return spec_tree(tree)
