"""How moves run: they copy arrays of the state to host memory and back to the devices."""

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
    """Begin to move arrays to host memory."""
    _move(worker, i, sent_away)


def fetch(worker: Worker, i: Fetch) -> None:
    """Begin to move arrays back to the device."""
    _move(worker, i, fetched)


def _move(worker: Worker, i: Offload | Fetch, moved: Callable[..., Tree]) -> None:
    """Replace arrays by their copies in the other memory. The old memory is free when the copy is complete."""
    state = worker.state
    if i.what == "optimizer":
        before, state.optimizer = state.optimizer, moved(state.optimizer)
        for leaf in jax.tree.leaves(before):
            leaf.delete()  # nothing else holds the array: an update would have deleted it, too
        return
    if i.what in ("residuals", "stash"):
        k = i.number + worker.microbatch_shift
        each = worker.plan.row_slices
        others = [state.microbatches.get(n) for n in range(k - k % each, k - k % each + each) if n != k]
        shared = worker.functions.changed.unchosen(state.layer_state), others  # unchanged state and carries, which stay
        state.microbatches[k][i.what] = moved(state.microbatches[k][i.what], shared)
        worker.used_microbatch(k)
        return
    version, trained = i.number + worker.version_shift, worker.functions.trained
    worker.changed("weights", version)
    params = moved(trained.part(state.weights.read(version)))
    state.weights = state.weights.with_params(version, trained.joined(params, worker.frozen))


def at_rest(plan: Plan, s: int, state: WorkerState) -> WorkerState:
    """Return a worker of stage s before it begins, with its offloaded optimizer state in host memory."""
    return dataclasses.replace(state, optimizer=sent_away(state.optimizer)) if offloads(plan, "optimizer", s) else state


def copy_for_snapshot(plan: Plan, s: int, what: Kept, tree: Tree) -> Tree:
    """Copy arrays that the plan offloads to host memory: a copy may not fit on the device. Return None for other arrays."""
    if not offloads(plan, what, s):
        return None
    # Through NumPy, because JAX does not promise that `device_put` makes a copy inside the same memory.
    return sent_away(jax.tree.map(lambda leaf: jax.device_put(np.array(leaf), leaf.sharding) if is_away(leaf) else leaf, tree))


def check_devices(plan: Plan, devices: Sequence[jax.Device]) -> None:
    """Check that devices can keep arrays in host memory."""
    for device in devices:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if AWAY not in kinds or device.default_memory().kind == AWAY:
            raise InputError(
                where="plan",
                key="offload",
                expected=f"devices with the memory '{AWAY}'",
                found=f"{device} with {kinds}",
                change="remove offload from the plan",
            )


RUNTIME = RuntimeHooks(
    handlers={Offload: offload, Fetch: fetch},
    check_devices=check_devices,
    at_rest=at_rest,
    copy_for_snapshot=copy_for_snapshot,
    watch=MoveWatcher,
)
