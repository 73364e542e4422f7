"""Moves arrays between processes: from one device to another, and sums over devices, by collectives over just the devices concerned.

The same programs run on gloo (CPUs) and NCCL (GPUs). They are compiled ahead of time, one for each kind of tree (structure, shapes,
dtypes), so that no process waits in a collective for another's compiler.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jpipe._collectives import AXIS, Collective, Group, Kind, Spec, Tree, grouped, kind_of, known, packed, unpacked

Rows = list[Any]  # flat arrays, one for each device or from each
_Exchange = Callable[[list[Rows]], list[Rows]]

_BUFFERED = 1 << 17  # bytes; a message so small is gone into the buffers of the network before the answer to it comes


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
        self._group = Group((source, to))
        self._sends = self._group.device == source
        self._programs: dict[Kind, Collective] = {}
        # What the receiver puts in to get a message out. Kept: making it would cost as much memory traffic as the message.
        self._placeholders: dict[Kind, list[jax.Array]] = {}

    def compile(self, spec: Tree) -> None:
        """Make ready for one kind of message. The receiving process keeps an array for each leaf of it.

        Args:
            spec: the message as a tree of `jax.ShapeDtypeStruct`, of any dtypes but typed random keys.
        """
        kind = kind_of(spec)
        if kind in self._programs:
            return
        leaves = jax.tree.leaves(spec)
        together = grouped(leaves)

        def move(arrays: list[jax.Array]) -> list[jax.Array]:
            return unpacked([jax.lax.ppermute(flat, AXIS, [(0, 1)]) for flat in packed(arrays, together)], together, arrays)

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
        self._programs[known(tree, self._programs)](self._group.encoded(jax.tree.leaves(tree)))

    def receive(self, spec: Tree) -> Tree:
        """Take the next message, in the process of `to`. On CPUs this returns when it is there.

        Args:
            spec: the kind of the message, one that was compiled.

        Returns:
            The message, committed to `to`, bit for bit as it was sent.
        """
        assert not self._sends, "this process has the sending end of the link"
        kind = known(spec, self._programs)
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
        self._group, self._reversed = Group(devices), Group(devices[::-1])
        self._programs: dict[Kind, _Sum] = {}

    def compile(self, spec: Tree) -> None:
        """Make ready for one kind of tree.

        Args:
            spec: a tree of `jax.ShapeDtypeStruct`, of numbers.
        """
        if kind_of(spec) in self._programs:
            return
        n, leaves = self._group.size, jax.tree.leaves(spec)
        together = grouped(leaves)
        sizes = [sum(leaves[i].size for i in group) for group in together]
        dtypes = [leaves[group[0]].dtype for group in together]

        def pack(arrays: list[jax.Array]) -> list[Rows]:
            return [list(jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)) for flat in packed(arrays, together)]

        def add(parts: list[Rows]) -> list[jax.Array]:
            numbers = [[row.view(dtype) for row in rows] for rows, dtype in zip(parts, dtypes, strict=True)]
            return [reduce(jnp.add, rows).view(part[0].dtype) for rows, part in zip(numbers, parts, strict=True)]

        def unpack(shares: list[Rows]) -> list[jax.Array]:
            return unpacked([jnp.concatenate(rows)[:size] for rows, size in zip(shares, sizes, strict=True)], together, plain)

        here = SingleDeviceSharding(self._group.device)
        plain = [Spec(leaf.shape, self._group.plain(leaf.dtype), sharding=here) for leaf in leaves]
        rows = [[Spec((-(-size // n),), self._group.plain(dtype), sharding=here)] * n for size, dtype in zip(sizes, dtypes, strict=True)]
        self._programs[kind_of(spec)] = _Sum(
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
        kind = known(tree, self._programs)
        pack, exchange, add, unpack = self._programs[kind]
        shares = add(exchange(pack(self._group.encoded(jax.tree.leaves(tree)))))
        return self._group.decoded(kind, unpack(exchange([[share] * self._group.size for share in shares])))

    def _exchange(self, spec: list[Rows]) -> "_Exchange":
        """A program that sends row i of each list to device i and gives back, in their order, those that the devices have for this one."""
        largest = max((rows[0].size * rows[0].dtype.itemsize for rows in spec), default=0)
        if self._group.blocks and self._group.size == 2 and largest > _BUFFERED:
            return self._both_ways(spec)

        def exchange(lists: list[Rows]) -> list[Rows]:
            return [list(jax.lax.all_to_all(jnp.stack(rows), AXIS, split_axis=0, concat_axis=0)) for rows in lists]

        return self._group.compile(exchange, spec)

    def _both_ways(self, spec: list[Rows]) -> "_Exchange":
        """An exchange between two processes by two collectives at once, each of which moves one way.

        In one collective they would send one after the other: with gloo a process says that it is ready to receive only after what it
        sends itself. The two take connections of their own, on which a link of the two devices moves the other way.
        """
        here = list(self._group.devices).index(self._group.device)

        def back(lists: list[Rows]) -> Rows:
            return [jax.lax.ppermute(rows[0], AXIS, [(1, 0)]) for rows in lists]

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


def _in_a_thread(call: Callable[[], Tree]) -> "Future[Tree]":
    future: Future[Tree] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # a daemon: a collective whose peer is gone never ends
    return future
