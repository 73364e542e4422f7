"""How moves run: arrays of the state in the memory of the host and back on the devices."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jpipe.capabilities.host_memory.option import Kept, offloads
from jpipe.capabilities.host_memory.program import Fetch, Offload
from jpipe.capabilities.host_memory.watch import MoveWatcher
from jpipe.capabilities.protocol import RuntimeHooks
from jpipe.errors import InputError
from jpipe.plan import Plan
from jpipe.runtime._worker import Worker
from jpipe.runtime.state import AWAY, WorkerState, fetched, is_away, sent_away

Tree = Any


def offload(worker: Worker, i: Offload) -> None:
    """Begin to move something to host memory."""
    _move(worker, i, sent_away)


def fetch(worker: Worker, i: Fetch) -> None:
    """Begin to move something back."""
    _move(worker, i, fetched)


def _move(worker: Worker, i: Offload | Fetch, moved: Callable[..., Tree]) -> None:
    """Replace something by its copy in the other memory; memory is free when the copy is over."""
    state = worker.state
    if i.what == "optimizer":
        before, state.optimizer = state.optimizer, moved(state.optimizer)
        for leaf in jax.tree.leaves(before):
            leaf.delete()  # nothing else holds it: an update would have deleted it, too
        return
    if i.what in ("residuals", "stash"):
        k = i.number + worker.microbatch_shift
        unchanged = worker.functions.changed.unchosen(state.layer_state)  # the same arrays for all microbatches: they stay
        state.microbatches[k][i.what] = moved(state.microbatches[k][i.what], unchanged)
        worker.used_microbatch(k)
        return
    version, trained = i.number + worker.version_shift, worker.functions.trained
    worker.changed("weights", version)
    params = moved(trained.part(state.weights.read(version)))
    state.weights = state.weights.with_params(version, trained.joined(params, worker.frozen))


def at_rest(plan: Plan, s: int, state: WorkerState) -> WorkerState:
    """Return a worker of stage s before it begins, with what waits in host memory there."""
    return dataclasses.replace(state, optimizer=sent_away(state.optimizer)) if offloads(plan, "optimizer", s) else state


def copy_for_snapshot(plan: Plan, s: int, what: Kept, tree: Tree) -> Tree:
    """Return copies in host memory of what is offloaded, which may not fit on the device; None for anything else."""
    if not offloads(plan, what, s):
        return None
    # Through NumPy, because JAX does not promise that `device_put` copies an array to the memory in which it is.
    return sent_away(jax.tree.map(lambda leaf: jax.device_put(np.array(leaf), leaf.sharding) if is_away(leaf) else leaf, tree))


def check_devices(plan: Plan, devices: Sequence[jax.Device]) -> None:
    """Check that devices can keep arrays in the memory of their hosts.

    Raises:
        InputError: one of them cannot.
    """
    for device in devices:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if AWAY not in kinds or device.default_memory().kind == AWAY:
            raise InputError(
                where="plan",
                key="offload",
                expected=f"devices with the memory '{AWAY}'",
                found=f"{device} with {kinds}",
                change="remove it",
            )


RUNTIME = RuntimeHooks(
    handlers={Offload: offload, Fetch: fetch},
    check_devices=check_devices,
    at_rest=at_rest,
    copy_for_snapshot=copy_for_snapshot,
    watch=MoveWatcher,
)
