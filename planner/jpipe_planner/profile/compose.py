"""The profile of a model, from the costs of its distinct layers."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

import jpipe
from jpipe import InputError
from jpipe.model import count_products, find_products
from jpipe_planner.profile.model import Costs, Model, StageCosts, tree_bytes
from jpipe_planner.profile.profile import AtSize, HalfRows, LayerProfile, Profile
from jpipe_planner.profile.scratch import Scratch
from jpipe_planner.profile.sizes import count_by_policy
from jpipe_planner.profile.slices import SHORTEST
from jpipe_planner.profile.tensor import tensor_profile

_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general"}  # all others are kernels


def profile_of(
    model: Model,
    find_costs: Callable[[], Mapping[tuple[str, int], Costs]],
    stage_costs: StageCosts,
    find_scratch: Callable[[StageCosts], Scratch],
    **fields: Any,
) -> Profile:
    """Return the profile of a model. `find_scratch` and `find_costs` wait for programs, so they are called late."""

    def shared(equal: str, next_equal: str | None, rows: int, policy: str) -> int:
        if next_equal is None:
            return 0
        alone = stage_costs[equal,][rows, policy].residuals + stage_costs[next_equal,][rows, policy].residuals
        return max(alone - stage_costs[equal, next_equal][rows, policy].residuals, 0)

    def stash(rows: int, policy: str, equal: str) -> int:
        return model.stage([equal], rows, policy).stash_bytes

    first, device, for_weights, stashes, tensor = model.sizes[0], jax.local_devices()[0], {}, {}, {}
    for equal in model.distinct:
        policies, stages = [policy for rows, policy in stage_costs[equal,] if rows == first], partial(model.stage, [equal], first)
        halves = (stages().trace(half, device).jaxpr.jaxpr for half in ("backward_input", "backward_weight"))
        for_inputs, of_weights = (sum(count_products(half).values()) for half in halves)
        for_weights[equal] = of_weights / (for_inputs + of_weights) if for_inputs + of_weights else 0.5
        stashes[equal] = count_by_policy(model.sizes, policies, partial(stash, equal=equal))[0]
        tensor[equal] = tensor_profile(stages, equal, first, policies, device)
    half_rows, uncut = find_halves(model, policies, device)
    layers, scratch, costs = [], find_scratch(stage_costs), find_costs()
    for layer_id, next_id in itertools.zip_longest(model.stack.ids, model.stack.ids[1:]):
        equal, next_equal = model.first_equal[layer_id], model.first_equal.get(next_id)
        layer_costs = stage_costs[equal,]
        at = tuple(
            AtSize(
                forward=costs[equal, rows].forward,
                backward=costs[equal, rows].backward,
                backward_weight=costs[equal, rows].backward * for_weights[equal],
                forward_backward=costs[equal, rows].forward_backward,
                again=costs[equal, rows].again,
                stash={policy: bytes_ for (count, policy), bytes_ in stashes[equal].items() if count == rows},
                outputs=layer_costs[rows, "none"].outputs if next_id else 0,
                residuals={policy: cost.residuals for (count, policy), cost in layer_costs.items() if count == rows},
                shared={policy: shared(equal, next_equal, rows, policy) for count, policy in layer_costs if count == rows},
                temporary=scratch.layers[equal, rows],
                temporary_more=scratch.more(equal, next_equal, rows),
                remaking=scratch.remaking(equal, rows),
                remaking_next=scratch.remaking_next(equal, next_equal, rows),
                remaking_more=scratch.remaking_more(equal, next_equal, rows),
                flops=costs[equal, rows].flops,
            )
            for rows in model.sizes
        )
        update = statistics.fmean(costs[equal, rows].update for rows in model.sizes)
        cost = layer_costs[model.sizes[0], "none"]
        sizes = {name: getattr(cost, name) for name in ("weights", "frozen", "optimizer", "state")}
        sizes |= {"accumulators": model.gradient_bytes(layer_id), "ahead": model.ahead_bytes(layer_id)}
        layers.append(LayerProfile(id=layer_id, update=update, at=at, tensor=tensor[equal], halves=half_rows.get(equal), **sizes))
    inputs, labels = (tuple(tree_bytes(model.batches[rows][part]) for rows in model.sizes) for part in (0, 1))
    positions = row_positions(model) if half_rows else 0
    fields |= {"positions": positions, "uncut": uncut}
    return Profile(sizes=model.sizes, inputs=inputs, labels=labels, layers=tuple(layers), shared=model.shared, **fields)


def row_positions(model: Model) -> int:
    """Return the number of positions of the rows: the second dim of the inputs; 0 without one."""
    shape = jax.tree.leaves(model.batches[model.sizes[0]])[0].shape
    return shape[1] if len(shape) > 1 else 0


def find_halves(model: Model, policies: Sequence[str], device: jax.Device) -> tuple[dict[str, HalfRows], str]:
    """Return for each distinct layer the costs of half rows, and ""; or {}, and why a search considers no slices of long rows.

    It considers none if rows are short, if the model cannot be computed slice by slice, or if a kernel computes the attention of whole
    rows, because slices do not use it. If the plan of the config cuts rows, it must: raise InputError if the model cannot be computed so.
    """
    rows, names = model.sizes[0], model.distinct
    if not model.in_slices and row_positions(model) < 2 * SHORTEST:
        return {}, ""
    # of equal neighbours one is enough to find out whether the model can be computed slice by slice
    neighbours = itertools.pairwise(("", *model.stack.ids))
    kept = [layer_id for before, layer_id in neighbours if model.first_equal[layer_id] != model.first_equal.get(before)]
    short = dataclasses.replace(model, stack=model.stack.with_layers({layer_id: model.stack.layers[layer_id] for layer_id in kept}))

    def products(stage: jpipe.stages.StandaloneStage) -> float:
        return sum(count_products(stage.trace("forward", device).jaxpr.jaxpr).values())

    try:
        whole = [short.stage([layer_id], rows, policy) for policy in dict.fromkeys(("none", *policies)) for layer_id in names]
        plan = jpipe.Plan.even(kept, 1, "gpipe", 1, slices=2)
        halves = jpipe.stages.in_slices(plan, model.batches[rows], whole)
    except InputError as error:
        if model.in_slices:
            raise
        return {}, f"the model cannot be computed slice by slice: {error.problems[0].found or error}"
    found, of_halves = {}, jpipe.stages.costs_in_slices(halves)
    for n, layer_id in enumerate(names):
        used = {equation.primitive.name for equation, *_ in find_products(whole[n].trace("forward", device).jaxpr.jaxpr)}
        if not model.in_slices and not used.issubset(_PRODUCTS):
            return {}, "a kernel computes the attention of whole rows, and slices use XLA's, which may take longer; plan.slices tries them"
        total, (before, after) = products(whole[n]), (products(half[n]) for half in halves)
        costs = {stage.stage.recompute: cost.by_slice for stage, cost in [*zip(whole, of_halves, strict=True)][n :: len(names)]}
        carry = {policy: max(first.carries, 1) for policy, (first, _) in costs.items()}
        found[layer_id] = HalfRows(
            work=(before / total, after / total) if total else (0.5, 0.5),
            residuals={
                policy: ((first.residuals + first.carries) / rows, second.residuals / rows) for policy, (first, second) in costs.items()
            },
            carry=2 * costs["none"][0].carry_message / rows,
            kept={policy: first.carries_freed / carry[policy] for policy, (first, _) in costs.items()},
            unread={policy: second.carries_used_up / carry[policy] for policy, (_, second) in costs.items()},
        )
    return found, ""
