"""Compressed sums of gradients over replicas, with error feedback, as pure functions. For the rule see `jpipe.plan.Links`.

On a mesh each shard is compressed separately, and nothing is gathered: a block consists of neighbouring values of one shard.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jpipe.capabilities.compressed_messages.compress import compress, compressed_specs, decompress, key_of
from jpipe.capabilities.compressed_messages.option import Kind
from jpipe.meshes._partition import WHOLE, Partition, shard_bytes, without_devices
from jpipe.stages._bytes import nbytes
from jpipe.stages.functions._loss import divisor
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any
Spec = jax.ShapeDtypeStruct
Keys = Mapping[str, jax.Array]
"""For each entry a random key for stochastic rounding."""


def with_feedback(
    f: StageFunctions, gradients: Mapping[str, Tree], weight: jax.Array, errors: Tree, rng: tuple[Any, Any]
) -> tuple[Tree, Tree]:
    """Return (compressed gradients, new errors) of a replica for a sum, after adding the rounding errors of earlier updates.

    `gradients` are summed over the microbatches of the replica, by entry; `errors` is a tree like them. `rng` is (number of the update and
    the replica, key of the run), or (None, None) to round to nearest.
    """
    keys = None
    if rng[1] is not None:
        key = key_of("sum", f.number, rng)
        keys = {entry: jax.random.fold_in(key, n) for n, entry in enumerate(sorted(f.specs.params))}
    arrays = _arrays(f.partition, f.capabilities["links"].sums, gradients)
    pairs = jax.tree.map(lambda array, *both: array.compress(*both, weight, keys), arrays, gradients, errors)
    sent, lost = (jax.tree.map(lambda _, pair, n=n: pair[n], arrays, pairs) for n in range(2))
    return sent, lost


def without_compression(partition: Partition, kind: Kind, sent: Tree, specs: Mapping[str, Tree]) -> Tree:
    """Decompress the gradients that `with_feedback` has compressed; the result has the shapes and dtypes of `specs`."""
    return jax.tree.map(lambda array, one: array.decompress(one), _arrays(partition, kind, specs), sent)


def specs_of_sent(partition: Partition, kind: Kind, gradients: Mapping[str, Tree]) -> tuple[Tree, Tree]:
    """Return the shapes and dtypes of compressed gradients, and their `PartitionSpec`s."""
    arrays = _arrays(partition, kind, gradients)
    return jax.tree.map(lambda array: array.sent_shapes, arrays), jax.tree.map(lambda array: array.sent_specs, arrays)


def bytes_of_given(kind: Kind, accumulators: Mapping[str, Any]) -> int:
    """Return the bytes per device that a replica contributes to a sum of these accumulators, or of specs with shardings."""
    gradients = jax.tree.leaves(accumulators["gradients"])
    return nbytes({**accumulators, "gradients": None}) + sum(
        _bytes_of_row(shard_bytes(leaf) // leaf.dtype.itemsize, leaf.dtype, kind) for leaf in gradients
    )


@functools.cache
def _bytes_of_row(length: int, dtype: Any, kind: Kind) -> int:
    return nbytes(compressed_specs(Spec((1, length), dtype), kind))


@dataclass(frozen=True)
class _Array:
    """An array of gradients on the mesh of a stage."""

    entry: str  # the entry to which the array belongs
    number: int  # the number of the array among the arrays of the entry
    whole: Spec  # the shape and dtype of the array
    partition: Partition  # the partition of the stage
    spec: PartitionSpec  # the sharding of the array
    kind: Kind  # the kind of compression

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of shards in each dim."""
        axes = *self.spec, *(None,) * (len(self.whole.shape) - len(self.spec))
        return tuple(1 if axis is None else self.partition.mesh[axis] for axis in axes)

    @property
    def shard(self) -> Spec:
        """The shape and dtype of a shard."""
        return Spec(tuple(size // count for size, count in zip(self.whole.shape, self.counts, strict=True)), self.whole.dtype)

    @property
    def row(self) -> Spec:
        """The shape and dtype of a shard as one row."""
        return Spec((1, math.prod(self.shard.shape)), self.whole.dtype)

    @property
    def sent_shapes(self) -> Tree:
        """The shapes and dtypes of the compressed array, over all shards."""
        sent = jax.eval_shape(lambda row: self._as_shard(compress(row, self.kind)), self.row)
        counts = *self.counts, 1  # scales have a dim of blocks
        return jax.tree.map(lambda one: Spec(tuple(map(math.prod, zip(one.shape, counts, strict=False))), one.dtype), sent)

    @property
    def sent_specs(self) -> Tree:
        """The `PartitionSpec`s of the compressed array."""
        is_scaled = isinstance(compressed_specs(self.row, self.kind), dict)
        return {"scales": self.spec, "values": self.spec} if is_scaled else self.spec

    def compress(self, gradient: jax.Array, error: jax.Array, weight: jax.Array, keys: Keys | None) -> tuple[Tree, jax.Array]:
        """Return the compressed gradient and the new error."""
        key = () if keys is None else (keys[self.entry],)
        inputs = self.spec, self.spec, WHOLE, *(WHOLE for _ in key)
        return self._on_shards(self._compressed, inputs, (self.sent_specs, self.spec))(gradient, error, weight, *key)

    def decompress(self, sent: Tree) -> jax.Array:
        """Decompress the array."""

        def of_shard(sent: Tree) -> jax.Array:
            rows = jax.tree.map(lambda leaf: leaf.reshape(1, -1), sent)
            return decompress(rows, self.kind, self.row).reshape(self.shard.shape)

        return self._on_shards(of_shard, (self.sent_specs,), self.spec)(sent)

    def _compressed(self, gradient: jax.Array, error: jax.Array, weight: jax.Array, *keys: jax.Array) -> tuple[Tree, jax.Array]:
        """Apply the rule to one shard."""
        row = (gradient + (error.astype(weight.dtype) * weight).astype(gradient.dtype)).reshape(1, -1)
        sent = compress(row, self.kind, self._key_of_shard(*keys) if keys else None)
        lost = (row - decompress(sent, self.kind, self.row)).reshape(gradient.shape)
        each = (lost.astype(weight.dtype) / divisor(weight)).astype(error.dtype)
        each = jnp.where(jnp.isfinite(each), each, jnp.zeros_like(each))
        return self._as_shard(sent), jnp.where(weight == 0, error, each)

    def _key_of_shard(self, key: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, self.number)
        for axis in self.spec:
            key = key if axis is None else jax.random.fold_in(key, jax.lax.axis_index(axis))
        return key

    def _as_shard(self, sent: Tree) -> Tree:
        """Give a compressed row the shape of its shard; scales get one more dim, with one value per block."""
        shape = self.shard.shape
        if not isinstance(sent, dict):
            return sent.reshape(shape)
        return {"scales": sent["scales"].reshape(*(1 for _ in shape), -1), "values": sent["values"].reshape(shape)}

    def _on_shards(self, function: Callable[..., Any], inputs: Tree, outputs: Tree) -> Callable[..., Any]:
        """Turn a function of shards into a function of whole arrays."""
        if not self.partition.mesh:
            return function
        mesh = without_devices(self.partition.mesh)
        return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def _arrays(partition: Partition, kind: Kind, gradients: Mapping[str, Tree]) -> Tree:
    """Return the `_Array` of each leaf of the gradients (or their specs)."""
    arrays = {}
    for entry, specs in partition.of_params(gradients).items():
        numbers = itertools.count()
        arrays[entry] = jax.tree.map(
            lambda leaf, spec, entry=entry, numbers=numbers: _Array(
                entry, next(numbers), Spec(leaf.shape, leaf.dtype), partition, spec, kind
            ),
            gradients[entry],
            specs,
        )
    return arrays
