"""The routes of arrays between workers: the pieces that devices send each other. Each is sent once; nothing is gathered."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

Tree = Any
Box = tuple[tuple[int, int], ...]
"""A part of an array: for each dim (start, stop)."""
Pair = tuple[jax.Device, jax.Device]


class Piece(NamedTuple):
    """A part of an array that is sent."""

    leaf: int  # the position of the array in its message
    inside: Box  # the place of the piece in the shard of the sending device
    box: Box  # the place of the piece in the array


class Route:
    """The route of one kind of message to a worker in another process, or to a worker with other shards.

    Each distinct shard of the receiver arrives in pieces, one from each of the sender's shards that overlap it. Each piece goes between one
    pair of devices. If several devices of the receiver need a shard, it arrives once and is copied among them.

    Args:
        sent: the specs of the message, with the shardings of the sender.
        arriving: the specs of the message, with the shardings of the receiver.

    Attributes:
        pieces: for each pair of devices (sender, receiver) the pieces to send, in the same order in both processes.
    """

    def __init__(self, sent: Tree, arriving: Tree) -> None:
        self._arriving, self._treedef = jax.tree.flatten(arriving)
        self._is_whole = all(len(spec.sharding.device_set) == 1 for spec in (*jax.tree.leaves(sent), *self._arriving))
        self.pieces: dict[Pair, list[Piece]] = {}
        for leaf, (before, after) in enumerate(zip(jax.tree.leaves(sent), self._arriving, strict=True)):
            sources = holders(before.sharding, before.shape)
            for number, (box, devices) in enumerate(holders(after.sharding, after.shape).items()):
                for part, owners in sources.items():
                    if (piece := _overlap(part, box)) is not None:
                        inside = tuple((start - first, stop - first) for (start, stop), (first, _) in zip(piece, part, strict=True))
                        pair = owners[number % len(owners)], devices[0]
                        self.pieces.setdefault(pair, []).append(Piece(leaf, inside, piece))

    @cached_property
    def specs(self) -> dict[Pair, list[jax.ShapeDtypeStruct]]:
        """The specs of the pieces for each pair of devices."""
        dtypes = [leaf.dtype for leaf in self._arriving]
        return {
            pair: [jax.ShapeDtypeStruct(_shape(piece.box), dtypes[piece.leaf]) for piece in pieces] for pair, pieces in self.pieces.items()
        }

    def cut(self, tree: Tree) -> dict[Pair, list[jax.Array]]:
        """Cut a message into the pieces for each pair of devices."""
        if self._is_whole:
            return {pair: jax.tree.leaves(tree) for pair in self.pieces}
        shards = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in jax.tree.leaves(tree)]
        return {pair: [_cut(shards[piece.leaf][pair[0]], piece.inside) for piece in sent] for pair, sent in self.pieces.items()}

    def join(self, received: Mapping[Pair, Sequence[jax.Array]]) -> Tree:
        """Join the pieces of each pair of devices into the message."""
        if self._is_whole:
            return jax.tree.unflatten(self._treedef, next(iter(received.values()), ()))
        by_leaf: list[dict[jax.Device, list[tuple[Box, jax.Array]]]] = [{} for _ in self._arriving]
        for pair, arrays in received.items():
            for piece, array in zip(self.pieces[pair], arrays, strict=True):
                by_leaf[piece.leaf].setdefault(pair[1], []).append((piece.box, array))
        leaves = [
            assembled(spec.shape, spec.sharding, {device: _joined(parts) for device, parts in by_device.items()})
            for spec, by_device in zip(self._arriving, by_leaf, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)


class Shards:
    """The distinct shards of a tree, by the number of the device that owns each. Replicas on equal meshes sum shard by shard.

    Args:
        specs: the specs of the tree, with the shardings of one replica.
        devices: the devices of this replica, in the order of its mesh.
    """

    def __init__(self, specs: Tree, devices: Sequence[jax.Device]) -> None:
        self._leaves, self._treedef = jax.tree.flatten(specs)
        number = {device: i for i, device in enumerate(devices)}
        self._owned: dict[int, list[tuple[int, Box]]] = {}
        for leaf, spec in enumerate(self._leaves):
            if len(devices) == 1:
                self._owned.setdefault(0, []).append((leaf, tuple((0, size) for size in spec.shape)))
                continue
            for box, owners in holders(spec.sharding, spec.shape).items():  # of the devices that hold a shard, one owns it, in turn
                self._owned.setdefault(number[owners[leaf % len(owners)]], []).append((leaf, box))

    @cached_property
    def specs(self) -> dict[int, list[jax.ShapeDtypeStruct]]:
        """The specs of the shards, by number of the device."""
        return {
            number: [jax.ShapeDtypeStruct(_shape(box), self._leaves[leaf].dtype) for leaf, box in shards]
            for number, shards in sorted(self._owned.items())
        }

    def cut(self, tree: Tree, devices: Sequence[jax.Device]) -> dict[int, list[jax.Array]]:
        """Cut arrays on these devices into shards, by number of the device."""
        if len(devices) == 1:
            return {0: jax.tree.leaves(tree)} if self._leaves else {}
        shards = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in jax.tree.leaves(tree)]
        return {number: [shards[leaf][devices[number]] for leaf, _ in self._owned[number]] for number in self.specs}

    def join(self, parts: Mapping[int, Sequence[jax.Array]], shardings: Sequence[Sharding]) -> Tree:
        """Join shards into arrays with these shardings."""
        if set(parts) == {0} and all(len(sharding.device_set) == 1 for sharding in shardings):
            return jax.tree.unflatten(self._treedef, parts[0])
        by_leaf: list[dict[jax.Device, jax.Array]] = [{} for _ in self._leaves]
        for number, arrays in parts.items():
            for (leaf, _), array in zip(self._owned[number], arrays, strict=True):
                (device,) = array.devices()
                by_leaf[leaf][device] = array
        leaves = [
            assembled(spec.shape, sharding, by_device) for spec, sharding, by_device in zip(self._leaves, shardings, by_leaf, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)


def holders(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[jax.Device]]:
    """Return for each distinct shard of an array the devices that have it, in the order of the mesh."""
    devices_of: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        box = tuple((part.start or 0, size if part.stop is None else part.stop) for part, size in zip(index, shape, strict=True))
        devices_of.setdefault(box, []).append(device)
    return devices_of


def same_shards(a: Tree, b: Tree) -> bool:
    """Return whether two trees of specs have the same shards, so that each shard can be copied unchanged."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    return all(
        len(x.sharding.device_set) == 1 or holders(x.sharding, x.shape).keys() == holders(y.sharding, y.shape).keys() for x, y in pairs
    )


def assembled(shape: tuple[int, ...], sharding: Sharding, parts: Mapping[jax.Device, jax.Array]) -> jax.Array:
    """Assemble an array from its distinct shards. Each shard is on one device that needs it; the other devices get copies."""
    shards = []
    for devices in holders(sharding, shape).values():
        shard = next(parts[device] for device in devices if device in parts)
        shards += [shard if shard.devices() == {device} else jax.device_put(shard, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def joined(futures: "Sequence[Future[Tree]]", join: Callable[[list[Tree]], Tree], fail: Callable[[BaseException], None]) -> "Future[Tree]":
    """Combine futures. The last one's thread calls `join` on all results; `fail` gets errors of the futures and of `join`."""
    assert futures, "nothing to wait for"
    whole: Future[Tree] = Future()
    lock, results, joins = threading.Lock(), dict[int, Tree](), [join]

    def one(number: int, future: "Future[Tree]") -> None:
        try:
            result = future.result()
            with lock:
                results[number] = result
                if len(results) < len(positions):
                    return
            result = joins.pop()([results[i] for i in positions])
            results.clear()  # a future holds this function, which otherwise would keep the arrays alive
            whole.set_result(result)
        except BaseException as error:
            fail(error)
            with lock:
                if not whole.done():
                    whole.set_exception(error)

    positions = range(len(futures))
    for number, future in enumerate(futures):
        future.add_done_callback(partial(one, number))
    return whole


def _overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) or 0 in _shape(a) else None


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _cut(shard: jax.Array, inside: Box) -> jax.Array:
    return shard if _shape(inside) == shard.shape else _sliced(shard, inside)


@partial(jax.jit, static_argnums=1)
def _sliced(shard: jax.Array, inside: Box) -> jax.Array:
    return shard[tuple(slice(*part) for part in inside)]


def _joined(parts: Iterable[tuple[Box, jax.Array]]) -> jax.Array:
    """Concatenate pieces of a shard along its first dim."""
    ordered = [array for _, array in sorted(parts, key=lambda part: part[0])]
    return ordered[0] if len(ordered) == 1 else _concatenated(ordered)


@jax.jit
def _concatenated(parts: list[jax.Array]) -> jax.Array:
    return jnp.concatenate(parts)
