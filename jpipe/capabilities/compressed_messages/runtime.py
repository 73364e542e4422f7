"""How messages are compressed: those between stages about a microbatch, and with error feedback what replicas sum."""

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.capabilities.compressed_messages.compress import compress, compressed_specs, decompress
from jpipe.capabilities.compressed_messages.option import Kind, Links, Message
from jpipe.capabilities.compressed_messages.shards import bytes_of_sent, specs_of_sent, with_feedback, without_compression
from jpipe.capabilities.protocol import Encoding, RuntimeHooks, SnapshotHooks, SumHooks
from jpipe.programs._instructions import AllReduce
from jpipe.runtime._interpreter import Event
from jpipe.runtime._plain import Plain, from_plain, to_plain
from jpipe.runtime._snapshot import Part, copied_at_once, entry_name
from jpipe.runtime._worker import Worker
from jpipe.stages._arrays import Arrays
from jpipe.stages._bytes import nbytes
from jpipe.stages._calls import Call
from jpipe.stages.functions._loss import loss_dtype
from jpipe.stages.functions._specs import rng_spec
from jpipe.stages.functions._stage import StageFunctions
from jpipe.stages.functions._sums import add, finish

Tree = Any

ROOM = "compressed_messages"

# Messages between stages ---------------------------------------------------------------------------------------------------

_FIELDS: dict[str, Message] = {"activation": "activations", "gradient": "gradients"}
_PURPOSES: dict[Message, int] = {"activations": 6, "gradients": 7, "sums": 8}  # of a key of the run; those of the layers are below


def encoding(links: Links) -> Encoding:
    """Return how messages between stages are compressed."""
    kinds = {message: links.kind(name) for message, name in _FIELDS.items()}
    return Encoding(
        encode=lambda message, tree, stage, rng: compress_message(links, tree, _FIELDS[message], stage, rng),
        decode=lambda message, tree, specs: decompress(tree, kinds[message], specs),
        specs=lambda message, specs: compressed_specs(specs, kinds[message]),
        draws=links.draws,
    )


def compress_message(links: Links, tree: Tree, message: Message, stage: int, rng: tuple[Any, Any] | None) -> Tree:
    """Compress what a stage sends about a microbatch.

    Args:
        links: how.
        tree: what it sends.
        message: what that is.
        stage: the number of the stage.
        rng: (microbatch, key of the run), which are read for stochastic rounding; None: round to nearest.
    """
    kind = links.kind(message)
    return compress(tree, kind, None if kind is None or rng is None or not links.draws else _key(message, stage, rng))


def _key(message: Message, stage: int, rng: tuple[Any, Any]) -> jax.Array:
    """Return the key of a message of a stage, from its number and the key of the run."""
    number, key = rng
    for fixed in (_PURPOSES[message], stage, number):
        key = jax.random.fold_in(key, fixed)
    return key


# Sums over replicas --------------------------------------------------------------------------------------------------------


def sums(links: Links) -> SumHooks | None:
    """Return how replicas sum compressed gradients; None if they sum them as they are."""
    if links.sums is None:
        return None
    return SumHooks(calls=("compress", "sum"), run=give_compressed, specs=specs_of_given, size=partial(bytes_of_given, links.sums))


def _kind(f: StageFunctions) -> Kind:
    """Return how the replicas of a stage that compress their gradients do it."""
    kind: Kind = f.capabilities["links"].sums
    return kind


def compress_sum(f: StageFunctions, gradients: Tree, weight: jax.Array, errors: Tree, rng: tuple[Any, Any]) -> tuple[Tree, Tree]:
    """Compress what a replica gives to a sum, or one part of it.

    Args:
        f: of the stage.
        gradients: from the accumulators of the replica.
        weight: of its microbatches.
        errors: what rounding has lost of its gradients before.
        rng: (number of the update and the replica, key of the run); (None, None): round to nearest.

    Returns:
        The compressed gradients; the new errors.
    """
    keys = None
    if rng[1] is not None:
        key = _key("sums", f.number, rng)
        keys = {entry: jax.random.fold_in(key, n) for n, entry in enumerate(sorted(f.specs.params))}
    return with_feedback(f.partition, _kind(f), gradients, weight, errors, keys)


def sum_compressed(f: StageFunctions, parts: Sequence[tuple[Tree, list[jax.Array]]]) -> tuple[Tree, list[jax.Array], Any]:
    """Sum what all replicas have sent, in their order, and finish it as `finish` does.

    Args:
        f: of the stage.
        parts: of each replica (accumulators with compressed gradients, layer state), or one part of them.
    """
    specs, of_replicas = f.accumulators_spec["gradients"], []
    for accumulators, state in parts:
        sent = accumulators["gradients"]
        gradients = without_compression(f.partition, _kind(f), sent, {entry: specs[entry] for entry in sent})
        of_replicas.append(({**accumulators, "gradients": gradients}, state))
    return finish(f, reduce(add, of_replicas))


def calls(a: Arrays) -> dict[str, Call]:
    """Return the programs with which the replicas of a stage sum compressed gradients, or each part of them."""
    f, programs = a.functions, dict[str, Call]()
    number = a.whole(jax.ShapeDtypeStruct((), loss_dtype()))
    rng = a.whole(rng_spec()) if f.capabilities["links"].rounding == "stochastic" else (None, None)
    for part, given in zip(a.parts, specs_of_given(a), strict=True) if f.sums is not None else ():
        suffix, (accumulators, averaged) = "" if part is None else f" {part}", a.reduced_part(part)
        gradients = accumulators["gradients"]
        inputs = gradients, number, gradients, rng
        programs[f"compress{suffix}"] = Call(partial(compress_sum, f), (2,), inputs, (given[0]["gradients"], gradients))
        total = accumulators, averaged, (number, number) if "loss" in accumulators else None
        programs[f"sum{suffix}"] = Call(partial(sum_compressed, f), (), ([given] * f.stage.replicas,), total)
    return programs


def specs_of_given(a: Arrays) -> list[tuple[Tree, list[Any]]]:
    """Return what a replica gives to the sum, or to that of each part of the stage."""
    found = []
    for accumulators, averaged in map(a.reduced_part, a.parts):
        sent = specs_of_sent(a.functions.partition, _kind(a.functions), accumulators["gradients"])
        found.append(({**accumulators, "gradients": a.place.specs(*sent)}, averaged))
    return found


def bytes_of_given(kind: Kind, accumulators: Tree) -> int:
    """Return the bytes that a replica sends to each other one for a sum of accumulators."""
    return bytes_of_sent(kind, accumulators["gradients"]) + nbytes({**accumulators, "gradients": None})


def give_compressed(worker: Worker, i: AllReduce, accumulators: Tree, means: Tree) -> Mapping[int, Tree]:
    """Give compressed accumulators, which take the place of those of the replica, to a sum, and keep what rounding has lost."""
    state, update, name = worker.state, i.batch + worker.version_shift, "" if i.part is None else f" {i.part}"
    pending, last = state.updates[update], len(worker.plan.stages[worker.stage].sum_parts) - 1
    gradients, numbers = accumulators["gradients"], {name: number for name, number in accumulators.items() if name != "gradients"}
    weight = pending["given_weight"] if i.part else numbers["weight"]
    rng = (
        (np.uint32(update * worker.replicas + worker.replica), state.key)
        if worker.functions.capabilities["links"].rounding == "stochastic"
        else (None, None)
    )
    before = state.capabilities[ROOM]
    sent, errors = worker.calls[f"compress{name}"](gradients, weight, {entry: before[entry] for entry in gradients}, rng)
    state.capabilities[ROOM] = {**before, **errors}
    worker.consumed.keep((numbers, weight))  # the transfer may read them later
    sums = None if i.part is None else {part: tree for part, tree in pending["sums"].items() if part != i.part}
    worker.change_update(update, sums=sums or None, given_weight=weight if i.part is not None and i.part < last else None)
    return worker.transport.sum_gathered(i, update, ({**numbers, "gradients": sent}, means), worker.calls[f"sum{name}"])


# The errors of sums, in the state and in snapshots -------------------------------------------------------------------------


def specs(a: Arrays) -> Tree:
    """Return the specs of what rounding has lost of the gradients of a replica, by entry."""
    return {} if a.functions.sums is None else a.accumulators["gradients"]


def fresh(f: StageFunctions, version: Tree, accumulators: Tree) -> Tree:
    """Return what rounding has lost before the first batch: nothing."""
    return {} if f.sums is None else jax.tree.map(jnp.copy, accumulators["gradients"])


def restored(f: StageFunctions, replica: int, layers: Mapping[str, Plain], *, fresh: bool) -> Tree:
    """Return what rounding has lost of the gradients of a replica, from a snapshot.

    It begins with zeros with new optimizer state, and where the snapshot is not of as many replicas that compress what they sum.
    """
    errors: dict[str, Tree] = {}
    for entry, specs in f.accumulators_spec["gradients"].items() if f.sums is not None else ():
        saved = [layers.get(entry_name(entry, r), {}).get("sum_error") for r in range(f.stage.replicas + 1)]
        if fresh or None in (*saved[:-1],) or saved[-1] is not None:
            errors[entry] = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), specs)
        else:
            errors[entry] = from_plain(specs, saved[replica], f"checkpoint: layer '{entry}', error of its compressed sums")
    return errors


class _Snapshot:
    """What rounding has lost of the gradients of one worker, in the updates before the batch of a snapshot."""

    def __init__(self, part: Part) -> None:
        self._part, self._errors = part, dict[str, Tree]()
        self._last = len(part.plan.stages[part.stage].sum_parts) - 1

    def see(self, event: Event) -> None:
        """Copy the errors right after the last sum, which later sums change."""
        i = event.instruction
        if isinstance(i, AllReduce) and i.batch + 1 == self._part.newest and i.part in (None, self._last):
            self._errors = copied_at_once(event.state.capabilities[ROOM])

    def added(self, layer_id: str) -> dict[str, Plain]:
        """Return what is added to the entry of the replica for a layer."""
        return {"sum_error": to_plain(self._errors[layer_id])} if layer_id in self._errors else {}


def snapshot(part: Part) -> SnapshotHooks:
    """Return what a snapshot of one worker has of compressed sums."""
    errors = _Snapshot(part)
    return SnapshotHooks(see=errors.see, added=errors.added)


RUNTIME = RuntimeHooks(encoding=encoding, sums=sums, calls=calls, specs=specs, fresh=fresh, restored=restored, snapshot=snapshot)
