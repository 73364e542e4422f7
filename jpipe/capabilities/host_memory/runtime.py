"""How moves run: arrays of the state in the memory of the host and back on the devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jpipe.capabilities.host_memory.memory import check_host_memory, copied, copied_to_host, from_host_memory, in_host, to_host_memory
from jpipe.capabilities.host_memory.option import Kept, offloads
from jpipe.capabilities.host_memory.program import Fetch, Offload
from jpipe.capabilities.host_memory.watch import MoveWatcher
from jpipe.capabilities.protocol import RuntimeHooks
from jpipe.plan import Plan
from jpipe.runtime._worker import Worker
from jpipe.runtime.state import WorkerState

Tree = Any


def offload(worker: Worker, i: Offload) -> None:
    """Begin to move something to host memory."""
    _move(worker, i, to_host_memory)


def fetch(worker: Worker, i: Fetch) -> None:
    """Begin to move something back."""
    _move(worker, i, from_host_memory)


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
    return dataclasses.replace(state, optimizer=to_host_memory(state.optimizer)) if offloads(plan, "optimizer", s) else state


def copy_for_snapshot(plan: Plan, s: int, what: Kept, tree: Tree) -> Tree:
    """Return copies in host memory of what waits there, which may fit on the device only in part; None for anything else."""
    return copied_to_host(tree) if offloads(plan, what, s) else None


RUNTIME = RuntimeHooks(
    handlers={Offload: offload, Fetch: fetch},
    check_devices=lambda plan, devices: check_host_memory(devices),
    at_rest=at_rest,
    is_away=in_host,
    fetch=from_host_memory,
    copy=copied,
    copy_for_snapshot=copy_for_snapshot,
    watch=MoveWatcher,
)
