"""Changes of weights in few bits with error feedback, as pure functions. For the rule see `jpipe.plan.Agreement`."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jpipe.capabilities.agreement.option import SHARING_SCALE
from jpipe.capabilities.agreement.rule import changes, mean_changes
from jpipe.model._precision import wider

__all__ = ["mean_of_sent", "pack", "sent_changes", "unpack"]

Tree = Any
Bits = Literal[2, 4]
_STEPS = {4: 1 / 7, 2: 0.44}  # the first scale of a block, as a share of its largest magnitude


def sent_changes(bits: Bits, agreed: Tree, params: Tree, errors: Tree) -> tuple[Tree, Tree]:
    """Return C_k, the changes that a pipeline sends, and its new rounding errors E_k."""
    wanted = jax.tree.map(jnp.add, changes(agreed, params), errors)
    sent = jax.tree.map(lambda leaf: pack(bits, leaf), wanted)
    lost = jax.tree.map(lambda leaf, one: leaf - unpack(bits, one, leaf), wanted, sent)
    return sent, jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, jnp.zeros_like(leaf)), lost)


def mean_of_sent(bits: Bits, specs: Tree, sent: list[Tree]) -> Tree:
    """Return D, the mean of the changes that all pipelines have sent, in arrays with these shapes and dtypes."""
    first, *others = (jax.tree.map(lambda spec, one: unpack(bits, one, spec), specs, each) for each in sent)
    for each in others:
        first = jax.tree.map(jnp.add, first, each)
    return mean_changes(len(sent), first)


def pack(bits: Bits, leaf: jax.Array) -> dict[str, jax.Array]:
    """Round an array to integers of few bits, several in a byte, with a scale for each block."""
    largest, blocks = 2 ** (bits - 1) - 1, -(-leaf.size // SHARING_SCALE)
    flat = leaf.astype(wider(leaf.dtype, jnp.float32)).reshape(-1)
    values = jnp.pad(flat, (0, blocks * SHARING_SCALE - leaf.size)).reshape(blocks, SHARING_SCALE)
    step = jnp.abs(values).max(axis=1, keepdims=True) * _STEPS[bits]
    whole = jnp.clip(jnp.round(values / jnp.where(step == 0, 1, step)), -largest, largest)
    whole = jnp.where(jnp.isfinite(whole), whole, 0)
    scales = (values * whole).sum(axis=1) / jnp.maximum((whole * whole).sum(axis=1), 1)  # NaN if a value is not finite
    each = 8 // bits
    packed = (whole + largest).astype(jnp.uint8).reshape(-1, each) << _shifts(bits)
    return {"scales": scales.astype(jnp.float32), "values": packed.sum(axis=1, dtype=jnp.uint8)[: -(-leaf.size // each)]}


def unpack(bits: Bits, sent: dict[str, jax.Array], spec: Any) -> jax.Array:
    """Return the array that `pack` has rounded, with this shape and dtype."""
    mask = jnp.uint8(2**bits - 1)
    whole = ((sent["values"][:, None] >> _shifts(bits)) & mask).reshape(-1)
    size, wide = math.prod(spec.shape), wider(spec.dtype, jnp.float32)
    scales = jnp.repeat(sent["scales"], SHARING_SCALE)[:size].astype(wide)
    return ((whole[:size].astype(wide) - (2 ** (bits - 1) - 1)) * scales).reshape(spec.shape).astype(spec.dtype)


def _shifts(bits: Bits) -> jax.Array:
    """Return the places of the values in a byte."""
    return jnp.arange(0, 8, bits, dtype=jnp.uint8)[None]
