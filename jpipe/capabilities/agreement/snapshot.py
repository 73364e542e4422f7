"""Agreements in snapshots: the agreed weights, each pipeline's own weights, and agreements that are not applied yet."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jpipe.capabilities.agreement.option import agreement_applied, agreement_under_way, agrees
from jpipe.capabilities.agreement.program import Agree, SumChanges
from jpipe.capabilities.agreement.rule import ALREADY_AGREED, ALREADY_APPLIED, Agreed
from jpipe.capabilities.protocol import SnapshotHooks
from jpipe.plan import Plan
from jpipe.runtime._plain import Plain, checked_dict, from_plain, to_plain
from jpipe.runtime._snapshot import WorkerSnapshot, entry_name, replicas_in
from jpipe.runtime._transport import arrived
from jpipe.runtime.state import Fields, WorkerState, copied
from jpipe.stages._arrays import shardings_of
from jpipe.stages._compiled_stage import CompiledStage
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any


def changes_under_way(worker: WorkerState) -> Tree:
    """Return the mean of the changes of an agreement that is not applied yet, or None. It may be a `PendingTransfer`."""
    return next((pending["changes"] for pending in worker.updates.values() if "changes" in pending), None)


def last_agreed(stage: CompiledStage, agreed: Agreed, changes: Tree) -> Agreed:
    """Return the result of the last agreement that has begun, from the last one that the worker has applied.

    `changes` comes from `changes_under_way` for this worker or another replica of its stage.
    """
    mean = arrived(changes)
    if mean is None or mean in (ALREADY_AGREED, ALREADY_APPLIED):
        return agreed
    return stage.calls["agree"](copied(agreed), jax.device_put(mean, shardings_of(agreed.params)))


def agreed_params(stage: CompiledStage, worker: WorkerState) -> Tree:
    """Return the weights of the last agreement that has begun, including the frozen parameters."""
    agreed = last_agreed(stage, worker.capabilities["agreement"], changes_under_way(worker))
    return stage.functions.trained.joined(agreed.params, worker.weights.read(worker.weights.newest))


class AgreementSnapshot(SnapshotHooks):
    """The agreements in the snapshot of one worker."""

    def __init__(self, part: WorkerSnapshot) -> None:
        self._part = part
        self._under_way = agreement_under_way(part.plan, part.stage, part.newest)  # an agreement that is not applied yet
        self._changes: Tree = None  # the mean of the changes of this agreement

    def see(self, state: WorkerState) -> None:
        """Keep the mean of the changes of the agreement that is not applied yet, if a worker of the stage has it."""
        if self._changes is None and self._under_way is not None and self._under_way in state.updates:
            self._changes = state.updates[self._under_way].get("changes")

    def completes(self, update: int) -> type | None:
        plan, s = self._part.plan, self._part.stage
        if agreement_applied(plan, s, update) is not None:
            return Agree
        return SumChanges if plan.agree is not None and plan.agree.bits and agrees(plan, s, update) else None  # it changes the errors

    def is_complete(self) -> bool:
        return self._under_way is None or self._changes is not None

    def saved(self, layer_id: str) -> Plain:
        """Return the weights of a layer: the pipeline's own weights, and for the first pipeline also the agreed weights."""
        part = self._part
        own = {str(part.newest - v): to_plain(part.trained.part(params)[layer_id]) for v, params in part.versions.items()}
        plain: Plain = {"own": own}
        if self._under_way is not None and jax.tree.leaves(own) and arrived(self._changes) != ALREADY_APPLIED:
            plain["under_way"] = np.asarray(self._under_way)
        if errors := part.kept["agreement"].errors:
            plain["agreement_error"] = to_plain(errors[layer_id])
        if part.replica:
            return plain
        params = part.trained.joined(self._last_agreed.params, part.versions[part.newest])
        return plain | {
            "params": {"0": to_plain(params[layer_id])},
            "outer_momentum": to_plain(self._last_agreed.momentum.get(layer_id, {})),
        }

    @cached_property
    def _last_agreed(self) -> Agreed:
        """The result of the last agreement that began before the batch."""
        return last_agreed(self._part.compiled, self._part.kept["agreement"], self._changes)


def own_entries(plan: Plan, s: int, replica: int, layers: Mapping[str, Plain], entries: Iterable[str]) -> dict[str, Plain]:
    """Return the entries with a pipeline's own weights; empty if the snapshot has another number of pipelines."""
    with_own = [entry for entry in entries if "own" in layers[entry]]
    if any(replicas_in(layers, entry) != plan.replicas[s] for entry in with_own):
        return {}
    return {entry: layers[entry_name(entry, replica)] for entry in with_own}


def restored(f: StageFunctions, replica: int, layers: Mapping[str, Plain], *, fresh: bool) -> Agreed:
    """Return the `Agreed` of a snapshot. Momentum that it lacks begins with zeros, and so do errors of another number of pipelines."""
    params, momentum, errors = {}, {}, {}
    for entry in f.stack.ties.entries(f.stage.layers):
        where = f"checkpoint: layer '{entry}', parameters"
        newest = checked_dict(checked_dict(layers[entry].get("params", {}), where).get("0", {}), where)
        params[entry] = from_plain(f.specs.params[entry], newest, where)
    trained = f.trained.part(params)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), trained)
    for entry, blank in zeros.items() if f.capabilities["agree"].outer.momentum else ():
        saved = layers[entry].get("outer_momentum")
        momentum[entry] = (
            blank if saved is None else from_plain(blank, saved, f"checkpoint: layer '{entry}', momentum of the agreed weights")
        )
    for entry, blank in zeros.items() if f.capabilities["agree"].bits else ():
        of_pipelines = [layers.get(entry_name(entry, r), {}).get("agreement_error") for r in range(f.stage.replicas + 1)]
        same = None not in of_pipelines[:-1] and of_pipelines[-1] is None and not fresh
        where = f"checkpoint: layer '{entry}', rounding errors of agreements"
        errors[entry] = from_plain(blank, of_pipelines[replica], where) if same else blank
    return Agreed(trained, momentum, errors)


def restored_updates(plan: Plan, worker: int, f: StageFunctions, layers: Mapping[str, Plain], updates: int) -> dict[int, Fields]:
    """Return the entry for an agreement still pending at the save: whether its result must still be mixed in. Empty if none was pending."""
    s, replica = plan.workers[worker]
    if (begun := agreement_under_way(plan, s, updates)) is None:
        return {}
    own = own_entries(plan, s, replica, layers, f.stack.ties.entries(f.stage.layers))
    is_under_way = bool(own) and all(np.array_equal(plain.get("under_way"), begun) for plain in own.values())
    return {begun: {"changes": ALREADY_AGREED if is_under_way else ALREADY_APPLIED}}
