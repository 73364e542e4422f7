"""Connections that send arrays between devices of different processes, and sums over such devices.

The same programs run on gloo (CPUs) and NCCL (GPUs). They are compiled ahead of time, one for each kind of tree (structure, shapes and
dtypes), so that no process waits in a collective while another one compiles.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jpipe.errors import InputError
from jpipe.processes._collectives import AXIS, Collective, Group, Kind, Packing, Spec, Tree, kind_of

Rows = list[jax.Array]  # an array for each device, or from each device
_Step = Callable[[Tree], Tree]  # a step of a sum

_BYTE = Spec((), jnp.uint8)
_MOST_TPUS = 3  # with one chip in each of a v5e 4x4's four hosts, libtpu 0.0.50 aborts while it compiles an all-gather


class Connection:
    """A one-way connection between two devices of different processes.

    Both processes create the connection and compile the same specs before any message. The receiver must take the messages in the order in
    which they are sent. Several threads may use different connections at once: a blocked connection delays no other connection and no
    computation. Only one thread at a time may use a connection. Create only one connection between two devices in one direction, because
    gloo would mix the messages of two.

    Args:
        source: the device that sends.
        to: the device that receives.
    """

    def __init__(self, source: jax.Device, to: jax.Device) -> None:
        self._group = Group((source, to))
        self._byte = self._group.compile(_onward, _BYTE)
        self._sends = self._group.device == source
        self._programs: dict[Kind, tuple[Packing, list[Collective]]] = {}

    @property
    def programs(self) -> list[jax.stages.Compiled]:
        """The compiled collectives; packing and adding are other programs."""
        return self._group.programs[1:]  # the first one only connects

    def compile(self, spec: Tree) -> None:
        """Compile the transfer of one kind of message.

        Args:
            spec: the message as a tree of `jax.ShapeDtypeStruct`, of any dtypes except typed random keys.
        """
        kind = kind_of(spec)
        if kind not in self._programs:
            packing = Packing(self._group, kind)
            self._programs[kind] = packing, [self._group.compile(_onward, array) for array in packing.arrays]

    def connect(self) -> None:
        """Open the connection. Both processes call this within 30 s of each other; all processes must open connections in the same order.

        Otherwise the first message opens the connection, and gloo fails if the peer does not ask for it within 30 s.
        """
        for packing, _ in () if self._sends else self._programs.values():
            _ = packing.placeholders
        self._byte(self._group.zeros(_BYTE))

    def send(self, tree: Tree) -> None:
        """Send a message; the process of `source` calls this. On CPUs it returns when the receiver has the message.

        Args:
            tree: arrays on `source`, with the structure, shapes and dtypes of a compiled spec. They are not copied and stay valid.
        """
        assert self._sends, "this process has the receiving end of the link"
        packing, programs = self._programs[kind_of(tree)]
        for program, array in zip(programs, packing.pack(jax.tree.leaves(tree)), strict=True):
            program(array)

    def receive(self, spec: Tree) -> Tree:
        """Receive the next message; the process of `to` calls this. On CPUs it returns when the message has arrived.

        Args:
            spec: the spec of the message, which must have been compiled.

        Returns:
            The message, committed to the device `to`, with the same bits as the sent message.
        """
        assert not self._sends, "this process has the sending end of the link"
        packing, programs = self._programs[kind_of(spec)]
        arrays = [program.run(placeholder) for program, placeholder in zip(programs, packing.placeholders, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(spec), packing.unpack(arrays))


class DevicePutConnection:
    """A one-way connection by JAX's own `device_put`, for backends that support this between processes (not CPUs).

    Both processes call it for each message, in the same order. Nothing is packed or compiled. Otherwise it is used like `Connection`.

    Args:
        source: the device that sends.
        to: the device that receives.
    """

    def __init__(self, source: jax.Device, to: jax.Device) -> None:
        self._source, self._to = SingleDeviceSharding(source), SingleDeviceSharding(to)
        self._sends = source.process_index == jax.process_index()

    def works(self) -> bool:
        """Send a test number, and return whether it arrives; both processes call this."""
        number = jnp.float32(42)
        try:
            if self._sends:
                self.send(jax.device_put(number, self._source))
                return True
            return float(self.receive(Spec((), jnp.float32))) == float(number)
        except (RuntimeError, ValueError, NotImplementedError):  # raised by backends without support
            return False

    def send(self, tree: Tree) -> None:
        """Send as `Connection.send` does; JAX keeps the arrays until they are sent."""
        jax.device_put(tree, self._to)

    def receive(self, spec: Tree) -> Tree:
        """Receive as `Connection.receive` does; the spec need not be compiled."""
        return jax.tree.map(self._received, spec)

    def _received(self, spec: Spec) -> jax.Array:
        coming = jax.make_array_from_single_device_arrays(spec.shape, self._source, [], dtype=spec.dtype)
        return jax.device_put(coming, self._to)


class Reduction:
    """A sum over several processes with one device each, or a gathering of the parts without adding.

    The parts are added in the order of the devices, ((p0 + p1) + p2) + …, so every process gets the same bits as one process that adds in
    this order. Each process adds up one share of the tree and sends the sum to all; in total it sends 2 (n - 1) / n of the tree, as in a
    ring. JAX's `psum` is not used: gloo adds in another order, XLA uses another thread, and with one core a kilobyte takes 4 ms.

    Other threads may use connections at the same time. Two reductions over the same devices, in any order, must not overlap in time.

    Args:
        devices: the devices in the order in which their parts are added.

    Raises:
        InputError: there are more TPUs than the known limit for which libtpu compiles collectives.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        if devices[0].platform == "tpu" and len(devices) > _MOST_TPUS:
            raise InputError(
                f"replicas: expected a stage's replicas in at most {_MOST_TPUS} processes on TPUs, found {len(devices)}: libtpu's "
                "compiler aborts for sums over some larger sets of chips; use fewer replicas, or meshes"
            )
        self._group = Group(devices)
        self._connect = self._compiled_exchange([_BYTE])
        self._programs: dict[Kind, list[_Step]] = {}
        self._gathers: dict[Kind, list[_Step]] = {}

    @property
    def programs(self) -> list[jax.stages.Compiled]:
        """The compiled collectives; packing and adding are other programs."""
        return self._group.programs[1:]  # the first one only connects

    def compile(self, spec: Tree) -> None:
        """Compile the programs that sum trees with the structure, shapes and dtypes of `spec`.

        Args:
            spec: a tree of `jax.ShapeDtypeStruct` of numbers.
        """
        kind = kind_of(spec)
        if kind not in self._programs:
            self._programs[kind] = self._steps(Packing(self._group, kind))

    def compile_gather(self, spec: Tree) -> None:
        """Compile the transfer programs by which every process gets the trees of all processes, without adding them."""
        kind = kind_of(spec)
        if kind not in self._gathers:
            packing, count = Packing(self._group, kind), self._group.size
            exchange = self._compiled_exchange(packing.arrays)

            def split(rows: list[Rows]) -> list[Rows]:
                return [packing.unpack([row[n] for row in rows], traced=True) for n in range(count)]

            each = [[array] * count for array in packing.arrays]
            self._gathers[kind] = [packing.pack, _to_all(exchange, count), jax.jit(split).lower(each).compile()]

    def connect(self) -> None:
        """Open the connections, as `Connection.connect` does."""
        self._connect([[self._group.zeros(_BYTE)] * self._group.size])

    def __call__(self, tree: Tree) -> Tree:
        """Sum the trees of all processes; each process calls this. On CPUs it returns when the sum is complete.

        Args:
            tree: arrays on this process's device, with the structure, shapes and dtypes of a compiled spec. They stay valid.

        Returns:
            The sum, committed to the device of this process.
        """
        return jax.tree.unflatten(jax.tree.structure(tree), _run(self._programs, tree))

    def gather(self, tree: Tree) -> list[Tree]:
        """Return the trees of all processes in the order of the devices. Each process calls this.

        Args:
            tree: a tree with the structure, shapes and dtypes of a spec that `compile_gather` has compiled.
        """
        return [jax.tree.unflatten(jax.tree.structure(tree), leaves) for leaves in _run(self._gathers, tree)]

    def _compiled_exchange(self, arrays: list[Spec]) -> _Step:
        """Return a step: for each of these arrays it takes a row of n arrays, sends one to each process, and returns the received row."""
        programs = [self._group.compile(_exchanged, *[array] * self._group.size) for array in arrays]
        return lambda rows: [program(*row) for program, row in zip(programs, rows, strict=True)]

    def _steps(self, packing: Packing) -> list[_Step]:
        """Return the steps of a sum: each process adds up one share, and then sends the result to all processes."""
        n = self._group.size
        shares = [self._group.local_spec((-(-array.size // n),), array.dtype) for array in packing.arrays]

        def cut(leaves: Rows) -> list[Rows]:
            return [list(jnp.pad(a.ravel(), (0, -a.size % n)).reshape(n, -1)) for a in packing.pack(leaves, traced=True)]

        def join(rows: list[Rows]) -> Rows:
            whole = [jnp.concatenate(row)[: a.size].reshape(a.shape) for row, a in zip(rows, packing.arrays, strict=True)]
            return packing.unpack(whole, traced=True)

        exchange, each = self._compiled_exchange(shares), [[share] * n for share in shares]
        return [
            jax.jit(cut).lower(packing.leaves).compile(),
            exchange,
            jax.jit(lambda parts: _sums(packing, parts)).lower(each).compile(),
            _to_all(exchange, n),
            jax.jit(join).lower(each).compile(),
        ]


def _run(programs: Mapping[Kind, list[_Step]], tree: Tree) -> Any:
    """Run the steps for a tree of a compiled kind; each step gets the result of the step before."""
    moved = jax.tree.leaves(tree)
    for step in programs[kind_of(tree)]:
        moved = step(moved)
    return moved


def _to_all(exchange: _Step, count: int) -> _Step:
    """Return a step that sends the same arrays to all processes."""
    return lambda arrays: exchange([[array] * count for array in arrays])


def _onward(x: jax.Array) -> jax.Array:
    return jax.lax.ppermute(x, AXIS, [(0, 1)])


def _exchanged(*row: jax.Array) -> Rows:
    return list(jax.lax.all_to_all(jnp.stack(row), AXIS, split_axis=0, concat_axis=0))


def _sums(packing: Packing, parts: list[Any]) -> Rows:
    """For each sent array, add its parts in order, in the dtype of its numbers."""
    numbers = [[part.view(dtype) for part in each] for each, dtype in zip(parts, packing.dtypes, strict=True)]
    return [reduce(jnp.add, each).view(array.dtype) for each, array in zip(numbers, packing.arrays, strict=True)]
