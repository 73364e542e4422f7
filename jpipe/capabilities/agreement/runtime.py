"""How agreements run: programs, instructions, the arrays that a worker keeps, and the weights that evaluations read."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.capabilities.agreement.few_bits import Bits, mean_of_sent, pack, sent_changes
from jpipe.capabilities.agreement.option import Agreement
from jpipe.capabilities.agreement.program import Agree, SumChanges
from jpipe.capabilities.agreement.rule import (
    ALREADY_AGREED,
    ALREADY_APPLIED,
    Agreed,
    agree,
    agree_at_once,
    changes,
    like_agreed,
    mean_changes,
    mix,
)
from jpipe.capabilities.agreement.snapshot import AgreementSnapshot, agreed_params, own_entries, restored, restored_updates
from jpipe.capabilities.agreement.watch import ChangesWatcher, waits_for
from jpipe.capabilities.protocol import RuntimeHooks
from jpipe.plan import Plan
from jpipe.runtime._transport import arrived
from jpipe.runtime._worker import Worker
from jpipe.stages._arrays import Arrays
from jpipe.stages._calls import Call
from jpipe.stages.functions._stage_functions import StageFunctions
from jpipe.stages.functions._update import add

Tree = Any


class _Words(NamedTuple):
    """The description of what a process waits for; it is converted to text only when it is printed."""

    worker: int
    update: int

    def __str__(self) -> str:
        return f"the mean of the pipelines' changes up to update {self.update} of the stage of worker {self.worker}"


def sum_changes(worker: Worker, i: SumChanges) -> None:
    """Contribute this pipeline's changes. The last pipeline of this process starts the sum, and all its pipelines get the mean."""
    state, update, calls = worker.state, i.batch + worker.version_shift, worker.calls
    agreed, own = state.capabilities["agreement"], worker.functions.trained.part(state.weights.read(update + 1))
    words = _Words(i.worker, update)
    if _agreement(worker.functions).bits:
        sent, errors = calls["sent_changes"](agreed.params, own, agreed.errors)
        state.capabilities["agreement"] = agreed._replace(errors=errors)
        means = worker.transport.sum_gathered(i, update, sent, calls["mean_of_sent"], words)
    else:
        part = calls["changes"](agreed.params, own)
        means = worker.transport.all_reduce(i, update, part, calls["add_changes"], calls["mean_changes"], words)
    for w, mean in means.items():
        worker.workers[w].change_update(update, changes=mean)


def move_agreed(worker: Worker, i: Agree) -> None:
    """Move the agreed weights. The pipeline continues from the agreed weights, or from a mixture of them and its own weights."""
    state, update, begun = worker.state, i.batch + worker.version_shift, i.begun + worker.version_shift
    kept, trained = state.capabilities, worker.functions.trained
    mean = arrived(state.updates[begun]["changes"])
    worker.change_update(begun, changes=None)
    if mean == ALREADY_APPLIED:
        return
    if not _agreement(worker.functions).delay:
        kept["agreement"], params = worker.calls["agree"](kept["agreement"], mean)
    else:
        if mean != ALREADY_AGREED:
            kept["agreement"] = worker.calls["agree"](kept["agreement"], mean)
        params = worker.calls["mix"](trained.part(state.weights.read(update + 1)), kept["agreement"].params)
    worker.changed("weights", update + 1)
    state.weights = state.weights.with_params(update + 1, trained.joined(params, worker.frozen))


def _agreement(f: StageFunctions) -> Agreement:
    return f.capabilities["agree"]


def calls(a: Arrays) -> dict[str, Call]:
    """Return the programs with which parallel pipelines agree on the weights of a stage."""
    f, params, agreed = a.functions, a.trained, specs(a)
    agreement = _agreement(f)
    outer = agreement.outer
    sums = (
        _sums_of_sent(a, agreement.bits)
        if agreement.bits
        else {
            "changes": Call(changes, (), (params, params), params),
            "add_changes": Call(add, (), (params, params), params),
            "mean_changes": Call(partial(mean_changes, f.stage.replicas), (0,), (params,), params),
        }
    )
    if not agreement.delay:
        return {**sums, "agree": Call(partial(agree_at_once, outer), (0, 1), (agreed, params), (agreed, params))}
    # The mean is not donated, because a snapshot may still read it. No other program makes the agreed weights, so their bits are equal
    # everywhere.
    return {
        **sums,
        "agree": Call(partial(agree, outer), (0,), (agreed, params), agreed),
        "mix": Call(partial(mix, agreement.mixing), (0,), (params, params), params),
    }


def _sums_of_sent(a: Arrays, bits: Bits) -> dict[str, Call]:
    """Return the programs with which pipelines send their changes in few bits."""
    params, sent = a.trained, gathered(a)
    return {
        "sent_changes": Call(partial(sent_changes, bits), (2,), (params, params, params), (sent, params)),
        "mean_of_sent": Call(partial(mean_of_sent, bits, params), (), ([sent] * a.functions.stage.replicas,), params),
    }


def gathered(a: Arrays) -> Tree:
    """Return the specs of the changes that a pipeline sends in few bits, or None."""
    bits = _agreement(a.functions).bits
    return a.whole(jax.eval_shape(partial(jax.tree.map, partial(pack, bits)), a.trained)) if bits else None


def specs(a: Arrays) -> Agreed:
    """Return the specs of the result of the last agreement."""
    return like_agreed(_agreement(a.functions), a.trained)


def fresh(f: StageFunctions, version: Tree, accumulators: Tree) -> Agreed:
    """Return the `Agreed` before the first update: copies of these weights, zero momentum and zero errors."""
    trained = f.trained.part(version)
    zeros = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), trained)
    # zeros are copied, too: a CPU device shares the memory of NumPy arrays
    return jax.tree.map(jnp.copy, like_agreed(_agreement(f), zeros)._replace(params=trained))


def version_read(plan: Plan, batch: int) -> int:
    """Return the version of the last agreement before a batch; with fragments, the earliest of their last agreements."""
    assert plan.agree is not None
    return min(plan.agree.last(s, plan.depth, batch) for s in range(plan.depth))


RUNTIME = RuntimeHooks(
    handlers={SumChanges: sum_changes, Agree: move_agreed},
    calls=calls,
    used_calls={
        SumChanges: lambda f, i: ("sent_changes", "mean_of_sent") if _agreement(f).bits else ("changes", "add_changes", "mean_changes"),
        Agree: lambda f, i: ("agree", "mix") if _agreement(f).delay else ("agree",),
    },
    specs=specs,
    fresh=fresh,
    summed=lambda arrays: arrays.trained,
    gathered=gathered,
    read=agreed_params,
    version_read=version_read,
    snapshot=AgreementSnapshot,
    own_entries=own_entries,
    restored=restored,
    restored_updates=restored_updates,
    waits_for=waits_for,
    watch=ChangesWatcher,
)
