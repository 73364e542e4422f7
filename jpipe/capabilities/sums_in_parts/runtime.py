"""How single parts of a stage are computed and summed."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jpipe.capabilities.protocol import RuntimeHooks
from jpipe.capabilities.sums_in_parts.program import ComputePart, SumPart, op_of_part
from jpipe.capabilities.sums_in_parts.stage import StageInParts
from jpipe.ops import OPS, Op
from jpipe.runtime._transport import arrived
from jpipe.runtime._worker import Worker
from jpipe.stages._arrays import Arrays
from jpipe.stages._bytes import nbytes
from jpipe.stages._calls import Call, sum_devices
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any


# Programs of a stage -------------------------------------------------------------------------------------------------------


def ops(f: StageFunctions) -> dict[str, Op]:
    """Return the ops for the parts of a stage, by the name of the call, such as `backward 0`."""
    parts = len(f.stage.sum_parts)
    of_parts = [op_of_part(op, n, parts) for op in OPS.values() if op.trains and op.finishes for n in range(parts)]
    return {op.function: op for op in of_parts}


def calls(a: Arrays) -> dict[str, Any]:
    """Return, by name, functions that return the calls of these ops."""
    whole, parts = [op for op in OPS.values() if op.trains and op.finishes], range(len(a.functions.stage.sum_parts))
    found: dict[str, Any] = {f"{op.function} {n}": partial(_call, a, op, n) for op in whole for n in parts}
    if a.functions.late_sums is not None:
        found |= {f"sum_devices {n}": sum_devices(a, StageInParts.of(a.functions).accumulators(a.accumulators, n)) for n in parts}
    return found


def _call(a: Arrays, whole: Op, number: int) -> Call:
    """Return the call of an op for one part of the stage."""
    stage, op = StageInParts.of(a.functions), op_of_part(whole, number, len(a.functions.stage.sum_parts))
    reads = (_held(a, whole.function, number, a.read_by(whole.reads)),) if number else a.read_by(whole.reads)
    sums, scale = stage.accumulators(a.accumulators, number), None if a.scale is None else a.scale.value
    results = {"state": a.changed, "gradient": a.gradient, "accumulators": sums, "stash": a.open}
    left = tuple(results[kind] for kind in op.leaves)
    inputs = a.params, *reads, sums, a.rng, scale
    return Call(partial(stage.backward(whole.function).run, op, number), (1 + len(reads),), inputs, left if len(left) > 1 else left[0])


def _held(a: Arrays, function: str, number: int, reads: tuple[Tree, ...]) -> list[Any]:
    """Return the arrays that part `number`, 1 or more, reads: some of the whole op's arrays, and the stashes of the earlier parts."""
    backward, held = StageInParts.of(a.functions).backward(function), list[Tree](reads)
    for n in range(number):
        count = len(backward.held(n, held, ()))
        held = backward.held(n, held, a.as_chosen(f"{function} {n}", backward.held_spec(n + 1)[count:]))
    return held


def pieces(a: Arrays) -> dict[str, tuple[Tree, list[Any]]]:
    """Return for each part of a stage the arrays that the replicas sum. Part 0 includes the averaged layer state."""
    (accumulators, averaged), stage, parts = a.reduced, StageInParts.of(a.functions), len(a.functions.stage.sum_parts)
    names = [f" {n}" if n < parts - 1 else "" for n in range(parts)]
    return {name: (stage.accumulators(accumulators, n), [] if n else averaged) for n, name in enumerate(names)}


def costs(a: Arrays) -> dict[str, Any]:
    """Return the bytes of the accumulators of each part."""
    return {"part_accumulators": tuple(nbytes(accumulators) for accumulators, _ in pieces(a).values())}


# Instructions --------------------------------------------------------------------------------------------------------------


def compute_part(worker: Worker, i: ComputePart) -> None:
    """Run an op for one part of the stage, and set the part's complete accumulators aside."""
    k, whole = i.microbatch + worker.microbatch_shift, OPS[i.op]
    stage, microbatch, op = worker.stage_for(k), worker.state.microbatches[k], op_of_part(whole, i.part, i.parts)
    reads = (microbatch.pop("stash"),) if i.part else worker.take(whole, microbatch)
    left = worker.run(i, op, stage, reads, (_donated(worker, i),))
    if "stash" in left:
        backward = StageInParts.of(stage.functions).backward(whole.function)
        microbatch["stash"] = backward.held(i.part, reads[0] if i.part else reads, left["stash"])
    worker.used_microbatch(k)
    if not i.following:
        worker.state.accumulators = None
    update, name = k // worker.plan.microbatches_per_update(worker.stage), f"sums{i.piece}" if i.following else "sums"
    worker.change_update(update, **{name: worker.sum_devices(left["accumulators"], f" {i.part}")})


def _donated(worker: Worker, i: ComputePart) -> Tree:
    """Take the accumulators of one part of the stage out of the state, and return them."""
    accumulators = worker.fresh_accumulators(i) if worker.state.accumulators is None else worker.state.accumulators
    donated = StageInParts.of(worker.functions).accumulators(accumulators, i.part)
    gradients = {entry: tree for entry, tree in accumulators["gradients"].items() if entry not in donated["gradients"]}
    worker.state.accumulators = {**accumulators, "gradients": gradients}
    return donated


def join_sums(worker: Worker, update: int) -> None:
    """Wait for the sums of the parts of an update, and join them."""
    pending = worker.state.updates[update]
    names = sorted((name for name in pending if name.startswith("summed ")), key=lambda name: int(name.split()[1]))
    if names:
        joined = _joined([arrived(pending[name]) for name in (*names, "summed")])
        worker.change_update(update, **dict.fromkeys(names), summed=joined)


def _joined(parts: Sequence[tuple[Tree, list[Any], Any]]) -> tuple[Tree, list[Any], Any]:
    """Join the sums of all parts into the form of a whole stage; part 0 has the numbers."""
    first, means, loss = parts[0]
    gradients = {entry: gradient for accumulators, *_ in parts for entry, gradient in accumulators["gradients"].items()}
    return {**first, "gradients": gradients}, means, loss


RUNTIME = RuntimeHooks(
    handlers={ComputePart: compute_part, SumPart: Worker.all_reduce},
    calls=calls,
    used_calls={ComputePart: lambda f, i: [] if f.late_sums is None else [f"sum_devices {i.part}"]},
    ops=ops,
    pieces=pieces,
    costs=costs,
    join_sums=join_sums,
)
