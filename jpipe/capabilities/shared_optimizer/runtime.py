"""How replicas divide optimizer state: which layers each replica updates, and how it sends these weights to the others."""

from collections.abc import Collection, Sequence
from typing import Any

from jpipe.capabilities.protocol import RuntimeHooks, TransportHooks
from jpipe.capabilities.shared_optimizer.program import deal, lower_weights
from jpipe.plan import Plan
from jpipe.programs._instructions import Program, Receive, Send
from jpipe.runtime._transport import arrived
from jpipe.runtime._worker import Worker
from jpipe.runtime.state import WorkerState
from jpipe.stages._arrays import Arrays, Share
from jpipe.stages._bytes import arrays_of, nbytes
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any


def shares(plan: Plan, f: StageFunctions) -> tuple[Share | None, ...]:
    """Return the share of each replica of a stage, or a single None for a stage without replicas.

    The bytes of optimizer state per device are as even as possible without dividing a layer. All layers that share parameters, and these
    parameters, go to one replica, so that it has all their masters.
    """
    if f.stage.replicas == 1:
        return (None,)
    arrays, common = arrays_of(f), [entry for entry in f.specs.params if entry in f.apart]
    ties = f.stack.ties
    parts: dict[str, list[str]] = {}
    for entry in f.specs.params:
        if entry not in common:
            tied = entry in ties.first or any(name not in common for name in ties.shared.get(entry, {}).values())
            parts.setdefault("" if tied else entry, []).append(entry)
    sizes = [tuple(sum(nbytes(tree[entry]) for entry in part) for tree in (arrays.optimizer, arrays.trained)) for part in parts.values()]
    owners = deal([(size[0], size[1]) for size in sizes], f.stage.replicas)
    entries: list[list[str]] = [[] for _ in range(f.stage.replicas)]
    for owner, part in zip(owners, parts.values(), strict=True):
        entries[owner] += part
    return tuple(Share(tuple(exclusive), tuple(common)) for exclusive in entries)


def send(worker: Worker, i: Send, update: int) -> Tree:
    """Return the weights that the worker has updated, to send them."""
    share = worker.compiled.arrays.share
    assert share is not None
    return share.outgoing(worker.functions.trained.part(worker.state.weights.read(update + 1)))


def receive(worker: Worker, i: Receive, update: int, tree: Tree) -> None:
    """Put the weights that another replica has updated into the worker's version."""
    weights = worker.state.weights
    params = weights.read(update + 1) | worker.functions.trained.joined(arrived(tree), worker.frozen)
    worker.state.weights = weights.with_params(update + 1, params)


def received(state: WorkerState, i: Receive, update: int) -> Tree:
    """Return the weights of the version, which include the weights that another replica has updated."""
    return state.weights.read(update + 1)


def specs_of_message(source: Arrays, to: Arrays) -> tuple[Tree, Tree]:
    """Return the specs of a message between two replicas, at the sender and at the receiver."""
    assert source.share is not None
    return source.share.outgoing(source.trained), source.share.outgoing(to.trained)


def completes_read(plan: Plan, functions: Sequence[StageFunctions], batch: int, workers: Collection[int]) -> Program | None:
    """Return a program that completes predicted weights. These follow from optimizer state, and each replica has only a share of it."""
    predicting = [s for s, f in enumerate(functions) if f.predicts]
    return lower_weights(plan, predicting, batch, workers=workers) if predicting else None


RUNTIME = RuntimeHooks(
    shares=shares,
    messages={"weights": TransportHooks(send, specs_of_message, receive, received, copies=True)},
    completes_read=completes_read,
)
