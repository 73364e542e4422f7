"""Collectives over one device each of several processes, and the packing of trees for them.

JAX sees each array as replicated over the devices, although the copies differ. This works for any number of axes, and each process passes
and receives its own copy unchanged.

On CPUs a collective blocks a thread until all peers have called it. This must be the calling thread: all computations share a pool of
threads (one thread on one core), and two processes with blocked pools could wait for each other forever. XLA runs a program in the calling
thread if its inputs are ready and it has few steps and little arithmetic. So inputs are awaited before the call, and each program is a
single collective. Packing and unpacking are separate programs.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

Tree = Any
Spec = jax.ShapeDtypeStruct
Kind = tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]  # structure, then shape and dtype of each leaf

AXIS = "process"
_TOGETHER = 1 << 25  # bytes: leaves up to this total size share a collective, because any collective of gloo takes at least 0.2 ms


class Group:
    """One device in each of several processes, including this one.

    Attributes:
        programs: the programs that have been compiled for the group.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.programs: list[jax.stages.Compiled] = []
        local = [device for device in devices if device.process_index == jax.process_index()]
        self.size = len({device.process_index for device in devices})
        assert self.size == len(devices) > 1, f"not one device in each of several processes: {devices}"
        assert local, f"none of the devices is in this process: {devices}"
        self.device = local[0]
        self._mesh = Mesh(np.array(devices), (AXIS,))
        self._sharding = NamedSharding(self._mesh, PartitionSpec())
        self.blocks = self.device.platform == "cpu"

    def compile(self, function: Callable[..., Tree], *spec: Spec) -> "Collective":
        """Compile one collective over the axis `AXIS` of the arrays of all devices, with these specs."""
        mapped = jax.shard_map(function, mesh=self._mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
        program = jax.jit(mapped).lower(*(Spec(s.shape, s.dtype, sharding=self._sharding) for s in spec)).compile()
        assert not self.blocks or len(steps := _steps(program)) == 1, f"not one step but {steps}: XLA may not run it in the calling thread"
        self.programs.append(program)
        return Collective(self, program)

    def plain(self, dtype: Any) -> Any:
        """Return the dtype in which arrays are sent: XLA on CPUs would double the bytes of bfloat16 and similar dtypes (NumPy's kind V)."""
        return np.dtype(f"uint{8 * dtype.itemsize}") if self.blocks and dtype.kind == "V" else dtype

    def local_spec(self, shape: tuple[int, ...], dtype: Any) -> Spec:
        """Return the spec of an array on this process's device, in the dtype that is sent."""
        return Spec(shape, self.plain(dtype), sharding=SingleDeviceSharding(self.device))

    def zeros(self, spec: Spec) -> jax.Array:
        """Return an array of zeros on this process's device."""
        return jnp.zeros(spec.shape, spec.dtype, device=self.device)

    def shared(self, array: jax.Array) -> jax.Array:
        """Return an array over all devices; the shard of this process is `array` itself, not a copy."""
        return jax.make_array_from_single_device_arrays(array.shape, self._sharding, [array])


class Collective:
    """A compiled program that all devices of a group run together."""

    done = 0
    """The number of collectives that have run in this process. While it grows, a long wait does not count as a hang."""

    def __init__(self, group: Group, program: jax.stages.Compiled) -> None:
        self._group, self._program = group, program

    def __call__(self, *arrays: jax.Array) -> Tree:
        if self._group.blocks:
            jax.block_until_ready(arrays)
        return self.run(*(self._group.shared(array) for array in arrays))

    def run(self, *arrays: jax.Array) -> Tree:
        """Run the program on arrays over all devices, and return this process's shards of the results."""
        results = self._program(*arrays)
        if self._group.blocks:
            jax.block_until_ready(results)  # so a failure is raised here, not later
        Collective.done += 1
        return jax.tree.map(lambda result: result.addressable_data(0), results)


def _steps(program: jax.stages.Compiled) -> list[str]:
    """Return the HLO operations of a compiled program, except operations that only name memory."""
    text = program.as_text() or ""
    operations = re.findall(r" = .*? ([a-z-]+)\(", re.sub(r"/\*.*?\*/", "", text[text.index("ENTRY") :]))
    return [name for name in operations if name not in ("parameter", "bitcast", "tuple", "get-tuple-element")]


def kind_of(tree: Tree) -> Kind:
    """Return the key under which a program for a tree is compiled."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


class Packing:
    """The packing of a tree for sending: large leaves stay, small leaves of a dtype are concatenated, empty leaves are left out.

    Attributes:
        leaves: the specs of the leaves of the tree, on the device of this process.
        arrays: the specs of the arrays that are sent.
        dtypes: for each of these arrays, the dtype of the numbers that it carries.
        group: the devices that send trees to each other.
    """

    def __init__(self, group: Group, kind: Kind) -> None:
        self.group, self.leaves = group, [Spec(shape, dtype, sharding=SingleDeviceSharding(group.device)) for shape, dtype in kind[1]]
        leaves, groups = self.leaves, _grouped(self.leaves)
        self._alone = [i for i, *more in groups if not more and group.plain(leaves[i].dtype) == leaves[i].dtype]
        self._together = [positions for positions in groups if positions[0] not in self._alone]
        self._plain = [group.plain(leaves[i].dtype) for i, *_ in self._together]
        self._empty = {i: group.zeros(leaf) for i, leaf in enumerate(leaves) if leaf.size == 0}
        apart = [[leaves[i] for i in positions] for positions in self._together]
        together = [group.local_spec(array.shape, array.dtype) for array in jax.eval_shape(self._joined, apart)]
        # Only compiled: the devices may be descriptions, on which nothing can run.
        self._join = jax.jit(self._joined).lower(apart).compile() if apart else self._joined
        self._split = jax.jit(self._pieces).lower(together).compile() if apart else self._pieces
        self.arrays = [*(leaves[i] for i in self._alone), *together]
        self.dtypes = [leaves[i].dtype for i in (*self._alone, *(i for i, *_ in self._together))]

    @functools.cached_property
    def placeholders(self) -> list[jax.Array]:
        """The receiver's inputs. They are kept, because creating them for each message would take as much memory traffic as the message.

        They are allocated at the first access, because no array can be allocated on a device that is only described (no hardware).
        """
        return jax.block_until_ready([self.group.shared(self.group.zeros(array)) for array in self.arrays])

    def pack(self, leaves: Sequence[jax.Array], *, traced: bool = False) -> list[jax.Array]:
        """Pack a tree into arrays to send: by a compiled program, or if `traced` as a part of the program that is being traced."""
        alone, join = [leaves[i] for i in self._alone], self._joined if traced else self._join
        return [*alone, *join([[leaves[i] for i in positions] for positions in self._together])] if self._together else alone

    def unpack(self, arrays: Sequence[jax.Array], *, traced: bool = False) -> list[jax.Array]:
        """Unpack received arrays into leaves: by a compiled program, or if `traced` as a part of the program that is being traced."""
        split = self._pieces if traced else self._split
        leaves = self._empty | dict(zip(self._alone, arrays, strict=False))
        if self._together:
            for positions, pieces in zip(self._together, split(arrays[len(self._alone) :]), strict=True):
                leaves.update(zip(positions, pieces, strict=True))
        return [leaves[i] for i in range(len(self.leaves))]

    def _joined(self, groups: list[list[jax.Array]]) -> list[jax.Array]:
        # Leaves are viewed as the sent dtype before they are joined, because XLA would convert bfloat16 and back, which changes the bits of
        # NaN.
        return [jnp.concatenate([leaf.view(plain).ravel() for leaf in group]) for group, plain in zip(groups, self._plain, strict=True)]

    def _pieces(self, arrays: Sequence[jax.Array]) -> list[list[jax.Array]]:
        pieces = []
        for positions, array in zip(self._together, arrays, strict=True):
            leaves = [self.leaves[i] for i in positions]
            split = jnp.split(array, np.cumsum([leaf.size for leaf in leaves])[:-1])
            pieces.append([piece.reshape(leaf.shape).view(leaf.dtype) for piece, leaf in zip(split, leaves, strict=True)])
        return pieces


def _grouped(leaves: Sequence[jax.Array | Spec]) -> list[list[int]]:
    """Return groups of leaves, by position, that share a collective: leaves of one dtype, in order, not too large, not empty."""
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
