"""How messages are compressed: messages between stages, and, with error feedback, the sums over replicas."""

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.capabilities.compressed_messages.bottleneck import add_bottlenecks
from jpipe.capabilities.compressed_messages.compress import compress, compressed_specs, decompress, key_of
from jpipe.capabilities.compressed_messages.option import Links
from jpipe.capabilities.compressed_messages.shards import bytes_of_given, specs_of_sent, with_feedback, without_compression
from jpipe.capabilities.protocol import Exchange, RuntimeHooks, SnapshotHooks, SumHooks
from jpipe.programs._instructions import AllReduce
from jpipe.runtime._plain import Plain, from_plain, to_plain
from jpipe.runtime._snapshot import WorkerSnapshot, entry_name
from jpipe.runtime._worker import Worker
from jpipe.stages._arrays import Arrays
from jpipe.stages._calls import Call, loss_specs
from jpipe.stages.functions._loss import loss_dtype
from jpipe.stages.functions._stage_functions import StageFunctions, rng_spec
from jpipe.stages.functions._update import add, finish

Tree = Any

ROOM = "compressed_messages"

# Messages between stages ---------------------------------------------------------------------------------------------------


def exchange(values: Mapping[str, Any]) -> Exchange:
    """Return how messages between stages and sums are compressed."""
    links: Links = values["links"]
    kinds = {"activation": links.activations, "gradient": links.gradients}

    def encode(message: str, tree: Tree, stage: int, rng: tuple[Any, Any] | None) -> Tree:
        kind = kinds[message]
        key = None if kind is None or rng is None or not links.draws else key_of(message, stage, rng)
        return compress(tree, kind, key)

    sums = None
    if links.sums is not None:
        sums = SumHooks(calls=("compress", "sum"), run=give_compressed, specs=specs_of_given, size=partial(bytes_of_given, links.sums))
    return Exchange(
        encode=encode,
        decode=lambda message, tree, specs: decompress(tree, kinds[message], specs),
        specs=lambda message, specs: compressed_specs(specs, kinds[message]),
        draws=links.draws,
        sums=sums,
    )


# Sums over replicas --------------------------------------------------------------------------------------------------------


def sum_compressed(f: StageFunctions, parts: Sequence[tuple[Tree, list[jax.Array]]]) -> tuple[Tree, list[jax.Array], Any]:
    """Sum the replicas' (accumulators with compressed gradients, layer state), or a piece of these, in order, and apply `finish`."""
    specs, of_replicas = f.accumulators_spec["gradients"], []
    for accumulators, state in parts:
        sent = accumulators["gradients"]
        gradients = without_compression(f.partition, f.capabilities["links"].sums, sent, {entry: specs[entry] for entry in sent})
        of_replicas.append(({**accumulators, "gradients": gradients}, state))
    return finish(f, reduce(add, of_replicas))


def calls(a: Arrays) -> dict[str, Call]:
    """Return the programs with which the replicas of a stage sum compressed gradients."""
    f, programs = a.functions, dict[str, Call]()
    links: Links = f.capabilities["links"]
    number = a.whole(jax.ShapeDtypeStruct((), loss_dtype()))
    rng = a.whole(rng_spec()) if links.rounding == "stochastic" else (None, None)
    for (piece, reduced), given in zip(a.sums.items(), specs_of_given(a), strict=True) if f.summing is not None else ():
        gradients = reduced[0]["gradients"]
        inputs = gradients, number, gradients, rng
        programs[f"compress{piece}"] = Call(partial(with_feedback, f), (2,), inputs, (given[0]["gradients"], gradients))
        total = *reduced, loss_specs(a, reduced[0])
        programs[f"sum{piece}"] = Call(partial(sum_compressed, f), (), ([given] * f.stage.replicas,), total)
    return programs


def specs_of_given(a: Arrays) -> list[tuple[Tree, list[Any]]]:
    """Return the specs of a replica's part, for each piece of a sum."""
    found = []
    for accumulators, averaged in a.sums.values():
        sent = specs_of_sent(a.functions.partition, a.functions.capabilities["links"].sums, accumulators["gradients"])
        found.append(({**accumulators, "gradients": a.place.specs(*sent)}, averaged))
    return found


def give_compressed(worker: Worker, i: AllReduce, accumulators: Tree, means: Tree) -> Mapping[int, Tree]:
    """Compress the accumulators of a replica, contribute the result to a sum, and keep the rounding error."""
    state, update = worker.state, i.batch + worker.version_shift
    links: Links = worker.functions.capabilities["links"]
    gradients, numbers = accumulators["gradients"], {name: tree for name, tree in accumulators.items() if name != "gradients"}
    weight = numbers.get("weight", state.updates[update].get("given_weight"))  # only the first piece has the weight
    rng = (np.uint32(update * worker.replicas + worker.replica), state.key) if links.rounding == "stochastic" else (None, None)
    before = state.capabilities[ROOM]
    sent, errors = worker.calls[f"compress{i.piece}"](gradients, weight, {entry: before[entry] for entry in gradients}, rng)
    state.capabilities[ROOM] = {**before, **errors}
    worker.consumed.keep((numbers, weight))  # the transfer may still read them
    worker.change_update(update, **{f"sums{i.piece}": None}, given_weight=weight if i.following else None)
    return worker.transport.sum_gathered(i, update, ({**numbers, "gradients": sent}, means), worker.calls[f"sum{i.piece}"])


# The errors of sums, in the state and in snapshots -------------------------------------------------------------------------


def specs(a: Arrays) -> Tree:
    """Return the specs of the rounding error of a replica's gradients, by entry."""
    return {} if a.functions.summing is None else a.accumulators["gradients"]


def fresh(f: StageFunctions, version: Tree, accumulators: Tree) -> Tree:
    """Return the rounding error before the first batch, which is zero."""
    return {} if f.summing is None else jax.tree.map(jnp.copy, accumulators["gradients"])


def restored(f: StageFunctions, replica: int, layers: Mapping[str, Plain], *, fresh: bool) -> Tree:
    """Return the rounding error of a replica's gradients from a snapshot.

    It is zero with new optimizer state, or if the snapshot has another number of replicas, or no compressed sums.
    """
    errors: dict[str, Tree] = {}
    for entry, specs in f.accumulators_spec["gradients"].items() if f.summing is not None else ():
        saved = [layers.get(entry_name(entry, r), {}).get("sum_error") for r in range(f.stage.replicas + 1)]
        if fresh or None in (*saved[:-1],) or saved[-1] is not None:
            errors[entry] = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), specs)
        else:
            errors[entry] = from_plain(specs, saved[replica], f"checkpoint: layer '{entry}', error of its compressed sums")
    return errors


class _Snapshot(SnapshotHooks):
    """The part of a snapshot of one worker with the rounding errors of its compressed sums."""

    def __init__(self, part: WorkerSnapshot) -> None:
        self._part = part

    def added(self, layer_id: str) -> Plain:
        errors = self._part.kept.get(ROOM, {})
        return {"sum_error": to_plain(errors[layer_id])} if layer_id in errors else {}


RUNTIME = RuntimeHooks(
    added_layers=add_bottlenecks,
    exchange=exchange,
    calls=calls,
    specs=specs,
    fresh=fresh,
    changed_by=AllReduce,
    restored=restored,
    snapshot=_Snapshot,
)
