"""Costs of computations in seconds and bytes, for `simulate`. They are written by hand, summed over layers, or measured."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from jpipe._numbers import is_number
from jpipe.capabilities.protocol import hooks
from jpipe.capabilities.registry import Costs, programs, programs_of
from jpipe.errors import InputError, nearest, short
from jpipe.ops import OPS
from jpipe.plan import Plan, Stage, repeats_forward
from jpipe.schedules import SCHEDULES


class KeptByBoth(NamedTuple):
    """Arrays that a stage receives from the previous stage, and that the previous stage keeps as well."""

    size: int  # the size in bytes
    # the computation after which the previous stage frees them: "I" (a backward or its first half) or "W" (its second half)
    sender: Literal["I", "W"]
    receiver: Literal["F", "I", "W"]  # the computation after which this stage frees them: "F", "I" or "W"


TIMES = "forward", "backward", "backward_input", "backward_weight"
"""The fields of a stage's costs that are the times of a microbatch."""


@dataclass(frozen=True)
class StageCost(Costs):
    """The cost of one microbatch at one stage: times in seconds, sizes in bytes.

    Attributes:
        forward: time of a forward.
        backward: time of a backward, including the forward if it recomputes.
        backward_input: time of the half of a backward that computes the input gradient, including the forward if it recomputes.
        backward_weight: time of the other half, which computes the gradients of the weights.
        update: time of one update.
        inputs: the stage input.
        labels: the labels of the last stage; 0 at other stages.
        outputs: the outputs that the forward sends on.
        residuals: the arrays kept from a forward for its backward, including kept inputs, outputs and layer state.
        kept_outputs: the part of `outputs` that is also in `residuals`.
        stash: the arrays kept from the first half of a backward for the second half.
        message: the received output gradient, with the microbatch's weight; at the last stage (sum, weight) of the loss.
        gradient: the input gradient to send, with the microbatch's weight.
        weights: one version of the weights.
        frozen: the part of `weights` that no update changes and all versions share.
        optimizer: optimizer state; if replicas divide it, the largest share.
        state: layer state (batch statistics).
        accumulators: accumulated gradients.
        temporary: scratch memory, the maximum over the stage's programs.
        passed: the arrays of the stage input that the previous stage also keeps. If both stages are on one rank, they count once.
        updated: with `Plan.shard_optimizer`, for each replica the bytes of one version that it updates and sends to the other replicas.
        kept: arrays that capabilities keep in addition to the optimizer state, such as the errors of compressed sums, or agreed weights.
        gathered: if each replica computes sums itself, for each piece of a sum (see `pieces_of`) the bytes that it sends to each other
            replica. If empty, gradients and then their sums go around a ring.
        carries: for a slice of the rows, bytes of the carries that its forward computes; they are not in `residuals`.
        carries_used_up: bytes of the carries that its forward frees, because no backward reads them.
        carries_freed: bytes of the carries that its backward frees, because no earlier slice keeps them.
        carry_message: for a slice of the rows, bytes of the gradients of the carries that a backward gets from the slice after it.
        carry_gradient: bytes of the gradients of the carries that it gives to the slice before.
        by_slice: if the plan cuts rows into slices, the cost of each slice; the other fields are the means. Empty: all slices have the
            same cost.
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    update: float = 0.0
    inputs: int = 0
    labels: int = 0
    outputs: int = 0
    residuals: int = 0
    kept_outputs: int = 0
    stash: int = 0
    message: int = 0
    gradient: int = 0
    weights: int = 0
    frozen: int = 0
    optimizer: int = 0
    state: int = 0
    accumulators: int = 0
    temporary: int = 0
    passed: tuple[KeptByBoth, ...] = ()
    updated: tuple[int, ...] = ()
    kept: int = 0
    gathered: tuple[int, ...] = ()
    carries: int = 0
    carries_used_up: int = 0
    carries_freed: int = 0
    carry_message: int = 0
    carry_gradient: int = 0
    by_slice: tuple["StageCost", ...] = ()

    @property
    def trained(self) -> int:
        """The bytes of a version that updates change."""
        return self.weights - self.frozen

    def seconds(self, op: str) -> float:
        """Return the time of an op."""
        times: tuple[float, ...] = tuple(getattr(self, OPS[piece].function) for piece in OPS[op].pieces)
        return sum(times)


def mean_of_slices(costs: Sequence[StageCost]) -> StageCost:
    """Return the cost of a stage for rows that are cut into slices: the means of the slices, and the largest temporaries.

    Args:
        costs: the cost of each slice at the stage.
    """
    times = {name: sum(getattr(cost, name) for cost in costs) / len(costs) for name in TIMES}
    sizes = {name: -(-sum(getattr(cost, name) for cost in costs) // len(costs)) for name in _SIZES_OF_SLICES}
    return replace(costs[0], **times, **sizes, temporary=max(cost.temporary for cost in costs), by_slice=tuple(costs))


_SIZES_OF_SLICES = (
    *("inputs", "labels", "outputs", "residuals", "kept_outputs", "stash", "message", "gradient"),
    *("carries", "carries_used_up", "carries_freed", "carry_message", "carry_gradient"),
)


def pieces_of(plan: Plan, stage: Stage, cost: StageCost) -> list[float]:
    """Return the bytes of each piece in which replicas sum a stage's gradients: one piece, unless a capability divides them."""
    cut = (pieces(stage, cost) for pieces in hooks("pieces", programs_of(plan)))
    return next((sizes for sizes in cut if sizes), [cost.accumulators])


@dataclass(frozen=True)
class LayerCost:
    """The cost of one microbatch at one layer: times in seconds, sizes in bytes.

    Attributes:
        forward: time of a forward.
        backward: time of a backward without recomputation.
        forward_backward: time of both as one program, as in the last stage; None: the sum of both.
        again: time that a backward takes longer if it recomputes its forward; None: the rest of `forward_backward`.
        outputs: the output; its gradient has the same size.
        weights: the parameters.
        accumulators: accumulated gradients; None: as many bytes as `weights` without `frozen`.
        frozen: the part of `weights` that no update changes.
        backward_weight: the part of `backward` that computes the gradients of the weights; None: half of `backward`.
        stash: the arrays kept from the first half of a backward for the second, by recomputation policy; without an entry for a policy, the
            residuals of "none" and the output.
        optimizer: optimizer state.
        state: layer state (batch statistics).
        residuals: the arrays kept from forward to backward in a stage of only this layer, by recomputation policy; without an entry for
            `full`, the stage input.
        shared: the part of `residuals` that is kept only once, or not at all, if the next layer is in the same stage, by recomputation
            policy; without an entry for a policy, nothing.
        update: time of one update.
        temporary: scratch memory, the maximum over the layer's programs, without recomputation.
        temporary_more: the scratch memory that a stage of this layer and the next needs in addition to the larger `temporary` of both.
        remaking: the scratch memory of a backward that recomputes all residuals of the layer; None if unknown.
        remaking_next: the additional scratch memory of such a backward if one more layer of the stage follows.
        remaking_more: the additional scratch memory of such a backward if several more layers of the stage follow.
        ahead: the weights that `delay_correction` predicts, which only stages with late gradients hold.
    """

    forward: float
    backward: float
    outputs: int = 0
    weights: int = 0
    optimizer: int = 0
    state: int = 0
    residuals: Mapping[str, int] = field(default_factory=dict)
    shared: Mapping[str, int] = field(default_factory=dict)
    update: float = 0.0
    forward_backward: float | None = None
    again: float | None = None
    temporary: int = 0
    accumulators: int | None = None
    frozen: int = 0
    backward_weight: float | None = None
    stash: Mapping[str, int] = field(default_factory=dict)
    temporary_more: int = 0
    remaking: int | None = None
    remaking_next: int = 0
    remaking_more: int = 0
    ahead: int = 0

    @property
    def in_one_program(self) -> float:
        """The time of a forward and a backward as one program, at least the longer of both: measured times are not exact."""
        apart = self.forward + self.backward
        return apart if self.forward_backward is None else min(max(self.forward_backward, self.forward, self.backward), apart)

    @property
    def repeated(self) -> float:
        """The time that a backward takes longer if it recomputes its forward."""
        return self.in_one_program - self.backward if self.again is None else self.again

    @property
    def for_weights(self) -> float:
        """The time in which a backward computes the gradients of the weights."""
        return self.backward / 2 if self.backward_weight is None else self.backward_weight

    @property
    def summed(self) -> int:
        """The bytes of accumulated gradients, which replicas sum."""
        return self.trained if self.accumulators is None else self.accumulators

    @property
    def trained(self) -> int:
        """The bytes that updates change in a version."""
        return self.weights - self.frozen


@dataclass(frozen=True)
class SharedCost:
    """The cost in bytes of a parameter that several layers share. The cost of each of these layers includes it, too.

    Attributes:
        layers: the ids of the layers that use it.
        weights: the parameter.
        accumulators: its accumulated gradients.
        optimizer: its optimizer state.
        frozen: as many bytes as `weights` if no update changes it, else 0.
        ahead: as in `LayerCost`.
    """

    layers: tuple[str, ...]
    weights: int = 0
    accumulators: int = 0
    optimizer: int = 0
    frozen: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class Link:
    """The connection of two ranks; each direction carries one message at a time.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds from the end of sending to the arrival. The link is free during this time.
        ports: what a message occupies while it is sent, such as the network card of a host; other links may share ports. (): one port for
            each direction, shared with no other link.
    """

    bandwidth: float = float("inf")
    latency: float = 0.0
    ports: tuple[Hashable, ...] = ()

    def __post_init__(self) -> None:
        if not _is_amount(self.bandwidth) or self.bandwidth == 0:
            raise InputError(where="Link", key="bandwidth", expected="bytes per second above 0", found=short(self.bandwidth))
        if not _is_amount(self.latency) or self.latency == math.inf:
            raise InputError(where="Link", key="latency", expected="seconds, 0 or more", found=short(self.latency))


def _is_amount(value: Any) -> bool:
    return is_number(value) and bool(value >= 0)


def check_costs(plan: Plan, costs: Sequence[StageCost]) -> None:
    """Check that times and sizes are finite numbers of at least 0, and that fields for pieces of a sum have one number per piece.

    `costs` has one cost per stage. Raise InputError if one is wrong; the message names the stage and the field.
    """
    per_piece, slices = {name for used in programs_of(plan) for name in used.per_piece}, plan.counted.row_slices
    for s, (stage, cost) in enumerate(zip(plan.stages, costs, strict=True)):
        count = len(pieces_of(plan, stage, StageCost()))
        if cost.by_slice and len(cost.by_slice) != slices:
            where, found = f"simulate: costs of stage {s}: by_slice", len(cost.by_slice)
            raise InputError(where=where, expected=f"a cost for each of {slices} slices of the rows", found=found)
        for name, value in (item for each in (replace(cost, by_slice=()), *cost.by_slice) for item in vars(each).items()):
            where, are_several = f"simulate: costs of stage {s}: {name}", isinstance(getattr(StageCost, name), tuple)
            if are_several and not isinstance(value, tuple):
                raise InputError(where=where, expected="a tuple of numbers", found=short(value))
            for part in value if are_several else (value,):
                amount = part.size if isinstance(part, KeptByBoth) else part
                if not _is_amount(amount) or amount == math.inf:
                    raise InputError(where=where, expected="a number of 0 or more", found=short(amount))
            is_read = name == "gathered" or (name in per_piece and count > 1)
            if is_read and value and len(value) != count:
                raise InputError(where=where, expected=f"a number for each part of the stage, {count} in all", found=short(value))


Network = Callable[[int, int], Link]
"""A function that returns the link from one rank to another, given their numbers."""

HostLink = Callable[[int], Link]
"""A function that returns the link from a rank's device to the memory of its host, given the number of the rank."""

Overlap = Literal["none", "transfers", "transfers and sums"]
"""What can overlap with the computations of a rank: nothing, transfers between ranks, or these and sums of gradients over replicas."""

OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)


def unit_costs(plan: Plan) -> tuple[StageCost, ...]:
    """Return unit costs, for text timelines: a forward takes 1, a backward 2, each half of a backward 1. All sizes are 0.

    A backward that recomputes takes 3, and its first half takes 2.

    Returns:
        One cost for each stage of the plan.
    """
    again = (float(repeats_forward(stage.recompute)) for stage in plan.stages)
    return tuple(StageCost(backward=2.0 + more, backward_input=1.0 + more) for more in again)


def uses_by_costs(costs: Sequence[StageCost]) -> dict[str, Any]:
    """Return the argument `uses` of `lower` for stages with these costs, such as the request to sum gradients of shared parameters.

    Args:
        costs: the cost of each stage.
    """
    used = {name: hooks.used(costs) for name, hooks in programs().items() if hooks.used is not None}
    return {name: value for name, value in used.items() if value}


def sum_layer_costs(
    plan: Plan, layers: Mapping[str, LayerCost], *, inputs: int = 0, labels: int = 0, shared: Sequence[SharedCost] = ()
) -> tuple[StageCost, ...]:
    """Return the costs of the stages of a plan, summed from the costs of their layers.

    Args:
        plan: the cut, and the recomputation of each stage; "auto" counts as "none".
        layers: the cost of each layer of the plan, by layer id.
        inputs, labels: bytes of one microbatch's inputs and labels.
        shared: the parameters that several layers share; a stage with several of these layers holds the parameter once.

    Returns:
        One cost for each stage. Residuals count as temporary memory if a stage recomputes them, or if it is the last stage and its order
        has forward and backward as one program. Compressed messages count as if they compressed float32.

    Raises:
        InputError: a layer has no cost, or no residual bytes for the recomputation policy of its stage.
    """
    plan = plan.resolved("cpu")
    for layer_id in plan.layers:
        if layer_id not in layers:
            raise InputError(f"layer costs: layer '{layer_id}' of the plan has none; {nearest(layer_id, layers)}")
    costs, flows = list[StageCost](), _gradient_flows(plan, layers)
    for s, stage in enumerate(plan.stages):
        layer_costs = [layers[layer_id] for layer_id in stage.layers]
        last, rules = s == plan.depth - 1, SCHEDULES[plan.schedule]
        fused, fuses = rules.begins_fused(plan, s), rules.fuses(plan, s)
        forward, backward = (sum(getattr(layer, name) for layer in layer_costs) for name in ("forward", "backward"))
        in_one = sum(layer.in_one_program for layer in layer_costs)
        share = in_one / (forward + backward) if fuses and forward + backward else 1.0
        before = layers[plan.stages[s - 1].layers[-1]].outputs if s else inputs
        of_input, has_backward = s > 0 and flows[s], flows[s + 1]
        message = layer_costs[-1].outputs if has_backward and not last else 0
        again = 0.0  # what recomputation adds: a backward with a forward before it is one program of both
        if has_backward and repeats_forward(stage.recompute):
            again = forward if fuses else sum(layer.repeated for layer in layer_costs)
        _check_policy(stage, layer_costs)
        known = all(stage.recompute in layer.residuals for layer in layer_costs)
        residuals = _residuals(layer_costs, stage.recompute) if known else before
        inside = _residuals(layer_costs, "none") if fused or stage.recompute != "none" else 0  # scratch memory of the backward's program
        backward = share * (backward + again)
        for_weights = share * sum(layer.for_weights for layer in layer_costs) if of_input else backward  # stage 0 has no input gradient
        costs.append(
            StageCost(
                forward=share * forward,
                backward=backward,
                backward_input=backward - for_weights,
                backward_weight=for_weights,
                stash=_stash(layer_costs, stage.recompute) if of_input else residuals + message,
                update=sum(layer.update for layer in layer_costs),
                inputs=before,
                labels=labels if last else 0,
                outputs=0 if last else layer_costs[-1].outputs,
                residuals=residuals,
                message=message,
                gradient=before if of_input else 0,
                weights=sum(layer.weights for layer in layer_costs),
                frozen=sum(layer.frozen for layer in layer_costs),
                optimizer=sum(layer.optimizer + (layer.ahead if plan.delays[s] else 0) for layer in layer_costs),
                state=sum(layer.state for layer in layer_costs),
                accumulators=sum(layer.summed for layer in layer_costs),
                temporary=_scratch(layer_costs, inside, max(inside - (0 if fused else residuals), 0), before),
            )
        )
    for stage_cost in hooks("stage_cost", programs_of(plan)):
        costs = [stage_cost(plan, stage, cost, layers) for stage, cost in zip(plan.stages, costs, strict=True)]
    costs = _once(plan, costs, shared)
    for with_shared in hooks("model_costs", programs().values()):
        costs = with_shared(plan, costs, shared)
    for sent_cost in hooks("sent_cost", programs_of(plan)):
        costs = [sent_cost(plan, stage, cost) for stage, cost in zip(plan.stages, costs, strict=True)]
    return tuple(costs)


def _scratch(layers: Sequence[LayerCost], unchanged: int, remade: int, inputs: int) -> int:
    """Return the scratch bytes of a stage with these layers, from the bytes of its residuals without recomputation.

    `remade` is the part of these that the backward's program recomputes; `inputs` is the stage input, which no program computes.
    """
    scratch = max(layer.temporary for layer in layers) + sum(layer.temporary_more for layer in layers[:-1])
    last = layers[-1].remaking
    if not remade or last is None:
        return scratch + remade
    everything = last + sum(layer.remaking_next for layer in layers[-2:-1]) + sum(layer.remaking_more for layer in layers[:-2])
    share = min(remade / max(unchanged - inputs, 1), 1.0)
    return scratch + math.ceil((everything - scratch) * share)


def _gradient_flows(plan: Plan, layers: Mapping[str, LayerCost]) -> list[bool]:
    """Return whether the gradients of each stage's input and of the last output are computed: not if all layers before are frozen."""
    flows, trained, frozen = [True], False, False
    for stage in plan.stages:
        trained = trained or any(layers[layer_id].trained for layer_id in stage.layers)
        frozen = frozen or any(layers[layer_id].frozen for layer_id in stage.layers)
        flows.append(trained or not frozen)
    return flows


def _once(plan: Plan, costs: Sequence[StageCost], shared: Sequence[SharedCost]) -> list[StageCost]:
    """Return the costs in which each shared parameter counts only once per stage."""
    once = list(costs)
    for parameter in shared:
        for s, stage in enumerate(plan.stages):
            again = max(len(set(stage.layers) & set(parameter.layers)) - 1, 0)
            once[s] = replace(
                once[s],
                weights=once[s].weights - again * parameter.weights,
                accumulators=once[s].accumulators - again * parameter.accumulators,
                optimizer=once[s].optimizer - again * (parameter.optimizer + (parameter.ahead if plan.delays[s] else 0)),
                frozen=once[s].frozen - again * parameter.frozen,
            )
    return once


def _check_policy(stage: Stage, layers: Sequence[LayerCost]) -> None:
    """Check that the residual bytes of a layer are known for a policy."""
    for layer_id, layer in zip(stage.layers, layers, strict=True):
        if stage.recompute != "full" and stage.recompute not in layer.residuals:
            policies = sorted(layer.residuals)
            raise InputError(f"layer costs: layer '{layer_id}' has no residual bytes for '{stage.recompute}', found {policies}")


def _stash(layers: Sequence[LayerCost], policy: str) -> int:
    return sum(layer.stash.get(policy, layer.residuals.get("none", 0) + layer.outputs) for layer in layers)


def _residuals(layers: Sequence[LayerCost], policy: str) -> int:
    return sum(layer.residuals.get(policy, 0) for layer in layers) - sum(layer.shared.get(policy, 0) for layer in layers[:-1])
