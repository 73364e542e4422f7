"""The costs of a model, layer by layer, for several microbatch sizes, as data and JSON. `source` says how they were determined."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

import jpipe
from jpipe import InputError
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.slices import bounds_of, layer_in_slices

FORMAT = "jpipe-profile/1"
SHARED = ("weights", "frozen", "accumulators", "optimizer", "ahead")
"""Fields with bytes of parameters. A stage counts these bytes only once for a parameter that its layers share."""

Bytes = Annotated[int, Field(ge=0, le=2**50)]  # a petabyte, so that sums stay within 64 bits
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]  # thirty years, so that sums stay finite


class _Data(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class AtSize(_Data):
    """The costs of one layer at one microbatch size.

    Attributes:
        forward: seconds of a forward.
        backward: seconds of a backward, without recomputation.
        forward_backward: seconds of both as one program, as in the last stage of most schedules; None: the sum of both.
        again: seconds that a backward takes longer if it recomputes its forward; None: the rest of `forward_backward`.
        backward_weight: the part of `backward` that computes the gradients of the weights; None in older profiles, which means half of it.
        outputs: bytes that cross a cut after this layer: all tensors that later layers use. Their gradients have the same size.
        residuals: bytes kept from forward to backward if the layer is a stage by itself, by recomputation policy. "none" is always present,
            other policies if known.
        shared: the part of `residuals` that is not kept, or kept only once, if the next layer is in the same stage. A stage holds the sum
            of `residuals` over its layers, minus the sum of `shared` over all its layers except the last.
        stash: bytes kept from the backward for inputs to the backward for weights, by recomputation policy.
        temporary: the largest scratch memory of the layer's programs, in bytes.
        temporary_more: bytes of scratch memory beyond the larger one of both layers if the next layer is in the same stage, because XLA
            keeps the gradients of several layers until they are added to the sums.
        remaking: bytes of scratch memory of a backward that recomputes all residuals of the layer; None in older profiles, where the bytes
            of the residuals are used.
        remaking_next: additional bytes of scratch memory of such a backward if the next layer is in the same stage, and is its last.
        remaking_more: additional bytes of scratch memory of such a backward if several more layers of the stage follow.
        flops: floating-point operations of a forward; 0: unknown.
    """

    forward: Seconds
    backward: Seconds
    outputs: Bytes
    residuals: dict[str, Bytes]
    shared: dict[str, Bytes] = {}
    backward_weight: Seconds | None = None
    forward_backward: Seconds | None = None
    again: Seconds | None = None
    stash: dict[str, Bytes] = {}
    temporary: Bytes = 0
    temporary_more: Bytes = 0
    remaking: Bytes | None = None
    remaking_next: Bytes = 0
    remaking_more: Bytes = 0
    flops: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @property
    def in_one_program(self) -> float:
        """The seconds of a forward and a backward as one program, at least the longer of both: measured times are not exact."""
        apart = self.forward + self.backward
        return apart if self.forward_backward is None else min(max(self.forward_backward, self.forward, self.backward), apart)

    @property
    def repeated(self) -> float:
        """The seconds that a backward takes longer if it recomputes its forward."""
        return self.in_one_program - self.backward if self.again is None else self.again


Share = Annotated[float, Field(ge=0, le=1)]


class TensorProfile(_Data):
    """The shares of a layer that tensor parallelism shards over the devices of a mesh.

    Attributes:
        weights: share of the bytes of its parameters.
        compute: share of its work.
        outputs: share of the bytes of its outputs.
        residuals: share of the bytes of its residuals, by recomputation policy.
        reduced: bytes per row that are summed over the devices in a forward; the same number in a backward.
        reductions: the number of these sums.
        divides: the number of devices must divide this number, the greatest common divisor of all sharded dims (such as the number of
            heads); 0: nothing is sharded.
        experts: the number of experts of a mixture, which the mesh axis "expert" shards; 0: the layer has no experts.
        of_experts: share of the bytes of its parameters that belong to experts.
        per_token: how many experts compute each token; 0 if unknown, as in older profiles.
        exchanged: bytes per row of the tokens sent to experts in a forward and of the outputs returned; the same number in a backward.
        chosen: share of the bytes of its residuals that belong to the rows inside of experts, by recomputation policy.
    """

    weights: Share = 0.0
    compute: Share = 0.0
    outputs: Share = 0.0
    residuals: dict[str, Share] = {}
    reduced: Annotated[float, Field(ge=0, le=2**50)] = 0.0
    reductions: Annotated[int, Field(ge=0, le=10**6)] = 0
    divides: Annotated[int, Field(ge=0, le=2**50)] = 0
    experts: Annotated[int, Field(ge=0, le=10**6)] = 0
    of_experts: Share = 0.0
    per_token: Annotated[int, Field(ge=0, le=10**6)] = 0
    exchanged: Annotated[float, Field(ge=0, le=2**50)] = 0.0
    chosen: dict[str, Share] = {}


class HalfRows(_Data):
    """The costs of a layer for each half of the positions of the rows. They tell what a slice costs, as `profile.slices` describes.

    Attributes:
        work: for each half the share of the layer's work for whole rows.
        residuals: for each half the bytes of residuals for each row, by recomputation policy. The first half includes its carry.
        carry: bytes for each row that the layer keeps for later slices, such as keys and values.
        kept: the share of `carry` that the backward of the same slice reads, too, by recomputation policy; without an entry, all of it.
        unread: the share of `carry` that no backward reads, but only forwards, by recomputation policy; without an entry, nothing.
    """

    work: tuple[float, float]
    residuals: dict[str, tuple[float, float]]
    carry: float = 0.0
    kept: dict[str, Share] = {}
    unread: dict[str, Share] = {}


class LayerProfile(_Data):
    """The costs of one layer.

    Attributes:
        id: the name of the layer in the model.
        weights: bytes of its parameters.
        frozen: the part of `weights` that the optimizer never changes.
        accumulators: bytes of its accumulated gradients; by default the bytes of `weights`.
        optimizer: bytes of its optimizer state.
        ahead: bytes of the weights that `delay_correction` predicts, for stages with late gradients; 0 without it.
        state: bytes of its layer state.
        update: seconds of an update.
        at: the costs that depend on the microbatch size, in the order of `Profile.sizes`.
        tensor: the shares that tensor parallelism shards; None if unknown, as in older and imported profiles.
        halves: the costs of half rows; None if rows cannot be cut into slices, or if they are unknown, as for short rows.
    """

    id: Annotated[str, Field(min_length=1)]
    weights: Bytes
    frozen: Bytes = 0
    accumulators: Bytes = 0
    optimizer: Bytes = 0
    ahead: Bytes = 0
    state: Bytes = 0
    update: Seconds = 0.0
    at: tuple[AtSize, ...]
    tensor: TensorProfile | None = None
    halves: HalfRows | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _accumulators_like_weights(cls, data: Any) -> Any:
        """Set a missing `accumulators`, as in older profiles, to `weights`."""
        return {"accumulators": data["weights"]} | data if isinstance(data, dict) and "weights" in data else data


class SharedProfile(_Data):
    """The bytes of a parameter that several layers share. The profile of each of these layers includes them, too.

    Attributes:
        layers: the ids of these layers.
        weights: bytes of the parameter.
        accumulators: bytes of its accumulated gradients.
        optimizer: bytes of its optimizer state.
        ahead: bytes of its predicted weights, as in `LayerProfile`.
        frozen: the bytes of `weights` if the optimizer never changes it, otherwise 0.
    """

    layers: Annotated[tuple[str, ...], Field(min_length=2)]
    weights: Bytes
    frozen: Bytes = 0
    accumulators: Bytes
    optimizer: Bytes = 0
    ahead: Bytes = 0


class Profile(_Data):
    """The costs of a model.

    Attributes:
        format: "jpipe-profile/1".
        source: "measured", "analytic" or "imported".
        device: the device that was measured or assumed.
        compiled_for: the kind of the devices for which programs were compiled to find scratch memory; "" if unknown.
        sizes: the microbatch sizes, in rows, ascending.
        inputs: bytes of one microbatch's inputs, for each size.
        labels: bytes of one microbatch's labels, for each size.
        dispatch: seconds to start a computation, in addition to the time of the device's work.
        layers: the layers in the model's order.
        shared: the parameters that several of these layers share.
        positions: the number of positions of the rows; 0 if the layers have no `halves`.
        uncut: why the layers of long rows have no `halves`; "" if they have, or if rows are short.

    Raises:
        InputError: a field is invalid: all times are zero, a number is impossible, sizes do not match, or unknown layers share a parameter.
    """

    format: Literal["jpipe-profile/1"] = "jpipe-profile/1"
    source: Literal["measured", "analytic", "imported"]
    device: str = ""
    compiled_for: str = ""
    sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    inputs: tuple[Bytes, ...]
    labels: tuple[Bytes, ...]
    dispatch: Seconds = 0.0
    layers: Annotated[tuple[LayerProfile, ...], Field(min_length=1)]
    shared: tuple[SharedProfile, ...] = ()
    positions: Annotated[int, Field(ge=0)] = 0
    uncut: str = ""
    # on a mesh: the profile without one, and the function that shards profiles
    _unsharded: "tuple[Profile, Callable[[Profile], Profile]] | None" = pydantic.PrivateAttr(None)

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except pydantic.ValidationError as error:
            raise jpipe.errors.explain(error, Profile, "profile") from None

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "Profile":
        if list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes: expected ascending microbatch sizes, found {list(self.sizes)}")
        for name in ("inputs", "labels"):
            if len(getattr(self, name)) != len(self.sizes):
                raise ValueError(f"{name}: expected a number for each of {len(self.sizes)} sizes, found {len(getattr(self, name))}")
        seen = set()
        for layer in self.layers:
            if layer.id in seen:
                raise ValueError(f"layer '{layer.id}' occurs twice; give each layer its own id")
            seen.add(layer.id)
            if layer.frozen > layer.weights:
                raise ValueError(f"layer '{layer.id}': expected at most {layer.weights} frozen bytes, its weights, found {layer.frozen}")
            if len(layer.at) != len(self.sizes):
                raise ValueError(f"layer '{layer.id}': expected costs for each of {len(self.sizes)} sizes, found {len(layer.at)}")
            for rows, at in zip(self.sizes, layer.at, strict=True):
                if "none" not in at.residuals:
                    raise ValueError(
                        f"layer '{layer.id}', {rows} rows: expected residuals for the policy 'none', found {list(at.residuals)}"
                    )
        for parameter in self.shared:
            self._check_shared(parameter)
        for n, rows in enumerate(self.sizes):
            if not sum(layer.at[n].forward + layer.at[n].backward for layer in self.layers):
                change = "profile again, with more repetitions or larger microbatches"
                if self.source == "analytic":
                    change = "give the device a memory_bandwidth"
                raise ValueError(f"all times at microbatches of size {rows} are zero; {change}")
        return self

    def _check_shared(self, parameter: SharedProfile) -> None:
        if unknown := [layer_id for layer_id in parameter.layers if layer_id not in self.ids]:
            raise ValueError(f"shared: layer '{unknown[0]}' is not among the layers; {jpipe.errors.nearest(unknown[0], self.ids)}")
        if len(set(parameter.layers)) < len(parameter.layers):
            raise ValueError(f"shared: expected different layers, found {', '.join(parameter.layers)}")
        for name in SHARED:
            for layer in self.layers:
                if layer.id in parameter.layers and getattr(layer, name) < sum(
                    getattr(other, name) for other in self.shared if layer.id in other.layers
                ):
                    raise ValueError(
                        f"shared: layer '{layer.id}' has fewer bytes of {name} than it shares; each layer's bytes must include shared "
                        "parameters"
                    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "Profile":
        """Return a copy with other values of some fields, without checks; cached properties are computed again."""
        copied = super().model_copy(update=update, deep=deep)
        for name in vars(copied).keys() - Profile.model_fields.keys():
            del vars(copied)[name]
        return copied

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The layer ids, in order."""
        return tuple(layer.id for layer in self.layers)

    def costs(self, rows: int) -> dict[str, jpipe.programs.LayerCost]:
        """Return the costs of each layer at a microbatch size of the profile."""
        return self.layer_costs[self.sizes.index(rows)]

    @cached_property
    def layer_costs(self) -> tuple[dict[str, jpipe.programs.LayerCost], ...]:
        """The costs of each layer, for each of `sizes`."""
        names = [field.name for field in dataclasses.fields(jpipe.programs.LayerCost)]
        return tuple(
            {
                layer_id: jpipe.programs.LayerCost(**{name: fields[name] for name in names})
                for layer_id, fields in ((layer.id, {**dict(layer), **dict(layer.at[n])}) for layer in self.layers)
            }
            for n in range(len(self.sizes))
        )

    @cached_property
    def shared_costs(self) -> tuple[jpipe.programs.SharedCost, ...]:
        """The costs of the shared parameters."""
        return tuple(jpipe.programs.SharedCost(**dict(parameter)) for parameter in self.shared)

    def stage_costs(self, plan: jpipe.Plan, rows: int) -> tuple[jpipe.programs.StageCost, ...]:
        """Return the costs of each stage of a plan, with `dispatch`. Raise InputError if slices need the unknown costs of half rows."""
        if plan.slices is None:
            return self.part_costs(plan, rows)
        lengths = self.slice_lengths(plan.slices)
        of_slices = [self.in_slices(lengths, n).part_costs(plan.counted, rows) for n in range(len(lengths))]
        halves = {layer.id: layer.halves for layer in self.layers if layer.halves is not None}
        joined = []
        for stage, costs in zip(plan.stages, zip(*of_slices, strict=True), strict=True):
            of_layers = [halves[layer_id] for layer_id in stage.layers]
            carry = rows * sum(each.carry for each in of_layers)
            kept = rows * sum(each.carry * each.kept.get(stage.recompute, 1.0) for each in of_layers)
            unread = rows * sum(each.carry * each.unread.get(stage.recompute, 0.0) for each in of_layers)
            slices, later, waiting = [], 0, 0  # carries that the next backward frees, and that the last forward frees
            for cost, (begin, end) in zip(costs, bounds_of(lengths), strict=True):
                made, own, until_last = (0 if end == 1 else round((end - begin) * size) for size in (carry, kept, unread))
                waiting += until_last
                sizes = {"carry_message": math.ceil(carry * end) if end < 1 else 0, "carry_gradient": math.ceil(carry * begin)}
                sizes |= {"carries": made, "carries_used_up": waiting if end == 1 else 0, "carries_freed": own + later}
                slices.append(dataclasses.replace(cost, **sizes))
                later = max(made - own - until_last, 0)
            joined.append(jpipe.programs.mean_of_slices(slices))
        return tuple(joined)

    def slice_lengths(self, slices: jpipe.plan.Slices) -> tuple[int, ...]:
        """Return the length of each slice of the rows; `slices` is a plan's. Raises InputError if they are unknown."""
        if not self.positions:
            raise InputError(
                where="plan",
                key="slices",
                expected="a profile with the costs of half rows",
                found="one without",
                change="profile this model again, or remove slices",
            )
        if self._unsharded is not None:
            return self._unsharded[0].slice_lengths(slices)
        if not isinstance(slices, jpipe.plan.ByCost):
            return jpipe.plan.lengths_of(slices, self.positions)
        half = self.positions // 2
        first, second = (
            sum((layer.at[0].flops or layer.at[0].forward) * layer.halves.work[n] for layer in self.layers if layer.halves) for n in (0, 1)
        )
        return jpipe.plan.lengths_by_cost(slices.count, self.positions, first / half, second / (self.positions - half))

    def in_slices(self, lengths: tuple[int, ...], number: int | None = None) -> "Profile":
        """Return the profile of a slice of the rows, from the positions of each slice; of the mean slice without a number.

        The residuals of the mean slice include its carry.
        """
        if (lengths, number) not in self._in_slices:
            self._in_slices[lengths, number] = self._in_slice(lengths, number)
        return self._in_slices[lengths, number]

    def _in_slice(self, lengths: tuple[int, ...], number: int | None) -> "Profile":
        if self._unsharded is not None:
            whole, shard = self._unsharded
            return shard(whole.in_slices(lengths, number))
        bounds = bounds_of(lengths)
        share = 1 / len(bounds) if number is None else bounds[number][1] - bounds[number][0]
        layers = tuple(layer_in_slices(layer, self.sizes, bounds, number, self.saves_in_slices) for layer in self.layers)
        inputs, labels = (tuple(math.ceil(share * size) for size in sizes) for sizes in (self.inputs, self.labels))
        return self.model_copy(update={"layers": layers, "inputs": inputs, "labels": labels})

    def sharded(self, shard: "Callable[[Profile], Profile]") -> "Profile":
        """Return the profile of one device of a mesh, which `shard` makes of a profile, for whole rows or for a slice."""
        return shard(self).sharded_from(self, shard)

    def sharded_from(self, whole: "Profile", shard: "Callable[[Profile], Profile]") -> "Profile":
        """Return this profile, which `shard` has made of a whole one. Its slices are cut from the whole rows."""
        self._unsharded = whole, shard
        return self

    @property
    def saves_in_slices(self) -> bool:
        """Whether all slices together take less work than whole rows, because no slice attends to later ones.

        On accelerators kernels for whole rows leave out these pairs of positions, too, even if XLA's attention is profiled.
        """
        return self.source == "measured" and self.compiled_for == "cpu"

    @cached_property
    def _in_slices(self) -> dict[tuple[tuple[int, ...], int | None], "Profile"]:
        return {}

    def part_costs(self, plan: jpipe.Plan, rows: int) -> tuple[jpipe.programs.StageCost, ...]:
        """Return the costs of each stage for whole rows or, if this profile is of a slice, for the slice."""
        n = self.sizes.index(rows)
        costs = jpipe.programs.sum_layer_costs(
            plan, self.costs(rows), inputs=self.inputs[n], labels=self.labels[n], shared=self.shared_costs
        )
        if not self.dispatch:
            return costs
        once, fused = ("backward", "backward_input", "backward_weight", "update"), jpipe.schedules.SCHEDULES[plan.schedule].begins_fused
        return tuple(
            dataclasses.replace(
                cost, **{name: getattr(cost, name) + self.dispatch for name in (once if fused(plan, s) else ("forward", *once))}
            )
            for s, cost in enumerate(costs)
        )

    def is_of_cpus(self, topology: Topology) -> bool:
        """Return whether the devices of a topology are CPUs. Without a target they are of the kind for which programs were compiled."""
        return topology.device.target is None and self.compiled_for in ("", "cpu")

    def cheapest_policy(self, topology: Topology) -> str:
        """Return the recomputation policy "auto" for the devices of a topology, or "none" if its residuals are not known."""
        known = all("elementwise" in at.residuals for layer in self.layers for at in layer.at)
        return "elementwise" if known and not self.is_of_cpus(topology) else "none"

    def check_layers(self, ids: tuple[str, ...], shared: Sequence[tuple[str, ...]] = ()) -> None:
        """Check that the profile has these layers, and that the same layers share parameters. Raise InputError otherwise."""
        for n, (actual, expected) in enumerate(zip(self.ids, ids, strict=False)):
            if actual != expected:
                raise InputError(f"profile: layer {n} is '{actual}', the model has '{expected}' there; profile this model")
        if len(self.ids) != len(ids):
            longer, what = (self.ids, "is not in the model") if len(self.ids) > len(ids) else (ids, "of the model is not in the profile")
            raise InputError(f"profile: layer '{longer[min(len(self.ids), len(ids))]}' {what}; profile this model")
        profile_shared = [parameter.layers for parameter in self.shared]
        if sorted(profile_shared) != sorted(shared):
            expected, actual = ("; ".join(map(", ".join, groups)) or "none" for groups in (sorted(shared), sorted(profile_shared)))
            raise InputError(f"profile: expected layers that share a parameter: {expected}; found {actual}; profile this model")

    def to_json(self) -> str:
        """Return the profile as JSON text, for `from_json`."""
        return json.dumps(self.model_dump(mode="json")) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "profile") -> "Profile":
        """Read a profile from JSON.

        Args:
            text: the result of `to_json`.
            where: the source, such as a file name, for error messages.

        Raises:
            InputError: the text is not JSON, not a profile of this format, or has impossible numbers.
        """
        data = jpipe.plan.read_json(text, FORMAT, where)
        try:
            return cls(**data)
        except InputError as error:
            raise error.at(where) from None
