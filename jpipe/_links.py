"""Moves arrays between processes: from one device to another, and sums over devices, by collectives over just the devices concerned.

The same programs run on gloo (CPUs) and NCCL (GPUs). They are compiled ahead of time, one for each kind of tree (structure, shapes,
dtypes), so that no process waits in a collective for another's compiler.

JAX sees each leaf as one array replicated over the devices, whose copies happen to differ: that takes any rank, and each process
gives and gets its own copy as it is.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = Any
Kind = tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]  # structure, then shape and dtype of each leaf

_AXIS = "process"
_TOGETHER = 1 << 20  # bytes; a collective costs about 0.1 ms whatever it carries, as much as copying this: smaller leaves share one
_FEW = 1 << 16  # bytes; below, the number of messages is what a sum costs


class Link:
    """One direction between two devices of different processes.

    Both processes make the link and compile the same specs before anything moves; then the receiver takes the messages in the order in
    which they are sent. Different links work from different threads at once: one that is blocked delays no other, and no computation.
    A link is for one thread at a time, and two devices have one link a direction: gloo would mix what two of them carry.

    Args:
        source: the device that sends.
        to: the device that receives.
    """

    def __init__(self, source: jax.Device, to: jax.Device) -> None:
        self._collective = _Collective((source, to), _move)
        self._sends = self._collective.device == source
        # What the receiver puts in to get a message out. Kept: making it would cost as much memory traffic as the message.
        self._placeholders: dict[Kind, list[jax.Array]] = {}

    def compile(self, spec: Tree) -> None:
        """Make ready for one kind of message. The receiving process keeps an array for each leaf of it.

        Args:
            spec: the message as a tree of `jax.ShapeDtypeStruct`, of any dtypes but complex ones and typed random keys.
        """
        self._collective.compile(spec)
        if not self._sends and _kind(spec) not in self._placeholders:
            zeros = [jnp.zeros(leaf.shape, leaf.dtype, device=self._collective.device) for leaf in jax.tree.leaves(spec)]
            self._placeholders[_kind(spec)] = self._collective.shared(zeros)

    def connect(self) -> None:
        """Open the connection. Both processes call it, within 30 s of each other, and all processes connect in one order.

        Without it the first message does so, and gloo gives up if the peer is not there for that message within 30 s.
        """
        self._collective.connect()

    def send(self, tree: Tree) -> None:
        """Send a message, in the process of `source`. On CPUs this returns when the receiver has it.

        Args:
            tree: arrays on `source`, of a kind that was compiled. They are not copied and not consumed.
        """
        assert self._sends, "this process has the receiving end of the link"
        self._collective(tree)

    def receive(self, spec: Tree) -> Tree:
        """Take the next message, in the process of `to`. On CPUs this returns when it is there.

        Args:
            spec: the kind of the message, one that was compiled.

        Returns:
            The message, committed to `to`, bit for bit as it was sent.
        """
        assert not self._sends, "this process has the sending end of the link"
        kind = self._collective.known(spec)
        return self._collective.run(kind, self._placeholders[kind])


class Reduction:
    """The sum over devices of different processes, one each.

    The parts are added in the order of the devices, ((p0 + p1) + p2) + …: every process gets the same bits, those of one process that
    adds in this order. Through each process pass 2 (n - 1) / n of the tree, as in a ring. Links may be busy at the same time, in other
    threads; of two reductions over the same devices the first is over before the second starts.

    Args:
        devices: in the order in which their parts are added.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._collective = _Collective(devices, lambda leaves: _packed(leaves, partial(_sum, len(devices))))

    def compile(self, spec: Tree) -> None:
        """Make ready for one kind of tree.

        Args:
            spec: a tree of `jax.ShapeDtypeStruct`, of numbers.
        """
        self._collective.compile(spec)

    def connect(self) -> None:
        """Open the connections, as `Link.connect` does."""
        self._collective.connect()

    def __call__(self, tree: Tree) -> Tree:
        """Add up the trees of all processes, each of which calls this. On CPUs this returns when the sum is there.

        Args:
            tree: arrays on this process's device, of a kind that was compiled. They are not consumed.

        Returns:
            The sum, committed to the same device.
        """
        return self._collective(tree)


class _Collective:
    """A function of the leaves of a tree that one device in each of several processes run together."""

    def __init__(self, devices: Sequence[jax.Device], function: Callable[[list[jax.Array]], list[jax.Array]]) -> None:
        own = [device for device in devices if device.process_index == jax.process_index()]
        processes = {device.process_index for device in devices}
        assert len(processes) == len(devices) > 1, f"not one device in each of several processes: {devices}"
        assert own, f"none of the devices is in this process: {devices}"
        self.device = own[0]
        self._function = function
        self._mesh = Mesh(np.array(devices), (_AXIS,))
        self._sharding = NamedSharding(self._mesh, PartitionSpec())
        self._programs: dict[Kind, jax.stages.Compiled] = {}

    def compile(self, spec: Tree) -> None:
        if _kind(spec) not in self._programs:
            mapped = jax.shard_map(self._function, mesh=self._mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
            leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._sharding) for leaf in jax.tree.leaves(spec)]
            self._programs[_kind(spec)] = jax.jit(mapped).lower(leaves).compile()

    def connect(self) -> None:
        nothing = jnp.zeros((), jnp.uint8, device=self.device)
        self.compile(nothing)
        self(nothing)

    def known(self, tree: Tree) -> Kind:
        """The kind of a tree, which must have been compiled."""
        kind = _kind(tree)
        assert kind in self._programs, f"not compiled for {_told(kind)}, but for {'; '.join(map(_told, self._programs)) or 'nothing'}"
        return kind

    def shared(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Arrays of all devices, of which this device's copies are these very ones."""
        return [jax.make_array_from_single_device_arrays(leaf.shape, self._sharding, [leaf]) for leaf in leaves]

    def __call__(self, tree: Tree) -> Tree:
        kind = self.known(tree)
        if self.device.platform == "cpu":
            # Dispatched before its input is there, a collective would block one of the threads that all computations share.
            jax.block_until_ready(tree)
        return self.run(kind, self.shared(jax.tree.leaves(tree)))

    def run(self, kind: Kind, leaves: list[jax.Array]) -> Tree:
        """Run the program on arrays of all devices; this device's copies of the result."""
        results = self._programs[kind](leaves)
        if self.device.platform == "cpu":
            jax.block_until_ready(results)  # a failure is raised here and nowhere later
        return jax.tree.unflatten(kind[0], [result.addressable_data(0) for result in results])


def _kind(tree: Tree) -> Kind:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _told(kind: Kind) -> str:
    leaves = [f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in kind[1]]
    return str(jax.tree.unflatten(kind[0], leaves))


def _move(leaves: list[jax.Array]) -> list[jax.Array]:
    """From the first device to the second, as unsigned integers: dtypes of one width go together, and the bits of a NaN stay."""
    bits = [leaf.view(f"uint{8 * leaf.dtype.itemsize}") for leaf in leaves]
    moved = _packed(bits, partial(jax.lax.ppermute, axis_name=_AXIS, perm=[(0, 1)]))
    return [arrived.view(leaf.dtype) for arrived, leaf in zip(moved, leaves, strict=True)]


def _packed(leaves: list[jax.Array], collective: Callable[[jax.Array], jax.Array]) -> list[jax.Array]:
    """Apply a collective of flat arrays to all leaves, in as few calls as pay."""
    results = list(leaves)
    for group in _groups(leaves):
        flat = jnp.concatenate([leaves[i].ravel() for i in group])
        ends = np.cumsum([leaves[i].size for i in group])
        for i, piece in zip(group, jnp.split(collective(flat), ends[:-1]), strict=True):
            results[i] = piece.reshape(leaves[i].shape)
    return results


def _groups(leaves: list[jax.Array]) -> list[list[int]]:
    """Positions of the leaves that share a collective: of one dtype, neighbours among those, and few bytes. Empty leaves need none."""
    groups: dict[Any, list[list[int]]] = {}
    room: dict[Any, int] = {}
    for i, leaf in enumerate(leaves):
        if leaf.size == 0:
            continue
        if room.get(leaf.dtype, -1) < leaf.nbytes:
            groups.setdefault(leaf.dtype, []).append([])
            room[leaf.dtype] = _TOGETHER
        groups[leaf.dtype][-1].append(i)
        room[leaf.dtype] -= leaf.nbytes
    return [group for of_dtype in groups.values() for group in of_dtype]


def _sum(n: int, part: jax.Array) -> jax.Array:
    """The sum of n flat parts. Not `psum`: gloo's adds in an order of its own and keeps two threads of a core in each other's way."""
    if n == 2 or part.nbytes <= _FEW:  # all to everyone: half the messages, and for two not a byte more
        return _in_order(_exchange(jnp.broadcast_to(part, (n, part.size))))
    shares = jnp.pad(part, (0, -part.size % n)).reshape(n, -1)
    share = _in_order(_exchange(shares))
    return _exchange(jnp.broadcast_to(share, shares.shape)).ravel()[: part.size]


def _exchange(rows: jax.Array) -> jax.Array:
    """Row i goes to device i; back come the rows that the devices have for this one, in their order."""
    return jax.lax.all_to_all(rows, _AXIS, split_axis=0, concat_axis=0)


def _in_order(rows: jax.Array) -> jax.Array:
    return reduce(jnp.add, [rows[i] for i in range(rows.shape[0])])
