"""How stages exchange the gradients of shared parameters, and update their copies of the parameters with the same program."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.capabilities.protocol import ApartHooks, RuntimeHooks, TransportHooks
from jpipe.capabilities.shared_parameters.option import ROOM, Groups
from jpipe.capabilities.shared_parameters.program import AddShared, TakeShared
from jpipe.programs._instructions import Receive, Send, Update
from jpipe.runtime._transport import arrived
from jpipe.runtime._worker import Worker
from jpipe.stages._arrays import Arrays
from jpipe.stages._bytes import nbytes
from jpipe.stages._calls import Call, update_calls
from jpipe.stages._compiled_stage import CompiledStage, UpdateNumber, update_kind
from jpipe.stages.functions._stage_functions import StageFunctions
from jpipe.stages.functions._update import update_entries

Tree = Any
Gradients = Mapping[str, Any]
"""Gradients of shared parameters, or their specs, by name."""


def _groups(f: StageFunctions) -> Groups:
    return f.capabilities[ROOM]


def _names(f: StageFunctions) -> dict[int, tuple[str, ...]]:
    """Return the shared parameters of each group that a stage belongs to, by the number of the group."""
    return {group: names for group, (stages, names) in enumerate(_groups(f)) if f.number in stages}


def _own(f: StageFunctions) -> list[str]:
    """Return all parameters that a stage shares with other stages."""
    return [name for names in _names(f).values() for name in names]


# Programs ------------------------------------------------------------------------------------------------------------------


def take_shared(accumulators: Tree, names: Sequence[str]) -> dict[str, jax.Array]:
    """Copy the gradients of these parameters, which other stages hold, too."""
    return {name: jnp.copy(accumulators["gradients"][name]) for name in names}


def add_shared(f: StageFunctions, group: int, accumulators: Tree, received: Mapping[int, Mapping[str, jax.Array]]) -> Tree:
    """Return the accumulators with the gradients of a group of shared parameters summed over its stages, in the order of the stages."""
    stages, names = _groups(f)[group]
    gradients = dict(accumulators["gradients"])
    for name in names:
        first, *later = (gradients[name] if s == f.number else received[s][name] for s in stages)
        gradients[name] = sum(later, first)
    return {**accumulators, "gradients": gradients}


def calls(a: Arrays) -> dict[str, Call]:
    """Return the programs that take and add gradients, and the programs that update each group."""
    f, gradients, weight = a.functions, a.accumulators["gradients"], a.accumulators["weight"]
    own = {name: gradients[name] for name in _own(f)}
    found = {"take_shared": Call(partial(take_shared, names=_own(f)), (), (a.accumulators,), own)}
    for group, names in _names(f).items():
        received = {s: {name: gradients[name] for name in _with(f, s)} for s in _groups(f)[group][0] if s != f.number}
        updated = tuple({name: tree[name] for name in names} for tree in (a.trained, a.optimizer, gradients))
        found[f"add_shared {group}"] = Call(partial(add_shared, f, group), (0,), (a.accumulators, received), a.accumulators)
        of_group = update_calls(partial(update_entries, f), updated, (weight, a.others, *a.position), updated)
        found |= {f"{kind} shared {group}": call for kind, call in of_group.items()}
    return found


def update_shared(stage: CompiledStage, call: str, trees: Sequence[Tree], weight: Any, others: Tree, number: UpdateNumber) -> Iterator[Any]:
    """Update each group of shared parameters with a separate program, which is the same at all stages that hold the group."""
    groups = _groups(stage.functions)
    for group, names in _names(stage.functions).items():
        arguments = ({name: tree[name] for name in names} for tree in trees)
        first = stage.position(number._replace(stage=groups[group][0][0]))  # the same at all stages
        yield stage.calls[f"{call} shared {group}"](*arguments, weight, others, *first)


# Instructions --------------------------------------------------------------------------------------------------------------


def run_take(worker: Worker, i: TakeShared) -> None:
    """Copy the gradients that other stages need."""
    update = i.batch + worker.version_shift
    worker.change_update(update, shared=worker.calls["take_shared"](worker.complete(update)))


def run_add(worker: Worker, i: AddShared) -> None:
    """Add the gradients of the other stages. The computation overwrites the accumulators."""
    update, stages = i.batch + worker.version_shift, _groups(worker.functions)[i.group][0]
    accumulators, received = worker.complete(update), worker.state.updates[update].get("received", {})
    gradients = {w: arrived(tree) for w, tree in received.items() if worker.plan.workers[w][0] in stages}
    worker.change_update(update, received={**received, **gradients})
    by_stage = {worker.plan.workers[w][0]: tree for w, tree in gradients.items()}
    worker.replace_complete(update, worker.calls[f"add_shared {i.group}"](accumulators, by_stage))


def _with(f: StageFunctions, other: int) -> list[str]:
    """Return the parameters that this stage shares with another stage."""
    return [name for stages, names in _groups(f) if {f.number, other} <= set(stages) for name in names]


def send(worker: Worker, i: Send, update: int) -> Gradients:
    """Return the gradients to send to another stage."""
    shared = worker.state.updates[update]["shared"]
    return {name: shared[name] for name in _with(worker.functions, worker.plan.workers[i.to][0])}


def receive(worker: Worker, i: Receive, update: int, tree: Tree) -> None:
    """Keep the gradients of another stage."""
    worker.change_update(update, received={**worker.state.updates.get(update, {}).get("received", {}), i.source: tree})


def specs(source: Arrays, to: Arrays) -> tuple[Gradients, Gradients]:
    """Return the specs of the gradients that one stage sends to another, at the sender and at the receiver."""
    names = _with(source.functions, to.functions.number)
    leaving, arriving = ({name: a.accumulators["gradients"][name] for name in names} for a in (source, to))
    return leaving, arriving


def costs(a: Arrays) -> dict[str, Any]:
    """Return for each group of shared parameters the bytes of its gradients; 0 if the stage does not hold the group."""
    f, gradients = a.functions, a.accumulators["gradients"]
    return {"shared": tuple(nbytes([gradients[name] for name in names]) if f.number in stages else 0 for stages, names in _groups(f))}


RUNTIME = RuntimeHooks(
    handlers={TakeShared: run_take, AddShared: run_add},
    messages={"shared": TransportHooks(send, specs, receive, lambda state, i, update: state.updates[update]["received"][i.source])},
    calls=calls,
    used_calls={
        TakeShared: lambda f, i: ["take_shared"],
        AddShared: lambda f, i: [f"add_shared {i.group}"],
        Update: lambda f, i: [f"{update_kind(i)} shared {group}" for group in _names(f)],
    },
    for_updates=("shared", "received"),
    apart=ApartHooks(_own, update_shared),
    costs=costs,
    copied=lambda f: [name for _, names in _groups(f) for name in names],
)
