"""Snapshots of a running pipeline, which copy each worker's arrays after its update; and workers restored from snapshots."""

import zlib
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.capabilities.protocol import hooks, made
from jpipe.capabilities.registry import programs_of, runtimes_for, runtimes_of
from jpipe.errors import InputError
from jpipe.model._precision import LossScale
from jpipe.model._subset import floats_of, with_floats
from jpipe.model.layerwise._optimizer import masters_of
from jpipe.ops import OPS
from jpipe.plan import Plan
from jpipe.programs._instructions import Compute, Update
from jpipe.runtime._interpreter import Event
from jpipe.runtime._plain import Plain, checked_dict, from_plain, overlaid, to_plain
from jpipe.runtime.state import Fields, WeightVersions, WorkerState
from jpipe.runtime.state._saved_optimizer import masters_in, with_buffers, without_prediction
from jpipe.schedules import SCHEDULES
from jpipe.stages._arrays import shardings_of, shares_of
from jpipe.stages._compiled_stage import CompiledStage
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any


class CopiesDiffer(RuntimeError):
    """Stages hold different bits of a shared parameter, because a device, a link or a program has failed."""


class Copy(NamedTuple):
    """The checksum of one worker's copy of a parameter that several stages hold."""

    parameter: int  # the number of the parameter in `Snapshot.copied`
    worker: int  # the worker that holds the copy
    checksum: int  # the CRC-32 of the newest version and the optimizer state


class Snapshot:
    """Copies the arrays for a checkpoint before one batch while the run continues, without draining, pausing or changing the run.

    Make a snapshot with `Pipeline.snapshot`. Pass it to `Pipeline.step` (and `drain`) as `observe`, from the step before the batch on,
    until it is `complete`. Each worker is copied right after its last update before the batch. Microbatches in flight are not copied: after
    `Pipeline.restore` they are computed again, from the weight versions that they read. The layer state of each replica is copied before
    the first forward of the batch. The copies take memory as long as this object exists. Arrays that `Plan.offload` keeps in host memory
    are copied there.

    Args:
        plan: the plan of the run.
        batch: the first batch of a restored run.
        workers: the stages of this process's workers, by worker.

    Attributes:
        plan: the plan of the run.
        batch: the first batch of a restored run.
        copied: the names of the parameters that several stages hold; the order is the same in all processes.
    """

    def __init__(self, plan: Plan, batch: int, workers: Mapping[int, CompiledStage]) -> None:
        self.batch = batch
        self.plan = plan = plan.counted
        self._parts = {w: WorkerSnapshot(plan, w, batch, stage) for w, stage in workers.items()}
        self._sums = tuple(kind for used in programs_of(plan) for kind in used.sums)
        functions = [stage.functions for stage in workers.values()][:1]
        copied = [(hook, f) for f in functions for hook in hooks("copied", runtimes_for(f.capabilities).values())]
        self.copied = tuple(name for names_of, f in copied for name in names_of(f))

    def __call__(self, event: Event) -> None:
        """Observe one instruction."""
        i = event.instruction
        self._parts[i.worker].see(event)
        if isinstance(i, self._sums):  # after this process's last replica, all its replicas have the sum
            for w in self.plan.stage_workers[self.plan.workers[i.worker][0]]:
                if w in self._parts:
                    self._parts[w].see_sum(event.state)

    def take(self, states: Mapping[int, WorkerState]) -> None:
        """Complete the snapshot, without copies, from the states of this process's workers with nothing in flight before the batch."""
        for w, part in self._parts.items():
            for other in self.plan.stage_workers[part.stage]:
                if other in states:
                    part.see_sum(states[other])
            part.take(states[w])

    @property
    def complete(self) -> bool:
        """Whether all workers of this process have been copied."""
        return all(part.complete for part in self._parts.values())

    def layers(self) -> dict[str, Plain]:
        """Return the arrays of this process's layers by layer id, in the form that `Pipeline.restore` takes.

        Each layer has these parts, unless they have no arrays:

        - `params`: the parameters by age: "0" is the newest version, "1" the version before it, and so on. Frozen parameters are only in
          "0".
        - `optimizer`: the optimizer state of the trained parameters.
        - `state`: the layer state.
        - `loss_scale`, if it is dynamic: the loss scales by age.

        Replicas differ only in layer state. The layer's entry has the layer state of the first replica; entries such as "block_0 replica 1"
        have the layer state of the other replicas. Some options of a plan change this:

        - `shard_optimizer`: the optimizer state of a layer is in the entry of the replica that updates the layer.
        - `agree`: `params` has one version, from the last agreement that began before the batch. Each replica's entry has the trained
          parameters of its pipeline by age (`own`), the pipeline's optimizer state (`optimizer`), and the update of an agreement that is
          not applied yet (`under_way`). `outer_momentum` belongs to the outer optimizer. With `bits`, each replica's entry has the
          rounding errors of its changes (`agreement_error`).
        - `Links.sums`: the entry of each replica has the rounding errors of its compressed gradients (`sum_error`).
        """
        assert self.complete
        return {name: plain for part in self._parts.values() for name, plain in part.layers().items()}

    def copies(self) -> list[Copy]:
        """Copy this process's copies of parameters that several stages hold to the host, and return their checksums."""
        assert self.complete
        copies = [(n, w, part) for n, name in enumerate(self.copied) for w, part in self._parts.items() if part.holds(name)]
        return [Copy(n, w, part.checksum(self.copied[n])) for n, w, part in copies]


_OTHER_OPTIMIZER = (
    "is it of another optimizer or precision? (ema_decay and accumulate_batches also change the optimizer.) To begin with new state, set "
    "fresh_optimizer=True (in a config resume.optimizer: reset)"
)

# One call copies a whole tree: a call for each leaf would delay the thread that dispatches the steps.
_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def entry_name(layer_id: str, replica: int) -> str:
    """Return the name of a replica's entry for a layer in a checkpoint."""
    return f"{layer_id} replica {replica}" if replica else layer_id


class WorkerSnapshot:
    """The part of the snapshot that is copied from one worker.

    Attributes:
        plan: the plan of the run.
        stage, replica: the numbers of the worker's stage and replica.
        compiled: the compiled stage of the worker.
        newest: the version that the batch begins with.
        versions: the weight versions that are copied, by number.
        kept: copies of the arrays that capabilities keep in the state, by the name of the capability.
    """

    def __init__(self, plan: Plan, worker: int, batch: int, stage: CompiledStage) -> None:
        f, self.compiled, self._share = stage.functions, stage, stage.arrays.share
        s, self.replica = plan.workers[worker]
        self.plan, self.stage = plan, s
        self._replicas = plan.replicas[s]
        self._first = batch * plan.microbatches
        self.newest = batch * plan.updates_per_batch(s)
        self._oldest = SCHEDULES[plan.schedule].version(plan, s, self._first + self.replica * plan.row_slices)
        self._all, self.trained = f.specs.params.keys(), f.trained
        self._ids, self._entries = f.stage.layers, f.counted  # a parameter that several stages hold is copied only at the first one
        self.versions: dict[int, Tree] = {}
        self._scales: dict[int, LossScale] = {}
        self._optimizer: Tree = None
        self.kept: dict[str, Tree] = {}
        self._state: Tree = None  # layer state after the last forward before the batch
        self._open: int | None = None  # a version that an update has made, but a capability must complete
        self._copies, of_capabilities = hooks("copy_for_snapshot", runtimes_of(plan)), made("snapshot", runtimes_of(plan), self)
        self._see, self._completes = hooks("see", of_capabilities), hooks("completes", of_capabilities)
        self._is_complete, self._saved = hooks("is_complete", of_capabilities), hooks("saved", of_capabilities)
        self._added = hooks("added", of_capabilities)
        self._last = self._completed_by(self.newest - 1)  # the instruction that completes the newest weights
        kept = runtimes_for(f.capabilities).items()
        self._kept_after = {name: hooks.changed_by or self._last for name, hooks in kept if hooks.specs is not None}
        self._has_begun = False  # whether the first forward of the batch has run

    @property
    def complete(self) -> bool:
        return self._optimizer is not None and self.newest in self.versions and all(hook() for hook in self._is_complete)

    def _completed_by(self, update: int) -> type:
        """Return the instruction that completes the version that an update makes."""
        return next((kind for hook in self._completes if (kind := hook(update)) is not None), Update)

    def see_sum(self, state: WorkerState) -> None:
        """Observe the state of the worker or of another replica after an instruction: a capability may have a sum over the replicas."""
        for hook in self._see:
            hook(state)

    def take(self, state: WorkerState) -> None:
        """Keep the arrays of the worker's state before the batch, with nothing in flight."""
        self._optimizer, self._state = state.optimizer, state.layer_state
        self.kept = {name: state.capabilities[name] for name in self._kept_after}
        for version in set(state.weights.versions) & set(range(self._oldest, self.newest + 1)):
            self.versions[version] = state.weights.read(version)
            if state.loss_scales:
                self._scales[version] = state.loss_scales[version]

    def see(self, event: Event) -> None:
        if self.complete:
            return
        i, state = event.instruction, event.state
        is_last = getattr(i, "batch", None) == self.newest - 1
        if isinstance(i, Compute) and OPS[i.op].begins:
            self._has_begun |= i.microbatch >= self._first
            if self._first - self._replicas * self.plan.row_slices <= i.microbatch < self._first:  # the worker's last rows before the batch
                self._state = _copied(state.layer_state)
        if type(i) is Update:
            self._open = None if self._completed_by(i.batch) is Update else i.batch + 1
        elif self._open is not None and type(i) is self._completed_by(self._open - 1):
            self._open = None
        if kept := {name: state.capabilities[name] for name, kind in self._kept_after.items() if type(i) is kind and is_last}:
            self.kept |= _copied(kept)
        if type(i) is self._last and is_last:
            self._optimizer = self._copied("optimizer", state.optimizer)
            if not self._has_begun:  # the update may have averaged the layer state over the replicas
                self._state = _copied(state.layer_state)
        self.see_sum(state)
        if self._has_begun or self._optimizer is not None:  # the oldest version that the batch reads may be retired before the last update
            for version in set(state.weights.versions) - self.versions.keys() - {self._open}:
                params = state.weights.read(version)
                is_whole = params.keys() == self._all  # entries that other replicas update may still be missing
                if self._oldest <= version <= self.newest and is_whole:
                    # Nothing writes into frozen parameters.
                    self.versions[version] = self.trained.joined(self._copied("versions", dict(self.trained.part(params))), params)
                    if state.loss_scales:
                        self._scales[version] = state.loss_scales[version]

    def _copied(self, what: Literal["optimizer", "versions"], tree: Tree) -> Tree:
        """Copy arrays on the device, or to another memory if a capability requires that: a copy may not fit on the device."""
        for copy in self._copies:
            if (copies := copy(self.plan, self.stage, what, tree)) is not None:
                return copies
        return _copied(tree)

    def holds(self, entry: str) -> bool:
        return entry in self._optimizer

    def checksum(self, entry: str) -> int:
        """Return the CRC-32 of the newest version and the optimizer state of an entry."""
        checksum = 0
        for leaf in jax.tree.leaves(to_plain((self.versions[self.newest][entry], self._optimizer[entry]))):
            checksum = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data, checksum)
        return checksum

    def layers(self) -> dict[str, Plain]:
        layers: dict[str, Plain] = {layer_id: {} for layer_id in (*self._entries, *self._ids)}
        has_all = self.replica == 0 or self.plan.has_parallel_pipelines  # all optimizer state, not only what this replica updates
        updated = self._optimizer if has_all else () if self._share is None else self._share.exclusive
        for layer_id, plain in layers.items():
            if self._saved:
                plain |= self._saved[0](layer_id)
            elif self.replica == 0:
                older = {v: self.trained.part(params) for v, params in self.versions.items() if v != self.newest}
                versions = older | {self.newest: self.versions[self.newest]}
                ages = {str(self.newest - v): to_plain(params[layer_id]) for v, params in versions.items()}
                plain["params"] = {age: params for age, params in ages.items() if params}
                plain["loss_scale"] = {str(self.newest - v): to_plain(scale) for v, scale in self._scales.items()}
            if layer_id in updated:
                plain["optimizer"] = to_plain(self._optimizer[layer_id])
            if layer_id in self._state:
                plain["state"] = to_plain(self._state[layer_id])
            for added in self._added:
                plain |= added(layer_id)
        named = {entry_name(layer_id, self.replica): _without_empty(plain) for layer_id, plain in layers.items()}
        return {name: plain for name, plain in named.items() if plain or self.replica == 0}


def layer_of(name: str, ids: Iterable[str]) -> str | None:
    """Return the layer in `ids` to which a name in `Snapshot.layers` belongs, or None."""
    if name in ids:
        return name
    layer_id, _, replica = name.rpartition(" replica ")
    return layer_id if replica.isdecimal() and layer_id in ids else None


def shared_place(name: str, layers: Mapping[str, Plain]) -> tuple[str, str] | None:
    """Return (layer id, path) of the first place of a shared parameter, or None if no shared parameter has this name."""
    layer_id, _, path = name.partition(" shared ")
    return (layer_id, path) if path and layer_id in layers and "state" not in layers[name] and "params" in layers[name] else None


def with_optimizers(layers: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the layers, each with its optimizer state, which may be in another entry of `layers` with `Plan.shard_optimizer`."""
    merged = dict(layers)
    for name, plain in layers.items():
        layer_id, between, replica = name.rpartition(" replica ")
        # A layer of the model may have a name like the entry of a replica, but then it has parameters, or no optimizer state.
        if between and replica.isdecimal() and layer_id in layers and "optimizer" in plain and not {"params", "own"} & plain.keys():
            merged[layer_id] = {**merged[layer_id], "optimizer": plain["optimizer"]}
    return merged


def fitting(
    plan: Plan, worker: int, f: StageFunctions, layers: Mapping[str, Plain], batch: int, fresh: bool
) -> tuple[dict[int, Tree], Tree, Tree, dict[str, Tree]]:
    """Return a worker's weights by version, optimizer state unless `fresh`, layer state and `capabilities`, from a snapshot.

    `plan` is the plan of the restored run, which begins with `batch`. The newest version replaces versions that the snapshot lacks. If the
    pipeline does not flush and has equally many replicas, layer state comes from the same replica; otherwise it is the mean over the saved
    replicas. Without `sync_state` it always comes from one replica. Raise InputError if a layer is missing, or has another shape.
    """
    s, replica = (plan := plan.counted).workers[worker]
    newest = batch * plan.updates_per_batch(s)
    oldest = SCHEDULES[plan.schedule].version(plan, s, batch * plan.microbatches + replica * plan.row_slices)
    entries = f.stack.ties.entries(f.stage.layers)
    for layer_id in (*entries, *f.stage.layers):
        if layer_id not in layers:
            raise InputError(f"checkpoint: layer '{layer_id}' of the model is missing; is it of another model?")
    of_capabilities = hooks("own_entries", runtimes_of(plan))
    own: dict[str, Plain] = of_capabilities[0](plan, s, replica, layers, entries) if of_capabilities else {}

    def params_of(layer_id: str, age: int) -> Tree:
        where = f"checkpoint: layer '{layer_id}', parameters"
        ages = checked_dict(layers[layer_id].get("params", {}), where)
        latest = checked_dict(ages.get("0", {}), where)
        if layer_id in own:  # the entry has only trained parameters
            ages = checked_dict(own[layer_id].get("own", {}), where)
            latest = overlaid(latest, checked_dict(ages.get("0", {}), where))
        return from_plain(f.specs.params[layer_id], overlaid(latest, checked_dict(ages.get(str(age), {}), where)), where)

    def state_of(layer_id: str) -> Tree:
        spec, count, where = f.specs.state[layer_id], replicas_in(layers, layer_id), f"checkpoint: layer '{layer_id}', state"
        state = from_plain(spec, layers[entry_name(layer_id, replica % count)].get("state", {}), where)
        if f.average_state is None or (f.average_state == "read" and count == plan.replicas[s]):
            return state
        return with_floats(state, floats_of(from_plain(spec, _mean_state(layers, layer_id), where)))

    versions = {v: {entry: params_of(entry, newest - v) for entry in entries} for v in range(oldest, newest + 1)}
    optimizer = None
    if not fresh:
        share = shares_of(plan, f)[replica]
        optimizer = {
            layer_id: from_plain(
                f.optimizer_spec[layer_id],
                with_buffers(f, layer_id, own.get(layer_id, layers[layer_id]).get("optimizer", {})),
                f"checkpoint: layer '{layer_id}', optimizer state",
                _OTHER_OPTIMIZER,
            )
            for layer_id in (entries if share is None else share.part(f.optimizer_spec))
        }
    restoring = runtimes_for(f.capabilities)
    kept = {name: hooks.restored(f, replica, layers, fresh=fresh) for name, hooks in restoring.items() if hooks.restored is not None}
    return versions, optimizer, {layer_id: state_of(layer_id) for layer_id in f.stage.layers}, kept


def for_stage(f: StageFunctions, layers: Mapping[str, Plain], fresh: bool) -> Mapping[str, Plain]:
    """Put the optimizer state of a snapshot into each layer, unless `fresh`, and remove the prediction if the stage uses none."""
    layers = with_optimizers(layers)
    if f.predicts and not fresh:
        return layers
    names = layers.keys() & {*f.stack.ties.entries(f.stage.layers), *f.stage.layers}
    return {**layers, **{name: without_prediction(layers[name]) for name in names}}


def restored_worker(
    plan: Plan, worker: int, stage: CompiledStage, layers: Mapping[str, Plain], batch: int, key: jax.Array, fresh: bool
) -> WorkerState:
    """Return a worker before `batch` with the arrays of a snapshot and nothing in flight; `fresh`: with new optimizer state."""
    f, place, a = stage.functions, stage.place, stage.arrays
    layers = for_stage(f, layers, fresh)
    versions, optimizer, state, kept = fitting(plan, worker, f, layers, batch, fresh)
    if fresh:
        newest = a.updated(versions[max(versions)])
        masters = {layer_id: masters_in(layers[layer_id]) if f.precision.has_masters else None for layer_id in newest}
        where = "checkpoint: layer '{}', masters of its parameters"
        precise = {
            layer_id: params
            if (saved := masters[layer_id]) is None
            else from_plain(jax.eval_shape(masters_of, f.specs.params[layer_id]), saved, where.format(layer_id))
            for layer_id, params in newest.items()
        }
        placed = jax.device_put(precise, shardings_of(place.specs(precise, f.partition.of_params(precise))))
        optimizer = jax.jit(f.init_optimizer)(placed)
    accumulators = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), f.accumulators_spec)
    scales = _restored_scales(f, layers, versions)
    last = max(versions)
    parts = {v: params if v == last else f.trained.part(params) for v, params in versions.items()}
    param_specs = {v: a.params if v == last else a.trained for v in versions}
    specs: Tree = param_specs, a.optimizer, a.state, a.accumulators, a.whole(key), dict.fromkeys(scales, a.scale), a.capabilities
    # The arrays are copied, because a CPU device shares the memory of NumPy arrays, and an update cannot write there.
    placed = jax.device_put((parts, optimizer, state, accumulators, key, scales, kept), shardings_of(specs))
    copied, optimizer, state, accumulators, key, scales, kept = jax.tree.map(jnp.copy, placed)
    weights = WeightVersions({v: f.trained.joined(params, copied[last]) for v, params in copied.items()})
    updates = dict[int, Fields]()
    for restored_updates in hooks("restored_updates", runtimes_of(plan)):
        updates |= restored_updates(plan, worker, f, layers, last)
    return WorkerState(weights, optimizer, state, accumulators, key, updates=updates, loss_scales=scales, capabilities=kept)


def _restored_scales(f: StageFunctions, layers: Mapping[str, Plain], versions: Iterable[int]) -> dict[int, LossScale]:
    """Return the dynamic loss scale of each version, the initial one if the snapshot has none, or nothing if the run has none."""
    if f.precision.dynamic_scale is None:
        return {}
    where = f"checkpoint: layer '{f.stage.layers[0]}', loss scale"
    ages = checked_dict(layers[f.stage.layers[0]].get("loss_scale", {}), where)
    saved = {age: from_plain(f.scale_spec, scale, where) for age, scale in ages.items()}
    newest = saved.get("0", f.precision.dynamic_scale.first())
    return {v: saved.get(str(max(versions) - v), newest) for v in versions}


def average_replicas(layers: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the layers of a snapshot with the mean of the replicas' layer states, and without the entries of single replicas.

    Only floating-point arrays are averaged; other arrays, such as counts, are taken from the first replica.

    Args:
        layers: the layers from `Snapshot.layers`, with arrays of any kind.

    Raises:
        InputError: the replicas of a layer hold different arrays.
    """
    layers = with_optimizers(layers)
    ids = [layer_id for layer_id in layers if layer_of(layer_id, layers.keys() - {layer_id}) is None]
    return {layer_id: layers[layer_id] | ({"state": state} if (state := _mean_state(layers, layer_id)) else {}) for layer_id in ids}


def _mean_state(layers: Mapping[str, Plain], layer_id: str) -> Plain:
    """Return the mean of a layer's state over the replicas, summed in order. Arrays that are equal in all replicas stay unchanged."""
    where = f"checkpoint: layer '{layer_id}', state"
    names = [entry_name(layer_id, replica) for replica in range(replicas_in(layers, layer_id))]
    first, *remaining = (checked_dict(layers[name].get("state", {}), where) for name in names)
    specs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), first)
    for name, other in zip(names[1:], remaining, strict=True):
        from_plain(specs, other, f"checkpoint: layer state of '{name}'", "do the replicas come from one run?")
    return jax.tree.map(_mean, first, *remaining)


def _mean(*parts: Any) -> Any:
    first, *remaining = map(np.asarray, parts)
    if not jnp.issubdtype(first.dtype, jnp.inexact) or all(first.tobytes() == other.tobytes() for other in remaining):
        return parts[0]
    return np.asarray(sum(remaining, first) * first.dtype.type(1 / len(parts)))  # the same bits as in a drain


def replicas_in(layers: Mapping[str, Plain], layer_id: str) -> int:
    """Return the number of replicas that have an entry for the layer."""
    return next(replica for replica in count(1) if entry_name(layer_id, replica) not in layers)


def _without_empty(plain: Plain) -> Plain:
    return {
        name: inner
        for name, value in plain.items()
        if not isinstance(inner := _without_empty(value) if isinstance(value, dict) else value, dict) or inner
    }
