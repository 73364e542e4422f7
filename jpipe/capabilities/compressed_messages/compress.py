"""Compression of arrays to fewer bits, as pure functions. For the rule see `jpipe.plan.Links`.

Each row is compressed separately. On a mesh the rows are sharded, and so are the values and the scales: nothing is gathered.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.capabilities.compressed_messages.option import BLOCK, Kind
from jpipe.model._precision import wider

Tree = Any


def compress(tree: Tree, kind: Kind | None, key: jax.Array | None = None) -> Tree:
    """Compress the floating-point leaves of a tree that become smaller; without a kind return the tree unchanged.

    A compressed leaf is replaced by an array, or by a dict of two arrays: "values" with the shape of the leaf, and "scales" with the shape
    (rows, blocks). With a random key numbers are rounded stochastically, without one to nearest.
    """
    if kind is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    keys = [None if key is None else jax.random.fold_in(key, i) for i in range(len(leaves))]
    compressed = [_compress(leaf, kind, one) if _shrinks(leaf, kind) else leaf for leaf, one in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, compressed)


def decompress(tree: Tree, kind: Kind | None, specs: Tree) -> Tree:
    """Decompress a tree into arrays with these shapes and dtypes."""
    if kind is None:
        return tree
    return jax.tree.map(lambda spec, leaf: _decompress(leaf, kind, spec) if _shrinks(spec, kind) else leaf, specs, tree)


def compressed_specs(specs: Tree, kind: Kind | None) -> Tree:
    """Return the specs of a compressed tree."""
    return specs if kind is None else jax.eval_shape(partial(compress, kind=kind), specs)


_PURPOSES = {"activation": 6, "gradient": 7, "sum": 8}  # numbers that are folded into the key of the run; layers use smaller numbers


def key_of(message: str, stage: int, rng: tuple[Any, Any]) -> jax.Array:
    """Return the key for the random rounding of a stage's message or sum; `rng` is (number of the message, key of the run)."""
    number, key = rng
    for fixed in (_PURPOSES[message], stage, number):
        key = jax.random.fold_in(key, fixed)
    return key


class _Format(NamedTuple):
    """A format of values that share a scale."""

    largest: float  # the largest magnitude
    dtype: Any  # the dtype of the values
    step: Callable[[jax.Array], jax.Array]  # returns the distance between neighbouring values, for magnitudes up to `largest`


def _step_of_fp8(values: jax.Array) -> jax.Array:
    """Return the distance between neighbouring values of float8_e4m3, which has three bits of mantissa and exponents from -6."""
    _, exponent = jnp.frexp(values)  # exponent for a mantissa from 0.5 up to 1
    return jnp.ldexp(jnp.ones_like(values), jnp.maximum(exponent - 1, -6) - 3)


_FORMATS = {"int8": _Format(127.0, jnp.int8, jnp.ones_like), "fp8": _Format(448.0, jnp.float8_e4m3fn, _step_of_fp8)}


def _shrinks(leaf: Any, kind: Kind) -> bool:
    """Return whether an array (or spec) is compressed."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or not leaf.size:
        return False
    if kind == "bfloat16":
        return leaf.dtype.itemsize > 2
    return leaf.size + 4 * math.prod(_blocks(leaf)) < leaf.size * leaf.dtype.itemsize


def _blocks(leaf: Any) -> tuple[int, int]:
    """Return the number of rows of an array and the number of blocks of each row."""
    rows = leaf.shape[0] if leaf.ndim else 1
    return rows, -(-leaf.size // rows // BLOCK)


def _compress(leaf: jax.Array, kind: Kind, key: jax.Array | None) -> Any:
    if kind == "bfloat16":
        return leaf.astype(jnp.bfloat16) if key is None else _stochastic_bfloat16(leaf, key)
    form, (rows, blocks) = _FORMATS[kind], _blocks(leaf)
    wide = leaf.astype(wider(leaf.dtype, jnp.float32)).reshape(rows, -1)
    padding = ((0, 0), (0, blocks * BLOCK - wide.shape[1]))
    # XLA may replace a division by a constant with a product. Writing the product makes the bits independent of XLA's choice.
    scales = jnp.max(jnp.abs(jnp.pad(wide, padding)).reshape(rows, blocks, BLOCK), axis=2) * (1 / form.largest)
    scales = scales.astype(jnp.float32)
    scaled = wide / _spread(jnp.where(scales == 0, 1, scales), wide)
    scaled = jnp.clip(jnp.where(jnp.isfinite(scaled), scaled, 0), -form.largest, form.largest)
    if key is not None:
        step = form.step(scaled)
        scaled = jnp.floor(scaled / step + jax.random.uniform(key, scaled.shape, scaled.dtype)) * step
        scaled = jnp.clip(scaled, -form.largest, form.largest)
    elif kind == "int8":
        scaled = jnp.round(scaled)
    values = scaled.astype(form.dtype)
    if kind == "fp8":
        values = jax.lax.bitcast_convert_type(values, jnp.uint8)  # transfers and files need not know the dtype
    return {"scales": scales, "values": values.reshape(leaf.shape)}


def _decompress(leaf: Any, kind: Kind, spec: Any) -> jax.Array:
    if kind == "bfloat16":
        return leaf.astype(spec.dtype)
    values, (rows, _) = leaf["values"], _blocks(spec)
    if kind == "fp8":
        values = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    wide = values.astype(wider(spec.dtype, jnp.float32)).reshape(rows, -1)
    return (wide * _spread(leaf["scales"], wide)).reshape(spec.shape).astype(spec.dtype)


def _spread(scales: jax.Array, wide: jax.Array) -> jax.Array:
    """Return the scale of each value of each row."""
    return jnp.repeat(scales, BLOCK, axis=1)[:, : wide.shape[1]].astype(wide.dtype)


def _stochastic_bfloat16(leaf: jax.Array, key: jax.Array) -> jax.Array:
    """Round up or down at random to bfloat16, which is the upper half of the bits of float32."""
    single = leaf.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(single, jnp.uint32)
    drawn = jax.random.bits(key, single.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + drawn) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(single), rounded, single).astype(jnp.bfloat16)
