"""Shards are sent between meshes in pieces: each piece once, and together they form the message."""

import gc
import weakref
from concurrent.futures import Future

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jpipe._frozen import FrozenMapping
from jpipe.meshes._place import Place
from jpipe.meshes._routes import Route, Shards, joined
from jpipe.stages._arrays import shardings_of

P = PartitionSpec
ROWS = 8
SENDERS = {"one": {}, "two": {"data": 2}, "four": {"data": 4}, "two and two": {"data": 2, "model": 2}, "model": {"model": 2}}


def place(mesh: dict[str, int], first: int) -> Place:
    return Place(tuple(jax.devices()[first : first + int(np.prod(list(mesh.values()), initial=1))]), FrozenMapping(mesh))


def message(where: Place):
    """Return specs of rows, sharded over "data" where the mesh has this axis, and of a scalar."""
    tree = {"x": jax.ShapeDtypeStruct((ROWS, 3), np.float32), "weight": jax.ShapeDtypeStruct((), np.float32)}
    return where.specs(tree, {"x": P("data") if "data" in where.mesh else P(), "weight": P()})


@pytest.mark.parametrize("sender", SENDERS)
@pytest.mark.parametrize("receiver", SENDERS)
def test_each_piece_travels_once_and_all_arrive(sender, receiver):
    source, to = place(SENDERS[sender], 0), place(SENDERS[receiver], 4)
    leaving, arriving = message(source), message(to)
    route = Route(leaving, arriving)
    rng = np.random.default_rng(0)
    host = {"x": rng.normal(size=(ROWS, 3)).astype(np.float32), "weight": np.float32(2.5)}
    sent = jax.device_put(host, shardings_of(leaving))
    moved = {}
    for pair, pieces in route.cut(sent).items():
        assert pair[0] in source.devices
        assert pair[1] in to.devices
        assert [(piece.shape, piece.dtype) for piece in pieces] == [(spec.shape, spec.dtype) for spec in route.specs[pair]]
        moved[pair] = jax.device_put(pieces, pair[1])  # in place of a link
    assert sum(piece.size for pieces in moved.values() for piece in pieces) == ROWS * 3 + 1, "nothing twice"
    arrived = route.join(moved)
    assert {name: leaf.sharding for name, leaf in arrived.items()} == {name: spec.sharding for name, spec in arriving.items()}
    np.testing.assert_array_equal(arrived["x"], host["x"])
    assert arrived["weight"] == host["weight"]


def test_replicas_sum_each_shard_once():
    where = place({"data": 2, "model": 2}, 0)
    specs = where.specs(
        {"w": jax.ShapeDtypeStruct((4, 6), np.float32), "b": jax.ShapeDtypeStruct((3,), np.float32)}, {"w": P(None, "model"), "b": P()}
    )
    shards = Shards(specs, where.devices)
    assert sum(spec.size for shard_specs in shards.specs.values() for spec in shard_specs) == 4 * 6 + 3
    host = {"w": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.ones(3, np.float32)}
    tree = jax.device_put(host, shardings_of(specs))
    parts = shards.cut(tree, where.devices)
    doubled = {number: [2 * array for array in arrays] for number, arrays in parts.items()}
    joined = shards.join(doubled, [leaf.sharding for leaf in jax.tree.leaves(tree)])
    for name, leaf in joined.items():
        np.testing.assert_array_equal(leaf, 2 * host[name])
        assert leaf.sharding == tree[name].sharding


def test_nothing_keeps_joined_arrays_alive():
    futures, failures = [Future(), Future()], []
    whole = joined(futures, sum, failures.append)
    parts = [np.full(3, 1.0), np.full(3, 2.0)]
    seen = [weakref.ref(part) for part in parts]
    gc.disable()  # what is in a cycle would stay until it runs
    try:
        while futures:
            futures.pop().set_result(parts.pop())
        np.testing.assert_array_equal(whole.result(0), np.full(3, 3.0))
        assert [part() for part in seen] == [None, None]
    finally:
        gc.enable()
    assert failures == []
