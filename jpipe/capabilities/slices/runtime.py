"""How the computations of slices run: what they pass on from slice to slice."""

from collections.abc import Sequence
from typing import Any

from jpipe.capabilities.protocol import RuntimeHooks
from jpipe.capabilities.slices.program import ComputeSlice
from jpipe.capabilities.slices.stage import functions_of_slices, positions_of
from jpipe.ops import OPS
from jpipe.plan import Plan
from jpipe.runtime._transport import arrived
from jpipe.runtime._worker import Worker
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any


def compute(worker: Worker, i: ComputeSlice) -> None:
    """Run an op on a slice, with the carry of the slice before or the gradient of its own carry; keep what the next one needs."""
    op, k, held = OPS[i.op], i.microbatch + worker.microbatch_shift, worker.state.microbatches
    stage, unit = worker.stage_for(k), held[k]
    f, is_first, is_last = stage.functions, i.slice == 0, i.slice == worker.plan.row_slices - 1
    if op.begins:
        unit["inputs"] = arrived(unit["inputs"]), unit.pop("carry", {})
    elif op.gives_gradient:
        gradient, weight = arrived(unit["message"])
        gradient = [gradient] if f.last else gradient
        unit["message"] = [*gradient, *unit.pop("gradient of the carry", ())], weight
    reads = worker.take(op, unit)
    sums = () if not op.finishes else (worker.fresh_accumulators(i) if worker.state.accumulators is None else worker.state.accumulators,)
    left = worker.run(i, op, stage, reads, sums)
    if op.begins:
        y, carry = whole = f.with_passed(left["output"], reads[1][1])
        unit["residuals"] = f.residuals.keep(reads, (whole, worker.state.layer_state)), left["residuals"]
        unit["message" if f.last else "output"] = y
        if not is_last:
            held.setdefault(k + 1, {})["carry"] = carry
    elif op.gives_gradient:
        gradient, weight = unit.pop("gradient")
        if not f.first:
            unit["gradient"] = gradient[: f.gradients_sent], weight
        if not is_first:
            held.setdefault(k - 1, {})["gradient of the carry"] = gradient[f.gradients_sent :]
        if "stash" in left:
            unit["stash"] = f.halves.late_inputs(*reads), left["stash"]
    worker.used_microbatch(k)
    if (other := k + 1 if op.begins else k - 1) in held:
        worker.changed("microbatch", other)
    if op.finishes:
        worker.state.accumulators = left["accumulators"]
        if worker.completes_sums:
            worker.after_backward(k)


def variants(plan: Plan, spec: tuple[Tree, Tree], functions: Sequence[StageFunctions]) -> list[list[StageFunctions]]:
    """Return for each slice of microbatches with these shapes the functions of all stages."""
    return functions_of_slices(functions, spec, positions_of(plan.slices, functions, spec))


RUNTIME = RuntimeHooks(handlers={ComputeSlice: compute}, variants=variants)
