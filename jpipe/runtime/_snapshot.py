"""Snapshots of a run that goes on: what each worker holds after its own update, as arrays by layer id; and workers restored from them."""

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.errors import InputError
from jpipe.plan import Plan
from jpipe.programs._instructions import Forward, ForwardBackward, Update
from jpipe.runtime._interpreter import Event
from jpipe.runtime._plain import Plain, checked_dict, from_plain, to_plain
from jpipe.runtime._state import WorkerState
from jpipe.schedules import SCHEDULES
from jpipe.stages._functions import StageFunctions, floats_of, with_floats

Tree = Any


class Snapshot:
    """Takes what a checkpoint of a run at one batch needs, while the run goes on: neither drained nor paused, its numbers unchanged.

    Give it to `Pipeline.step` (and `drain`) as `observe`, from the step before that batch on, until it is `complete`: each worker comes
    to the last update before the batch in its own time, and is copied then. What is in flight is left out: a run that
    `Pipeline.restore` begins there computes it again, from the weight versions that it read. Layer state is that from before the first
    forward of the batch, for each replica its own. It costs the memory of the copies, until nobody holds this object.

    Make one with `Pipeline.snapshot`.

    Args:
        plan: what runs.
        batch: where the restored run is to begin.
        workers: those of this process.

    Attributes:
        batch: where the restored run is to begin.
    """

    def __init__(self, plan: Plan, batch: int, workers: Iterable[int]) -> None:
        self.batch = batch
        self._parts = {w: _Part(plan, w, batch) for w in workers}

    def __call__(self, event: Event) -> None:
        """Take note of one instruction."""
        self._parts[event.instruction.worker].see(event)

    @property
    def complete(self) -> bool:
        """Whether all workers of this process have come to the snapshot."""
        return all(part.complete for part in self._parts.values())

    def layers(self) -> dict[str, Plain]:
        """By layer id what `Pipeline.restore` takes: arrays on their devices, of the layers of this process.

        For each layer `params`, the newest version as "0", the one before as "1", and so on; `optimizer`; and `state`. Replicas hold the
        same but for layer state: that of the first one is there, and of the others by names such as "block_0 replica 1". What has no
        arrays is left out.
        """
        assert self.complete
        return {name: plain for part in self._parts.values() for name, plain in part.layers().items()}


_OTHER_OPTIMIZER = "is it of another optimizer? fresh_optimizer=True (in a config resume.optimizer: reset) begins with new state"

# One call for a whole tree: leaf by leaf it would hold up the thread that dispatches the steps.
_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def own_name(layer_id: str, replica: int) -> str:
    """By which a replica's own layer state goes in a checkpoint."""
    return f"{layer_id} replica {replica}" if replica else layer_id


class _Part:
    """What one worker gives to the snapshot."""

    def __init__(self, plan: Plan, worker: int, batch: int) -> None:
        s, self._replica = plan.workers[worker]
        self._first = batch * plan.microbatches
        self._newest = batch * plan.updates_per_batch(s)
        self._oldest = SCHEDULES[plan.schedule].version(plan, s, self._first + self._replica)
        self._ids = plan.stages[s].layers
        self._before: Tree = None  # layer state after the last instruction that was seen
        self._versions: dict[int, Tree] = {}
        self._optimizer: Tree = None
        self._state: Tree = None

    @property
    def complete(self) -> bool:
        return self._optimizer is not None

    def see(self, event: Event) -> None:
        if self.complete:
            return
        match event.instruction:
            case Forward(microbatch=k) | ForwardBackward(microbatch=k) if k >= self._first:
                if self._state is None:
                    self._state = self._before
            case Update(batch=update) if update < self._newest:
                if update + 1 == self._newest:
                    self._optimizer = _copied(event.state.optimizer)
                    if self._state is None:
                        self._state = dict(event.state.layer_state)
        if self._state is not None:  # a version that the batch reads first may be gone before its last update is there
            for version in event.state.versions.keys() - self._versions.keys():
                if self._oldest <= version <= self._newest:
                    self._versions[version] = _copied(event.state.versions[version])
        self._before = dict(event.state.layer_state)

    def layers(self) -> dict[str, Plain]:
        found: dict[str, Plain] = {layer_id: {} for layer_id in self._ids}
        for layer_id, plain in found.items():
            if self._replica == 0:
                ages = {str(self._newest - v): to_plain(params[layer_id]) for v, params in self._versions.items()}
                plain["params"] = {age: params for age, params in ages.items() if params}
                plain["optimizer"] = to_plain(self._optimizer[layer_id])
            plain["state"] = to_plain(self._state[layer_id])
        named = {own_name(layer_id, self._replica): _without_empty(plain) for layer_id, plain in found.items()}
        return {name: plain for name, plain in named.items() if plain or self._replica == 0}


def layer_of(name: str, ids: Iterable[str]) -> str | None:
    """Which of the layers `ids` a name in `Snapshot.layers` is of; None: of none of them."""
    if name in ids:
        return name
    layer_id, _, replica = name.rpartition(" replica ")
    return layer_id if replica.isdecimal() and layer_id in ids else None


def fitting(
    plan: Plan, worker: int, f: StageFunctions, layers: Mapping[str, Plain], batch: int, fresh: bool
) -> tuple[dict[int, Tree], Tree, Tree]:
    """What a worker takes from a snapshot: weights by version, optimizer state, layer state.

    A version that is missing in the snapshot is replaced by the newest. Layer state is the replica's own where there were as many and the
    pipeline does not flush, else the mean over those that there were; without `sync_state` it is that of one of them.

    Args:
        plan: what is to run, perhaps another one than that of the snapshot.
        worker: which one.
        f: of its stage.
        layers: the layers of its stage at least, as from `Snapshot.layers`, with any arrays.
        batch: where the run begins.
        fresh: leave the optimizer state out.

    Raises:
        InputError: a layer is not there, or is of another shape.
    """
    s, replica = plan.workers[worker]
    newest = batch * plan.updates_per_batch(s)
    oldest = SCHEDULES[plan.schedule].version(plan, s, batch * plan.microbatches + replica)
    ids = f.stage.layers
    for layer_id in ids:
        if layer_id not in layers:
            raise InputError(f"checkpoint: layer '{layer_id}' of the model is not in it; is it of another model?")

    def params_of(layer_id: str, age: int) -> Tree:
        where = f"checkpoint: layer '{layer_id}', parameters"
        ages = checked_dict(layers[layer_id].get("params", {}), where)
        return from_plain(f.specs.params[layer_id], ages.get(str(age), ages.get("0", {})), where)

    def state_of(layer_id: str) -> Tree:
        spec, count, where = f.specs.state[layer_id], _replicas(layers, layer_id), f"checkpoint: layer '{layer_id}', state"
        own = from_plain(spec, layers[own_name(layer_id, replica % count)].get("state", {}), where)
        if f.average_state is None or (f.average_state == "read" and count == plan.replicas[s]):
            return own
        return with_floats(own, floats_of(from_plain(spec, _mean_state(layers, layer_id), where)))

    versions = {v: {layer_id: params_of(layer_id, newest - v) for layer_id in ids} for v in range(oldest, newest + 1)}
    optimizer = None
    if not fresh:
        specs = f.optimizer_spec
        optimizer = {
            layer_id: from_plain(
                specs[layer_id], layers[layer_id].get("optimizer", {}), f"checkpoint: layer '{layer_id}', optimizer state", _OTHER_OPTIMIZER
            )
            for layer_id in ids
        }
    return versions, optimizer, {layer_id: state_of(layer_id) for layer_id in ids}


def restored_worker(
    plan: Plan, worker: int, f: StageFunctions, layers: Mapping[str, Plain], batch: int, key: jax.Array, device: jax.Device, fresh: bool
) -> WorkerState:
    """A worker as it is where nothing is in flight before `batch`, with the arrays of a snapshot.

    Args:
        plan: what is to run.
        worker: which one.
        f: of its stage.
        layers: as in `fitting`.
        batch: where the run begins.
        key: the random key of the run.
        device: where the worker runs.
        fresh: begin with new optimizer state.

    Raises:
        InputError: as `fitting`.
    """
    versions, optimizer, state = fitting(plan, worker, f, layers, batch, fresh)
    if fresh:
        optimizer = jax.jit(f.init_optimizer)(versions[max(versions)])
    accumulators = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), f.accumulators_spec)
    placed = jax.device_put((versions, optimizer, state, accumulators, {}, key), device)
    # Copied: an update cannot write into the memory of a NumPy array, which a CPU device shares.
    return WorkerState(*jax.tree.map(jnp.copy, placed))


def average_replicas(layers: Mapping[str, Plain]) -> dict[str, Plain]:
    """The layers of a snapshot with one layer state each: the mean over the replicas, whose own states are left out.

    Only floating-point numbers are averaged; others, such as counts, are those of the first replica.

    Args:
        layers: from `Snapshot.layers`, with any arrays.

    Raises:
        InputError: the replicas of a layer hold different arrays.
    """
    own = [layer_id for layer_id in layers if layer_of(layer_id, layers.keys() - {layer_id}) is None]
    return {layer_id: layers[layer_id] | ({"state": state} if (state := _mean_state(layers, layer_id)) else {}) for layer_id in own}


def _mean_state(layers: Mapping[str, Plain], layer_id: str) -> Plain:
    """The mean of a layer's state over the replicas, added in their order. What is the same in all of them is left as it is."""
    where = f"checkpoint: layer '{layer_id}', state"
    names = [own_name(layer_id, replica) for replica in range(_replicas(layers, layer_id))]
    first, *others = (checked_dict(layers[name].get("state", {}), where) for name in names)
    specs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), first)
    for name, other in zip(names[1:], others, strict=True):
        from_plain(specs, other, f"checkpoint: layer state of '{name}'", "do the replicas come from one run?")
    return jax.tree.map(_mean, first, *others)


def _mean(*parts: Any) -> Any:
    first, *others = map(np.asarray, parts)
    if not jnp.issubdtype(first.dtype, jnp.inexact) or all(first.tobytes() == other.tobytes() for other in others):
        return parts[0]
    return np.asarray(sum(others, first) * first.dtype.type(1 / len(parts)))  # the same bits as of a drain


def _replicas(layers: Mapping[str, Plain], layer_id: str) -> int:
    """How many replicas have layer state of their own."""
    return next(replica for replica in count(1) if own_name(layer_id, replica) not in layers)


def _without_empty(plain: Plain) -> Plain:
    return {
        name: inner
        for name, value in plain.items()
        if not isinstance(inner := _without_empty(value) if isinstance(value, dict) else value, dict) or inner
    }
