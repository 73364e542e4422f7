"""Profiles of layers on meshes: the costs of one device of a mesh, including the sums and gathers inside the mesh."""

import itertools
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jpipe
from jpipe import InputError
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import SHARED, AtSize, LayerProfile, Profile, SharedProfile, TensorProfile

__all__ = ["NO_MESH", "Degrees", "Meshes", "mesh_refusal", "possible_degrees"]

MOST_TENSOR = 8  # the most devices over which a layer is sharded by default


class Degrees(NamedTuple):
    """The mesh of devices on which each replica of a stage runs.

    Attributes:
        data: the number of devices over which the rows of a microbatch are sharded.
        model: the number of devices over which each layer is sharded (tensor parallelism).
        fsdp: whether the weights are sharded over `data`, too, as in `jpipe.Stage`.
        expert: the number of devices over which both the experts of each mixture and the rows are sharded.
    """

    data: int = 1
    model: int = 1
    fsdp: bool = False
    expert: int = 1

    @property
    def size(self) -> int:
        """The number of devices of the mesh."""
        return self.data * self.expert * self.model

    @property
    def rows(self) -> int:
        """The number of devices over which the rows of a microbatch are sharded."""
        return self.data * self.expert

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh for `jpipe.Stage`. Neighbouring devices shard the layers."""
        return {axis: size for axis in ("data", "expert", "model") if (size := getattr(self, axis)) > 1}

    def __str__(self) -> str:
        parts = [f"{axis} {size}" for axis, size in self.mesh.items()]
        return ", ".join(parts + ["fsdp"] * self.fsdp) or "none"

    @classmethod
    def read(cls, text: str) -> "Degrees":
        """Read text such as `model=4`, `data=2,model=4,fsdp`, `expert=8` or `none`. Raise InputError if it has another form."""
        fields: dict[str, Any] = {}
        for part in text.split(",") if text != "none" else ():
            match = re.fullmatch(r"(data|expert|model)=([1-9][0-9]{0,5})|(fsdp)", part.strip())
            name = match and (match[1] or match[3])
            if match is None or name in fields:
                raise InputError(f"--mesh: expected none, or sizes of axes such as model=8 or data=2,model=4,fsdp, found '{text}'")
            fields[str(name)] = int(match[2]) if match[2] else True
        degrees = cls(**fields)
        if degrees.fsdp and degrees.data == 1:
            raise InputError(f"--mesh: fsdp shards weights over the axis data: expected data=2 or more, found '{text}'")
        return degrees


NO_MESH = Degrees()
"""The degrees of a stage on a single device."""


def possible_degrees(profile: Profile, topology: Topology) -> tuple[Degrees, ...]:
    """Return the meshes to try. All their sizes are powers of two.

    Layers are sharded over up to eight devices; experts, and weights with FSDP, over up to all devices of a server. The first entry is no
    mesh. It is the only entry if the profile does not know how its layers can be sharded, or the innermost level joins a single device.
    """
    powers = [2**k for k in range(topology.most_in_mesh.bit_length())]
    possible = [NO_MESH]
    has_experts = any(layer.tensor is not None and layer.tensor.experts for layer in profile.layers)
    for expert in powers if has_experts else (1,):
        for model, data in itertools.product([size for size in powers if size <= MOST_TENSOR], powers):
            degrees = Degrees(data, model, data > 1, expert)
            fits = topology.most_in_mesh % degrees.size == 0 and topology.can_group(degrees.size)
            if degrees.size > 1 and fits and not mesh_refusal(profile, degrees):
                possible.append(degrees)
    return tuple(possible)


def mesh_refusal(profile: Profile, degrees: Degrees) -> str:
    """Return why the layers of a profile cannot be on a mesh of these degrees; "" if they can."""
    if degrees.size == 1:
        return ""
    if any(layer.tensor is None for layer in profile.layers):
        return "the profile does not say how its layers can be sharded; make one of a config with this version"
    known = {layer.id: layer.tensor for layer in profile.layers if layer.tensor is not None}
    if degrees.model > 1 and not any(tensor.divides for tensor in known.values()):
        return "no parameter has a logical axis that a rule shards over model; name the axes, as with nnx.with_partitioning"
    for layer_id, tensor in known.items():
        if tensor.divides % degrees.model:
            return (
                f"expected a size of model that divides {tensor.divides} and so all dims that layer '{layer_id}' shards (heads, widths, "
                f"symbols), found {degrees.model}"
            )
    if degrees.expert > 1 and not any(tensor.experts for tensor in known.values()):
        return "the model has no experts for the axis expert; leave out expert, or set model.experts"
    for layer_id, tensor in known.items():
        if tensor.experts % degrees.expert:
            return f"expected a size of expert that divides the {tensor.experts} experts of layer '{layer_id}', found {degrees.expert}"
    if all(rows % degrees.rows for rows in profile.sizes):
        sizes, what = ", ".join(map(str, profile.sizes)), "data" if degrees.expert == 1 else "data times expert"
        return f"expected a size of {what} that divides one of the microbatch sizes, {sizes}, found {degrees.rows}"
    return ""


class Meshes:
    """A profile and a topology, with the profiles and topologies for plans on meshes, in which each mesh counts as one device."""

    def __init__(self, profile: Profile, topology: Topology) -> None:
        self._known = {NO_MESH: (profile, topology)}

    def of(self, degrees: Degrees) -> tuple[Profile, Topology]:
        """Return the profile and the topology for meshes of these degrees."""
        if degrees not in self._known:
            profile, topology = self._known[NO_MESH]
            sharded = profile.sharded(partial(shard_profile, degrees=degrees, topology=topology))
            self._known[degrees] = sharded, topology.groups(degrees.size)
        return self._known[degrees]


def shard_profile(profile: Profile, degrees: Degrees, topology: Topology) -> Profile:
    """Return the profile of one device of a mesh, without the microbatch sizes that cannot be sharded.

    The seconds include the device's share of the work, and the sums and gathers inside the mesh, which overlap with nothing. A forward sums
    the partial sums of each layer. A backward sums as many bytes. An update sums the gradients over `data`. With FSDP forward and backward
    gather the weights, and each backward reduce-scatters the gradients. If experts are sharded, both exchange tokens, and a backward sums
    the gradients of experts. `mesh_refusal` must return "" for the mesh, which the first devices of the topology form.
    """
    size_indices = [n for n, rows in enumerate(profile.sizes) if rows % degrees.rows == 0]
    gathers, layers = profile.is_of_cpus(topology), []  # on CPUs tokens are gathered
    for layer in profile.layers:
        seconds = {n: collective_seconds(layer, profile.sizes[n], degrees, topology, gathers=gathers) for n in size_indices}
        once = 0.0 if degrees.fsdp else _gradient_seconds(layer, degrees, topology)[0]
        layers.append(_layer(layer, degrees, seconds, once))
    tensors = {layer.id: layer.tensor or TensorProfile() for layer in profile.layers}
    shared = []
    for parameter in profile.shared:
        share = _share_of_weights(tensors[parameter.layers[0]], degrees) / _over_data(degrees)
        sizes = {name: int(getattr(parameter, name) * share) for name in SHARED}
        shared.append(SharedProfile(layers=parameter.layers, **sizes))
    return profile.model_copy(
        update={
            "sizes": tuple(profile.sizes[n] for n in size_indices),
            "inputs": tuple(-(-profile.inputs[n] // degrees.rows) for n in size_indices),
            "labels": tuple(-(-profile.labels[n] // degrees.rows) for n in size_indices),
            "layers": tuple(layers),
            "shared": tuple(shared),
        }
    )


def collective_seconds(layer: LayerProfile, rows: int, degrees: Degrees, topology: Topology, *, gathers: bool) -> tuple[float, float]:
    """Return the seconds inside a mesh in a forward and a backward. Devices gather all tokens, or send each to devices with its experts."""
    for_model, for_experts = (topology.mesh_link(n) for n in (degrees.model, degrees.model * degrees.expert))
    tensor, of_rows = layer.tensor or TensorProfile(), rows / degrees.rows
    partial = _ring(2, tensor.reduced * of_rows, tensor.reductions, degrees.model, for_model)
    sent = 1.0 if gathers else _share_of_tokens(tensor, degrees)
    partial += 2 * _ring(1, tensor.exchanged * sent * rows / degrees.data, 1, degrees.expert, for_experts)
    summed, of_experts = _gradient_seconds(layer, degrees, topology)
    if degrees.fsdp:
        gather = _ring(1, layer.weights * _share_of_weights(tensor, degrees), 1, degrees.data, topology.mesh_link(degrees.size))
        return partial + gather, partial + gather + summed + of_experts
    return partial, partial + of_experts


def _gradient_seconds(layer: LayerProfile, degrees: Degrees, topology: Topology) -> tuple[float, float]:
    """Return the seconds for which the devices of the rows sum a layer's gradients: of most parameters, and of sharded experts.

    With FSDP they only scatter the sums. If experts are sharded over devices, only the other parameters have copies on these devices.
    """
    tensor = layer.tensor or TensorProfile()
    size, times = layer.accumulators * _share_of_device(tensor.weights, degrees.model), 1 if degrees.fsdp else 2
    for_experts, for_data = topology.mesh_link(degrees.model * degrees.expert), topology.mesh_link(degrees.size)
    of_copies = _ring(2, size * (1 - tensor.of_experts) / _over_data(degrees), 1, degrees.expert, for_experts)
    experts = tensor.of_experts if degrees.expert > 1 else 0.0
    over_data = (_ring(times, size * share, 1, degrees.data, for_data) for share in (1 - experts, experts / degrees.expert))
    return next(over_data) + of_copies, next(over_data)


def _ring(times: int, size: float, count: int, devices: int, link: jpipe.Link) -> float:
    """Return the seconds of `count` rings of `size` bytes in total. `times` is 2 for a sum, and 1 for a gather or a reduce-scatter."""
    steps = times * (devices - 1)
    return steps / devices * size / link.bandwidth + steps * count * link.latency if size else 0.0


def _share_of_tokens(tensor: TensorProfile, degrees: Degrees) -> float:
    """Return the share of its tokens that a device sends to each other device, if all sets of experts are equally likely."""
    others = tensor.experts - tensor.experts // degrees.expert
    if not tensor.per_token:
        return 1.0
    return 1 - math.prod((others - i) / (tensor.experts - i) for i in range(min(tensor.per_token, others + 1)))


def _share_of_device(share: float, devices: int) -> float:
    """Return the share of some arrays that one device holds. `share` is the share of the arrays that is sharded."""
    return 1 - share + share / devices


def _share_of_weights(tensor: TensorProfile, degrees: Degrees) -> float:
    """Return the share of the bytes of a layer's parameters that one device of a mesh has, without FSDP."""
    return _share_of_device(tensor.weights, degrees.model) * _share_of_device(tensor.of_experts, degrees.expert)


def _share_of_rows(tensor: TensorProfile, degrees: Degrees, policy: str = "none") -> float:
    """Return the share of the rows of residuals that one device has. It has a larger share of the rows inside of experts."""
    return _share_of_device(1 - tensor.chosen.get(policy, tensor.chosen.get("none", 0.0)), degrees.expert) / degrees.data


def _over_data(degrees: Degrees) -> int:
    return degrees.data if degrees.fsdp else 1


def _layer(layer: LayerProfile, degrees: Degrees, seconds: Mapping[int, tuple[float, float]], once: float) -> LayerProfile:
    """Return the costs of a layer on one device of a mesh, with `seconds` inside the mesh by size, and `once` for each update."""
    tensor, weight_shards = layer.tensor or TensorProfile(), _over_data(degrees)
    share = _share_of_weights(tensor, degrees)
    at = []
    for n, (forward, backward) in seconds.items():
        # With FSDP a device has all weights of a layer while it runs, and all its gradients at the end of its backward.
        whole = (layer.weights + layer.accumulators) * share * (1 - 1 / weight_shards)
        at.append(_at(layer.at[n], tensor, degrees, forward, backward, math.ceil(whole)))
    bytes_: dict[str, Any] = {name: math.ceil(getattr(layer, name) * share / weight_shards) for name in SHARED}
    if layer.halves is not None:  # each device along `model` has the carries of all heads
        bytes_["halves"] = layer.halves.model_copy(update={"carry": layer.halves.carry / degrees.rows})
    return layer.model_copy(update={**bytes_, "update": layer.update * share / weight_shards + once, "at": tuple(at)})


def _at(at: AtSize, tensor: TensorProfile, degrees: Degrees, forward: float, backward: float, whole: int) -> AtSize:
    """Return the costs at one size, including the seconds of sums and gathers inside the mesh and the bytes of whole weights."""
    work = _share_of_device(tensor.compute, degrees.model) / degrees.rows
    scratch = _share_of_device(tensor.compute, degrees.model) * _share_of_rows(tensor, degrees)
    usual = tensor.residuals.get("none", 0.0)

    def rows_of(sizes: dict[str, int]) -> dict[str, int]:
        shares = ((policy, size, tensor.residuals.get(policy, usual)) for policy, size in sizes.items())
        return {
            policy: math.ceil(size * _share_of_device(share, degrees.model) * _share_of_rows(tensor, degrees, policy))
            for policy, size, share in shares
        }

    for_weights = at.backward / 2 if at.backward_weight is None else at.backward_weight
    return at.model_copy(
        update={
            "forward": at.forward * work + forward,
            "backward": at.backward * work + backward,
            "forward_backward": at.in_one_program * work + forward + backward,
            "again": None if at.again is None else at.again * work + forward,
            "backward_weight": for_weights * work,
            "outputs": math.ceil(at.outputs * _share_of_device(tensor.outputs, degrees.model) / degrees.rows),
            "residuals": rows_of(at.residuals),
            "shared": {policy: size // degrees.rows for policy, size in at.shared.items()},
            "stash": rows_of(at.stash),
            "temporary": math.ceil(at.temporary * scratch) + whole,
            "temporary_more": math.ceil(at.temporary_more * scratch),
            "remaking": None if at.remaking is None else math.ceil(at.remaking * scratch) + whole,
            "remaking_next": math.ceil(at.remaking_next * scratch),
            "remaking_more": math.ceil(at.remaking_more * scratch),
            "flops": at.flops * work,
        }
    )
