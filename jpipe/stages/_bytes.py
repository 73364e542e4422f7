"""The bytes of the arrays of stages, computed from shapes."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax

from jpipe.capabilities.protocol import hooks
from jpipe.capabilities.registry import runtimes_for
from jpipe.meshes._partition import shard_bytes
from jpipe.meshes._place import Place
from jpipe.model.jaxprs._products import count_products
from jpipe.plan import Plan, repeats_forward
from jpipe.programs._costs import TIMES, KeptByBoth, StageCost, mean_of_slices
from jpipe.schedules import SCHEDULES
from jpipe.stages._arrays import Arrays, shares_of
from jpipe.stages._compiled_stage import CompiledStage
from jpipe.stages._gradients import has_gradient
from jpipe.stages.functions._stage_functions import StageFunctions


def measure_stages(plan: Plan, functions: Sequence[StageFunctions], compiled: Mapping[int, CompiledStage]) -> tuple[StageCost, ...]:
    """Return the bytes of all stages from `measure_bytes`, with the temporaries and shardings of compiled stages, by number."""
    splits = [SCHEDULES[plan.schedule].splits(plan, s) for s in range(plan.depth)]
    chosen = [compiled[s].chosen if s in compiled else {} for s in range(plan.depth)]
    recompute = [repeats_forward(f.stage.recompute) for f in functions]
    costs = [measure_bytes(*parts) for parts in zip(functions, recompute, splits, chosen, strict=True)]
    costs = [_with_shares(plan, *parts) for parts in zip(costs, functions, strict=True)]
    for stages_of_rank in plan.pipeline_ranks:
        for s in stages_of_rank:
            if s + 1 in stages_of_rank:
                passed = kept_by_both(functions[s], functions[s + 1], (splits[s], splits[s + 1]))
                costs[s + 1] = replace(costs[s + 1], passed=passed)
    for s, stage in compiled.items():
        costs[s] = replace(costs[s], temporary=stage.temporary_bytes)
    return tuple(costs)


def measure_bytes(
    functions: StageFunctions, recomputes: bool, splits: bool = False, chosen: Mapping[str, Sequence[Any]] | None = None
) -> StageCost:
    """Compute the bytes of one stage on each of its devices from shapes.

    The bytes are exact, with one exception. On a mesh XLA chooses the sharding of some arrays. Until that is known (`chosen`), they count
    as sharded only over the rows, usually with more bytes than a device holds. The size of the stash is computed only if the backward
    `splits` into two halves.

    Times are in units: a forward takes 1, a backward 2, each half of a backward 1, and recomputation 1 more. A half that computes nothing,
    because the parameters that it would need are frozen, takes 0.
    """
    f, a = functions, arrays_of(functions, chosen)
    (kept_arguments, kept_outputs, kept_carries), unchanged_late = _of_microbatch(a, splits)
    has_backward, has_weight_gradient = float(f.output_gradient), float(f.output_gradient and has_gradient(f.trained, f.specs.params))
    backward_input = has_backward * (2.0 if recomputes else 1.0)
    return StageCost(
        backward=backward_input + has_weight_gradient,
        backward_input=backward_input,
        backward_weight=has_weight_gradient,
        inputs=nbytes(a.received),
        labels=nbytes(a.labels),
        outputs=nbytes(a.sent),
        residuals=nbytes((a.saved, kept_arguments, kept_outputs)),
        kept_outputs=nbytes(kept_outputs),
        stash=nbytes(a.stash) - unchanged_late if splits else 0,
        message=nbytes(a.received_gradient),
        gradient=0 if f.first else nbytes(a.sent_gradient),
        carries=0 if f.positions is None else nbytes(a.outputs[1]),
        carries_freed=nbytes(kept_carries),
        carry_message=0 if f.positions is None else nbytes(a.message[0]) - nbytes(a.received_gradient[0]),
        carry_gradient=0 if f.positions is None else nbytes(a.gradient[0]) - nbytes(a.sent_gradient[0]),
        weights=nbytes((a.params, a.scale)),
        frozen=nbytes(f.trained.unchosen(a.params)),
        optimizer=nbytes(a.optimizer),
        state=nbytes(a.state),
        accumulators=nbytes(a.accumulators),
        kept=nbytes(a.capabilities),
        gathered=() if f.summing is None else tuple(nbytes(accumulators) for accumulators, _ in f.summing.specs(a)),
        **{name: value for costs in hooks("costs", runtimes_for(f.capabilities).values()) for name, value in costs(a).items()},
    )


def _of_microbatch(a: Arrays, splits: bool) -> tuple[tuple[list[Any], list[Any], list[Any]], int]:
    """Select what is kept for the backward of a microbatch: (arguments, outputs, new carries), without unchanged state and other carries.

    Also return the bytes of unchanged state that the second half of a backward reads, 0 without halves.
    """
    f, (arguments, outputs) = a.functions, a.forward_arrays
    unchanged = {i for i, changes in enumerate(f.changed.flags(f.specs.state)) if not changes}
    if f.positions is not None:
        first = len(jax.tree.leaves((f.specs.state, a.received)))
        of_carries, flow = range(first, first + len(jax.tree.leaves(f.specs.input[1]))), len(jax.tree.leaves(a.sent))
        arguments = [leaf for i, leaf in zip(f.residuals.arguments, arguments, strict=True) if i not in unchanged and i not in of_carries]
        count = sum(i < flow for i in f.residuals.outputs)  # these positions are sorted
        return (arguments, [*outputs[:count]], [*outputs[count:]]), 0
    arguments_kept, late, begin = [], 0, len(jax.tree.leaves(a.outputs))
    for i, leaf in zip(f.residuals.arguments, arguments, strict=True):
        if i not in unchanged:
            arguments_kept.append(leaf)
        elif splits and ("argument", i) in f.halves.late:
            late += nbytes(leaf)
    outputs_kept = [leaf for i, leaf in zip(f.residuals.outputs, outputs, strict=True) if i - begin not in unchanged]
    return (arguments_kept, outputs_kept, []), late


def joined_costs(functions: Sequence[Sequence[StageFunctions]], costs: Sequence[Sequence[StageCost]]) -> tuple[StageCost, ...]:
    """Return the costs of all stages from the costs of all stages for each slice of the rows.

    Each cost has the mean of the bytes, the largest temporaries, and the costs of the slices. The times of a slice are in proportion to the
    products in its forward. The unit is the mean slice, so units of plans with other slices differ.
    """
    if len(costs) == 1:
        return tuple(costs[0])
    joined = []
    for of_stage, of_functions in zip(zip(*costs, strict=True), zip(*functions, strict=True), strict=True):
        count, flops = len(of_stage), [sum(count_products(f.residuals.forward.jaxpr).values()) for f in of_functions]
        shares = [each * count / sum(flops) if any(flops) else 1.0 for each in flops]
        slices = tuple(
            replace(
                cost,
                **{name: getattr(cost, name) * share for name in TIMES},
                carries_used_up=used_up,
                carries_freed=cost.carries_freed + freed,
            )
            for cost, share, (used_up, freed) in zip(of_stage, shares, _carries_of_earlier(of_functions), strict=True)
        )
        joined.append(mean_of_slices(slices))
    return tuple(joined)


def _carries_of_earlier(functions: Sequence[StageFunctions]) -> list[tuple[int, int]]:
    """Return for each slice the bytes of the carries of earlier slices that its forward and its backward free.

    Backwards are in reverse order, so the first slice that keeps a carry frees it; if none does, the last one that receives it.
    """
    freed, sizes = [], list[int]()  # of the received carries that no slice so far keeps
    for f in functions:
        first, begin = len(jax.tree.leaves((f.specs.state, f.specs.x[0]))), len(jax.tree.leaves(f.outputs_spec[0]))
        keeps = [first + i in f.residuals.arguments for i in range(len(sizes))]
        used_up = sum(size for i, size in enumerate(sizes) if not keeps[i] and i not in f.passed)
        freed.append((used_up, sum(itertools.compress(sizes, keeps))))
        new = iter(map(nbytes, arrays_of(f).outputs[1]))
        left = [next(new) if source is None else 0 if keeps[source] else sizes[source] for source in f.passed]
        sizes = [0 if begin + i in f.residuals.outputs else size for i, size in enumerate(left)]
    return freed


def arrays_of(functions: StageFunctions, chosen: Mapping[str, Sequence[Any]] | None = None) -> Arrays:
    """Return a stage's `Arrays` without devices, from which only sizes are read; `chosen` is the same as in `Arrays`."""
    return Arrays(functions, Place((), functions.partition.mesh), {} if chosen is None else chosen)


def kept_by_both(before: StageFunctions, after: StageFunctions, splits: tuple[bool, bool]) -> tuple[KeptByBoth, ...]:
    """Return the arrays that a stage sends to the next stage and that both keep; `splits` tells which backwards run in two halves."""
    sizes, state = list(map(nbytes, jax.tree.leaves(arrays_of(after).x))), len(jax.tree.leaves(after.specs.state))
    passed: list[KeptByBoth] = []
    for i, size in enumerate(sizes):
        if i in before.residuals.outputs:
            late = splits[0] and ("output", i) in before.halves.late
            is_kept = state + i in after.residuals.arguments
            receiver: Literal["F", "I", "W"] = (
                "F" if not is_kept else "W" if splits[1] and ("argument", state + i) in after.halves.late else "I"
            )
            passed.append(KeptByBoth(size, "W" if late else "I", receiver))
    return tuple(passed)


def _with_shares(plan: Plan, cost: StageCost, f: StageFunctions) -> StageCost:
    """Return the cost of a stage in a plan that may divide its updates over its replicas."""
    present, arrays = [share for share in shares_of(plan, f) if share is not None], arrays_of(f)
    if not present:
        return cost
    optimizer = max(nbytes(share.part(arrays.optimizer)) for share in present)
    return replace(cost, optimizer=optimizer, updated=tuple(nbytes(share.outgoing(arrays.trained)) for share in present))


def nbytes(tree: Any) -> int:
    """Return the bytes of all arrays (or specs) of a tree on one device; a sharded array counts with one shard."""
    return sum(map(shard_bytes, jax.tree.leaves(tree)))
