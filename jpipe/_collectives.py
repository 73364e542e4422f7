"""Programs that the devices of several processes run together, one device each; and how the leaves of a tree share them.

JAX sees each array as one replicated over the devices, whose copies happen to differ: that takes any rank, and each process gives and
gets its own copy as it is.

On CPUs a collective blocks a thread until all peers are there. It must be the thread that calls: if it were one of those that all
computations share, of which a process with one core has one, two processes could wait for each other for ever. XLA runs a program in the
calling thread if its input is there and it has next to no arithmetic: hence every input is waited for, and what a program computes
is refused if it is much.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = Any
Spec = jax.ShapeDtypeStruct
Kind = tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]  # structure, then shape and dtype of each leaf

AXIS = "process"
_TOGETHER = 1 << 22  # bytes; a collective of gloo costs 0.1 ms and more whatever it carries: leaves share one until copying them costs more


class Group:
    """One device in each of several processes, this one among them."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        own = [device for device in devices if device.process_index == jax.process_index()]
        self.size = len({device.process_index for device in devices})
        assert self.size == len(devices) > 1, f"not one device in each of several processes: {devices}"
        assert own, f"none of the devices is in this process: {devices}"
        self.device = own[0]
        self.devices = tuple(devices)
        self._mesh = Mesh(np.array(devices), (AXIS,))
        self._sharding = NamedSharding(self._mesh, PartitionSpec())
        self.blocks = self.device.platform == "cpu"

    def compile(self, function: Callable[[list[Any]], Tree], spec: Tree) -> "Collective":
        """A program of all devices; here of this one's arrays, with collectives over the axis `AXIS`."""
        mapped = jax.shard_map(function, mesh=self._mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
        program = jax.jit(mapped).lower(jax.tree.map(self._spec, spec)).compile()
        flops = (program.cost_analysis() or {}).get("flops", 0)
        assert flops < 1000, f"{flops} operations: XLA would not run this collective in the calling thread"
        return Collective(self, program)

    def _spec(self, leaf: jax.Array | Spec) -> Spec:
        return Spec(leaf.shape, leaf.dtype, sharding=self._sharding)

    def plain(self, dtype: Any) -> Any:
        """What a dtype travels as: XLA on CPUs would widen bfloat16 and the like (NumPy's kind V) to twice the bytes."""
        return np.dtype(f"uint{8 * dtype.itemsize}") if self.blocks and dtype.kind == "V" else dtype

    def encoded(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """The arrays as what they travel as, in the same memory."""
        return [self._viewed(array, self.plain(array.dtype)) for array in arrays]

    def decoded(self, kind: Kind, arrays: list[jax.Array]) -> Tree:
        """The tree that travelled."""
        return jax.tree.unflatten(kind[0], [self._viewed(array, dtype) for array, (_, dtype) in zip(arrays, kind[1], strict=True)])

    def _viewed(self, array: jax.Array, dtype: Any) -> jax.Array:
        return array if array.dtype == dtype else jax.device_put(np.asarray(array).view(dtype), self.device)

    def shared(self, arrays: Tree) -> Tree:
        """Arrays of all devices, of which this device's copies are these very ones."""
        return jax.tree.map(lambda array: jax.make_array_from_single_device_arrays(array.shape, self._sharding, [array]), arrays)

    def connect(self) -> None:
        """Open the connections: all processes call it within 30 s of each other, all groups in one order."""
        nothing = [jnp.zeros((), jnp.uint8, device=self.device)]
        self.compile(lambda arrays: [jax.lax.all_gather(array, AXIS) for array in arrays], nothing)(nothing)


class Collective:
    """A program that all devices of a group run together."""

    def __init__(self, group: Group, program: jax.stages.Compiled) -> None:
        self._group, self._program = group, program

    def __call__(self, arrays: Tree) -> Tree:
        if self._group.blocks:
            jax.block_until_ready(arrays)
        return self.run(self._group.shared(arrays))

    def run(self, arrays: Tree) -> Tree:
        """Run it on arrays of all devices; this device's copies of the result."""
        results = self._program(arrays)
        if self._group.blocks:
            jax.block_until_ready(results)  # a failure is raised here and nowhere later
        return jax.tree.map(lambda result: result.addressable_data(0), results)


def kind_of(tree: Tree) -> Kind:
    """What a program is compiled for."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def known(tree: Tree, programs: Mapping[Kind, Any]) -> Kind:
    """The kind of a tree, which must have been compiled."""
    kind = kind_of(tree)
    assert kind in programs, f"not compiled for {_told(kind)}, but for {'; '.join(map(_told, programs)) or 'nothing'}"
    return kind


def _told(kind: Kind) -> str:
    leaves = [f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in kind[1]]
    return str(jax.tree.unflatten(kind[0], leaves))


def packed(arrays: Sequence[jax.Array], together: list[list[int]]) -> list[jax.Array]:
    """Flat arrays, each of those that go together."""
    return [jnp.concatenate([arrays[i].ravel() for i in group]) for group in together]


def unpacked(flats: list[jax.Array], together: list[list[int]], leaves: Sequence[jax.Array | Spec]) -> list[jax.Array]:
    """The arrays that were packed, shaped like the leaves."""
    arrays = {}
    for flat, group in zip(flats, together, strict=True):
        ends = np.cumsum([leaves[i].size for i in group])
        for i, piece in zip(group, jnp.split(flat, ends[:-1]), strict=True):
            arrays[i] = piece.reshape(leaves[i].shape)
    return [arrays[i] if i in arrays else jnp.zeros(leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]


def grouped(leaves: Sequence[jax.Array | Spec]) -> list[list[int]]:
    """Positions of the leaves that share a collective: of one dtype, in order, and not too large. Empty leaves are in none."""
    groups: dict[Any, list[list[int]]] = {}
    room: dict[Any, int] = {}
    for i, leaf in enumerate(leaves):
        size = leaf.size * leaf.dtype.itemsize
        if size == 0:
            continue
        if room.get(leaf.dtype, 0) < size:
            groups.setdefault(leaf.dtype, []).append([])
            room[leaf.dtype] = _TOGETHER
        groups[leaf.dtype][-1].append(i)
        room[leaf.dtype] -= size
    return [group for of_dtype in groups.values() for group in of_dtype]
