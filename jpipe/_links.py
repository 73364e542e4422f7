"""Moves arrays between processes: from one device to another, and sums over devices, by collectives over just the devices concerned.

The same programs run on gloo (CPUs) and NCCL (GPUs). They are compiled ahead of time, one for each kind of tree (structure, shapes,
dtypes), so that no process waits in a collective for another's compiler.

JAX sees each leaf as one array replicated over the devices, whose copies happen to differ: that takes any rank, and each process
gives and gets its own copy as it is.

On CPUs a collective blocks a thread until all peers are there. It must be the thread that calls: if it were one of those that all
computations share, of which a process with one core has one, two processes could wait for each other for ever. XLA runs a program in the
calling thread if its input is there and it has next to no arithmetic: hence every input is waited for, and sums are added up by
a program of their own.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

Tree = Any
Spec = jax.ShapeDtypeStruct
Kind = tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]  # structure, then shape and dtype of each leaf

Rows = list[Any]  # flat arrays, one for each device or from each
_Exchange = Callable[[list[Rows]], list[Rows]]

_AXIS = "process"
_BUFFERED = 1 << 17  # bytes; a message so small is gone into the buffers of the network before the answer to it comes
_TOGETHER = 1 << 22  # bytes; a collective of gloo costs 0.1 ms and more whatever it carries: leaves share one until copying them costs more


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
        self._group = _Group((source, to))
        self._sends = self._group.device == source
        self._programs: dict[Kind, _Collective] = {}
        # What the receiver puts in to get a message out. Kept: making it would cost as much memory traffic as the message.
        self._placeholders: dict[Kind, list[jax.Array]] = {}

    def compile(self, spec: Tree) -> None:
        """Make ready for one kind of message. The receiving process keeps an array for each leaf of it.

        Args:
            spec: the message as a tree of `jax.ShapeDtypeStruct`, of any dtypes but typed random keys.
        """
        kind = _kind(spec)
        if kind in self._programs:
            return
        leaves = jax.tree.leaves(spec)
        together = _together(leaves)

        def move(arrays: list[jax.Array]) -> list[jax.Array]:
            return _unpacked([jax.lax.ppermute(flat, _AXIS, [(0, 1)]) for flat in _packed(arrays, together)], together, arrays)

        plain = [Spec(leaf.shape, self._group.plain(leaf.dtype)) for leaf in leaves]
        self._programs[kind] = self._group.compile(move, plain)
        if not self._sends:
            zeros = [jnp.zeros(leaf.shape, leaf.dtype, device=self._group.device) for leaf in plain]
            self._placeholders[kind] = self._group.shared(jax.block_until_ready(zeros))

    def connect(self) -> None:
        """Open the connection. Both processes call it, within 30 s of each other, and all processes connect in one order.

        Without it the first message does so, and gloo gives up if the peer is not there for that message within 30 s.
        """
        self._group.connect()

    def send(self, tree: Tree) -> None:
        """Send a message, in the process of `source`. On CPUs this returns when the receiver has it.

        Args:
            tree: arrays on `source`, of a kind that was compiled. They are not copied and not consumed.
        """
        assert self._sends, "this process has the receiving end of the link"
        self._programs[_known(tree, self._programs)](self._group.encoded(jax.tree.leaves(tree)))

    def receive(self, spec: Tree) -> Tree:
        """Take the next message, in the process of `to`. On CPUs this returns when it is there.

        Args:
            spec: the kind of the message, one that was compiled.

        Returns:
            The message, committed to `to`, bit for bit as it was sent.
        """
        assert not self._sends, "this process has the sending end of the link"
        kind = _known(spec, self._programs)
        return self._group.decoded(kind, self._programs[kind].run(self._placeholders[kind]))


class Reduction:
    """The sum over devices of different processes, one each.

    The parts are added in the order of the devices, ((p0 + p1) + p2) + …: every process gets the same bits, those of one process that
    adds in this order. Each process adds up a share of every part and sends 2 (n - 1) / n of the tree, as in a ring. Not `psum`: gloo
    adds in an order of its own, XLA has another thread do it, and a kilobyte takes 4 ms where a process has one core.

    Links may be busy at the same time, in other threads; of two reductions over the same devices, in whatever order, one is over
    before the other starts.

    Args:
        devices: in the order in which their parts are added.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._group, self._reversed = _Group(devices), _Group(devices[::-1])
        self._programs: dict[Kind, _Sum] = {}

    def compile(self, spec: Tree) -> None:
        """Make ready for one kind of tree.

        Args:
            spec: a tree of `jax.ShapeDtypeStruct`, of numbers.
        """
        if _kind(spec) in self._programs:
            return
        n, leaves = self._group.size, jax.tree.leaves(spec)
        together = _together(leaves)
        sizes = [sum(leaves[i].size for i in group) for group in together]
        dtypes = [leaves[group[0]].dtype for group in together]

        def pack(arrays: list[jax.Array]) -> list[Rows]:
            return [list(jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)) for flat in _packed(arrays, together)]

        def add(parts: list[Rows]) -> list[jax.Array]:
            numbers = [[row.view(dtype) for row in rows] for rows, dtype in zip(parts, dtypes, strict=True)]
            return [reduce(jnp.add, rows).view(part[0].dtype) for rows, part in zip(numbers, parts, strict=True)]

        def unpack(shares: list[Rows]) -> list[jax.Array]:
            return _unpacked([jnp.concatenate(rows)[:size] for rows, size in zip(shares, sizes, strict=True)], together, plain)

        here = SingleDeviceSharding(self._group.device)
        plain = [Spec(leaf.shape, self._group.plain(leaf.dtype), sharding=here) for leaf in leaves]
        rows = [[Spec((-(-size // n),), self._group.plain(dtype), sharding=here)] * n for size, dtype in zip(sizes, dtypes, strict=True)]
        self._programs[_kind(spec)] = _Sum(
            jax.jit(pack).lower(plain).compile(),
            self._exchange(rows),
            jax.jit(add).lower(rows).compile(),
            jax.jit(unpack).lower(rows).compile(),
        )

    def connect(self) -> None:
        """Open the connections, as `Link.connect` does."""
        self._group.connect()
        self._reversed.connect()

    def __call__(self, tree: Tree) -> Tree:
        """Add up the trees of all processes, each of which calls this. On CPUs this returns when the sum is there.

        Args:
            tree: arrays on this process's device, of a kind that was compiled. They are not consumed.

        Returns:
            The sum, committed to the same device.
        """
        kind = _known(tree, self._programs)
        pack, exchange, add, unpack = self._programs[kind]
        shares = add(exchange(pack(self._group.encoded(jax.tree.leaves(tree)))))
        return self._group.decoded(kind, unpack(exchange([[share] * self._group.size for share in shares])))

    def _exchange(self, spec: list[Rows]) -> "_Exchange":
        """A program that sends row i of each list to device i and gives back, in their order, those that the devices have for this one."""
        largest = max((rows[0].size * rows[0].dtype.itemsize for rows in spec), default=0)
        if self._group.blocks and self._group.size == 2 and largest > _BUFFERED:
            return self._both_ways(spec)

        def exchange(lists: list[Rows]) -> list[Rows]:
            return [list(jax.lax.all_to_all(jnp.stack(rows), _AXIS, split_axis=0, concat_axis=0)) for rows in lists]

        return self._group.compile(exchange, spec)

    def _both_ways(self, spec: list[Rows]) -> "_Exchange":
        """An exchange between two processes by two collectives at once, each of which moves one way.

        In one collective they would send one after the other: with gloo a process says that it is ready to receive only after what it
        sends itself. The two take connections of their own, on which a link of the two devices moves the other way.
        """
        here = list(self._group.devices).index(self._group.device)

        def back(lists: list[Rows]) -> Rows:
            return [jax.lax.ppermute(rows[0], _AXIS, [(1, 0)]) for rows in lists]

        sent = [rows[:1] for rows in spec]
        ways = self._group.compile(back, sent), self._reversed.compile(back, sent)

        def exchange(lists: list[Rows]) -> list[Rows]:
            sent = [[rows[1 - here]] for rows in lists]
            sending = _in_a_thread(lambda: ways[1 - here](sent))
            received = ways[here](sent)
            sending.result()
            return [[rows[0], other] if here == 0 else [other, rows[1]] for rows, other in zip(lists, received, strict=True)]

        return exchange


class _Sum(NamedTuple):
    """The programs of a sum. The exchange comes twice: a process adds up a share of all parts, and then all get all shares."""

    pack: jax.stages.Compiled
    exchange: _Exchange
    add: jax.stages.Compiled
    unpack: jax.stages.Compiled


class _Group:
    """One device in each of several processes, this one among them."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        own = [device for device in devices if device.process_index == jax.process_index()]
        self.size = len({device.process_index for device in devices})
        assert self.size == len(devices) > 1, f"not one device in each of several processes: {devices}"
        assert own, f"none of the devices is in this process: {devices}"
        self.device = own[0]
        self.devices = tuple(devices)
        self._mesh = Mesh(np.array(devices), (_AXIS,))
        self._sharding = NamedSharding(self._mesh, PartitionSpec())
        self.blocks = self.device.platform == "cpu"

    def compile(self, function: Callable[[list[Any]], Tree], spec: Tree) -> "_Collective":
        mapped = jax.shard_map(function, mesh=self._mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
        program = jax.jit(mapped).lower(jax.tree.map(self._spec, spec)).compile()
        flops = (program.cost_analysis() or {}).get("flops", 0)
        assert flops < 1000, f"{flops} operations: XLA would not run this collective in the calling thread"
        return _Collective(self, program)

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
        nothing = [jnp.zeros((), jnp.uint8, device=self.device)]
        self.compile(lambda arrays: [jax.lax.all_gather(array, _AXIS) for array in arrays], nothing)(nothing)


class _Collective:
    """A program that all devices of a group run together."""

    def __init__(self, group: _Group, program: jax.stages.Compiled) -> None:
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


def _kind(tree: Tree) -> Kind:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _known(tree: Tree, programs: Mapping[Kind, Any]) -> Kind:
    """The kind of a tree, which must have been compiled."""
    kind = _kind(tree)
    assert kind in programs, f"not compiled for {_told(kind)}, but for {'; '.join(map(_told, programs)) or 'nothing'}"
    return kind


def _told(kind: Kind) -> str:
    leaves = [f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in kind[1]]
    return str(jax.tree.unflatten(kind[0], leaves))


def _in_a_thread(call: Callable[[], Tree]) -> "Future[Tree]":
    future: Future[Tree] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # a daemon: a collective whose peer is gone never ends
    return future


def _packed(arrays: Sequence[jax.Array], together: list[list[int]]) -> list[jax.Array]:
    """Flat arrays, each of those that go together."""
    return [jnp.concatenate([arrays[i].ravel() for i in group]) for group in together]


def _unpacked(flats: list[jax.Array], together: list[list[int]], leaves: Sequence[jax.Array | Spec]) -> list[jax.Array]:
    """The arrays that were packed, shaped like the leaves."""
    arrays = {}
    for flat, group in zip(flats, together, strict=True):
        ends = np.cumsum([leaves[i].size for i in group])
        for i, piece in zip(group, jnp.split(flat, ends[:-1]), strict=True):
            arrays[i] = piece.reshape(leaves[i].shape)
    return [arrays[i] if i in arrays else jnp.zeros(leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]


def _together(leaves: Sequence[jax.Array | Spec]) -> list[list[int]]:
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
