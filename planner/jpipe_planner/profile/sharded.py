"""Profiles of layers on meshes: what one device of a mesh computes and holds, and how long the sums and gathers inside the mesh take."""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jpipe
from jpipe import InputError
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import AtSize, LayerProfile, Profile, SharedProfile, TensorProfile

MOST_TENSOR = 8  # devices over which a layer is sharded by default, at most


class Degrees(NamedTuple):
    """The mesh of devices on which each replica of a stage runs.

    Attributes:
        data: the number of devices over which the rows of a microbatch are sharded.
        model: the number of devices over which each layer is sharded (tensor parallelism).
        fsdp: as in `jpipe.Stage`: the weights are sharded over `data`, too.
    """

    data: int = 1
    model: int = 1
    fsdp: bool = False

    @property
    def size(self) -> int:
        """The number of devices of the mesh."""
        return self.data * self.model

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh as `jpipe.Stage` has it; neighbouring devices share layers."""
        return {axis: size for axis, size in (("data", self.data), ("model", self.model)) if size > 1}

    def __str__(self) -> str:
        parts = [f"{axis} {size}" for axis, size in self.mesh.items()]
        return ", ".join(parts + ["fsdp"] * self.fsdp) or "none"

    @classmethod
    def read(cls, text: str) -> "Degrees":
        """Read text such as `model=4`, `data=2,model=4,fsdp` or `none`.

        Raises:
            InputError: the text has another form.
        """
        fields: dict[str, Any] = {}
        for part in text.split(",") if text != "none" else ():
            match = re.fullmatch(r"(data|model)=([1-9][0-9]{0,5})|(fsdp)", part.strip())
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
    """Return the meshes to try: layers over up to eight devices, and with FSDP up to all devices of a server; powers of two.

    The first is no mesh. It is the only one if the profile does not know how its layers can be sharded, or the innermost level joins a
    single device.
    """
    powers = [2**k for k in range(topology.most_in_mesh.bit_length())]
    possible = [NO_MESH]
    for model in (size for size in powers if size <= MOST_TENSOR):
        for data in powers:
            degrees = Degrees(data, model, fsdp=data > 1)
            if degrees.size > 1 and topology.most_in_mesh % degrees.size == 0 and not mesh_refusal(profile, degrees):
                possible.append(degrees)
    return tuple(possible)


def mesh_refusal(profile: Profile, degrees: Degrees) -> str:
    """Return why layers of a profile cannot be on meshes; "" if they can."""
    if degrees.size == 1:
        return ""
    if any(layer.tensor is None for layer in profile.layers):
        return "the profile does not say how its layers can be sharded; make one of a config with this version"
    known = {layer.id: layer.tensor for layer in profile.layers if layer.tensor is not None}
    if degrees.model > 1 and not any(tensor.divides for tensor in known.values()):
        return "no parameter has a logical axis that a rule shards over model; name them, as with nnx.with_partitioning"
    for layer_id, tensor in known.items():
        if tensor.divides % degrees.model:
            return (
                f"expected a size of model that divides {tensor.divides}, as the sizes of all dims do that layer '{layer_id}' shards "
                f"(heads, widths, symbols), found {degrees.model}"
            )
    if all(rows % degrees.data for rows in profile.sizes):
        sizes = ", ".join(map(str, profile.sizes))
        return f"expected a size of data that divides one of the microbatch sizes, {sizes}, found {degrees.data}"
    return ""


class Meshes:
    """A profile and a topology for plans on meshes, where each mesh counts as one device."""

    def __init__(self, profile: Profile, topology: Topology) -> None:
        self._known = {NO_MESH: (profile, topology)}

    def of(self, degrees: Degrees) -> tuple[Profile, Topology]:
        """Return the profile and the topology for meshes of these degrees."""
        if degrees not in self._known:
            profile, topology = self._known[NO_MESH]
            self._known[degrees] = shard_profile(profile, degrees, topology), topology.groups(degrees.size)
        return self._known[degrees]


def shard_profile(profile: Profile, degrees: Degrees, topology: Topology) -> Profile:
    """Return the profile of one device of a mesh, without the microbatch sizes whose rows cannot be sharded.

    Seconds are those of its share of the work, and of the sums and gathers inside the mesh, which overlap with nothing: the partial sums
    of each layer in a forward, and as many bytes in a backward, where the gradients of a microbatch are summed over `data`, too; with FSDP
    the gathers of weights for both, and a scattered sum of the gradients.

    Args:
        profile: the profile of the layers on one device; it has no `mesh_refusal`.
        degrees: the degrees of the mesh.
        topology: the devices; the first of them form the mesh.
    """
    size_indices = [n for n, rows in enumerate(profile.sizes) if rows % degrees.data == 0]
    links = topology.mesh_link(degrees.model), topology.mesh_link(degrees.size)
    layers = [_layer(layer, profile.sizes, size_indices, degrees, links) for layer in profile.layers]
    tensors = {layer.id: layer.tensor or TensorProfile() for layer in profile.layers}
    shared = []
    for parameter in profile.shared:
        share = _share_of_device(tensors[parameter.layers[0]].weights, degrees.model) / _over_data(degrees)
        sizes = {name: int(getattr(parameter, name) * share) for name in ("weights", "frozen", "accumulators", "optimizer", "ahead")}
        shared.append(SharedProfile(layers=parameter.layers, **sizes))
    fields = {name: getattr(profile, name) for name in Profile.model_fields}  # a copy would keep properties computed from the old fields
    return Profile(
        **fields
        | {
            "sizes": tuple(profile.sizes[n] for n in size_indices),
            "inputs": tuple(-(-profile.inputs[n] // degrees.data) for n in size_indices),
            "labels": tuple(-(-profile.labels[n] // degrees.data) for n in size_indices),
            "layers": tuple(layers),
            "shared": tuple(shared),
        }
    )


def collective_seconds(layer: LayerProfile, rows: int, degrees: Degrees, links: tuple[jpipe.Link, jpipe.Link]) -> tuple[float, float]:
    """Return the seconds of the sums and gathers inside a mesh in a forward and a backward of a layer.

    Args:
        layer: the layer on one device.
        rows: the rows of a microbatch.
        degrees: the degrees of the mesh.
        links: the link between the devices that share layers, and the one between all devices of the mesh.
    """
    tensor, (inner, outer) = layer.tensor or TensorProfile(), links
    partial = _ring(2, tensor.reduced * rows / degrees.data, tensor.reductions, degrees.model, inner)
    share = _share_of_device(tensor.weights, degrees.model)
    gather, scatter = (_ring(1, size * share, 1, degrees.data, outer) for size in (layer.weights, layer.accumulators))
    if degrees.fsdp:
        return partial + gather, partial + gather + scatter
    return partial, partial + 2 * scatter


def mesh_seconds(profile: Profile, rows: int, degrees: Degrees, links: tuple[jpipe.Link, jpipe.Link]) -> float:
    """Return the seconds of the sums and gathers inside a mesh for a microbatch through all layers and back; see `collective_seconds`."""
    return sum(sum(collective_seconds(layer, rows, degrees, links)) for layer in profile.layers)


def _ring(times: int, size: float, count: int, devices: int, link: jpipe.Link) -> float:
    """Return the seconds of `count` rings of `size` bytes in all; 2 times around for a sum, 1 for a gather or a scattered sum."""
    steps = times * (devices - 1)
    return steps / devices * size / link.bandwidth + steps * count * link.latency if size else 0.0


def _share_of_device(share: float, devices: int) -> float:
    """Return the share that one device holds of arrays of which this share is sharded."""
    return 1 - share + share / devices


def _over_data(degrees: Degrees) -> int:
    return degrees.data if degrees.fsdp else 1


def _layer(
    layer: LayerProfile, sizes: Sequence[int], size_indices: Sequence[int], degrees: Degrees, links: tuple[jpipe.Link, jpipe.Link]
) -> LayerProfile:
    """Return the costs of a layer on one device of a mesh."""
    tensor, weight_shards = layer.tensor or TensorProfile(), _over_data(degrees)
    share = _share_of_device(tensor.weights, degrees.model)
    at = []
    for n in size_indices:
        forward, backward = collective_seconds(layer, sizes[n], degrees, links)
        # With FSDP the weights of a layer are whole while it runs, and so are its gradients at the end of its backward.
        whole = (layer.weights + layer.accumulators) * share * (1 - 1 / weight_shards)
        at.append(_at(layer.at[n], tensor, degrees, forward, backward, math.ceil(whole)))
    bytes_ = {
        name: math.ceil(getattr(layer, name) * share / weight_shards)
        for name in ("weights", "frozen", "accumulators", "optimizer", "ahead")
    }
    return layer.model_copy(update={**bytes_, "update": layer.update * share / weight_shards, "at": tuple(at)})


def _at(at: AtSize, tensor: TensorProfile, degrees: Degrees, forward: float, backward: float, whole: int) -> AtSize:
    """Return the costs at one size, with the seconds inside the mesh and the bytes of whole weights."""
    work = _share_of_device(tensor.compute, degrees.model) / degrees.data
    usual = tensor.residuals.get("none", 0.0)

    def rows_of(sizes: dict[str, int]) -> dict[str, int]:
        shares = ((policy, size, tensor.residuals.get(policy, usual)) for policy, size in sizes.items())
        return {policy: math.ceil(size * _share_of_device(share, degrees.model) / degrees.data) for policy, size, share in shares}

    for_weights = at.backward / 2 if at.backward_weight is None else at.backward_weight
    return at.model_copy(
        update={
            "forward": at.forward * work + forward,
            "backward": at.backward * work + backward,
            "backward_weight": for_weights * work,
            "outputs": math.ceil(at.outputs * _share_of_device(tensor.outputs, degrees.model) / degrees.data),
            "residuals": rows_of(at.residuals),
            "shared": {policy: size // degrees.data for policy, size in at.shared.items()},
            "stash": rows_of(at.stash),
            "temporary": math.ceil(at.temporary * work) + whole,
            "temporary_more": math.ceil(at.temporary_more * work),
            "remaking": None if at.remaking is None else math.ceil(at.remaking * work) + whole,
            "remaking_next": math.ceil(at.remaking_next * work),
            "remaking_more": math.ceil(at.remaking_more * work),
            "flops": at.flops * work,
        }
    )
