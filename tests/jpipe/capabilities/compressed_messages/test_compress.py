"""Arrays in fewer bits: how far they are from what they were, and how many bytes they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.capabilities.compressed_messages.compress import compress, compressed_specs, decompress
from jpipe.plan import BLOCK

KINDS = ("bfloat16", "int8", "fp8")
SHAPES = [(3, 700), (2, 5, 33), (1, 300), (4, 256)]


def both_ways(x, kind, key=None):
    packed = compress(jnp.asarray(x), kind, key)
    jax.tree.map(lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), packed, compressed_specs(x, kind))
    return np.asarray(decompress(packed, kind, x)), packed


def values(shape, seed=0):
    """Return numbers of very different sizes."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(3 * rng.normal(size=shape))).astype(np.float32)


def rule(x, kind):
    """Apply the rule of `jpipe.plan.Links` with NumPy, block by block."""
    if kind == "bfloat16":
        return x.astype(jnp.bfloat16).astype(x.dtype)
    rows, largest = x.reshape(x.shape[0], -1), {"int8": 127, "fp8": 448}[kind]
    result = np.zeros_like(rows)
    for i, row in enumerate(rows):
        for begin in range(0, len(row), BLOCK):
            block = row[begin : begin + BLOCK]
            scale = np.abs(block).max() * np.float32(1 / largest)
            scaled = np.clip(block / scale if scale else block, -largest, largest)
            whole = np.round(scaled) if kind == "int8" else scaled.astype(jnp.float8_e4m3fn).astype(np.float32)
            result[i, begin : begin + BLOCK] = whole * scale
    return result.reshape(x.shape)


@pytest.mark.thinned
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_rule_and_takes_fewer_bytes(kind, shape):
    x = values(shape)
    found, packed = both_ways(x, kind)
    np.testing.assert_array_equal(found, rule(x, kind))
    blocks = shape[0] * -(-(x.size // shape[0]) // BLOCK)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(packed)) == (2 * x.size if kind == "bfloat16" else x.size + 4 * blocks)
    assert np.abs(found - x).max() <= np.abs(x).max() * {"bfloat16": 2**-8, "int8": 0.5001 / 127, "fp8": 2**-4}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_rounding_is_one_of_two_neighbours_and_right_on_average(kind):
    x = values((2, 40))
    keys = jax.random.split(jax.random.key(1), 2000)
    found = np.asarray(jax.vmap(lambda key: decompress(compress(jnp.asarray(x), kind, key), kind, x))(keys))
    spread = np.abs(found - x).max(0)
    steps = np.abs(x) * 2**-7 if kind == "bfloat16" else np.maximum(np.abs(x) * 2**-3, np.abs(x).max(1, keepdims=True) / 448 * 2**-9)
    steps = np.broadcast_to(np.abs(x).max(1, keepdims=True) / 127, x.shape) if kind == "int8" else steps
    assert (spread <= steps * 1.001).all()
    assert len(np.unique(found[:, 0, 0])) == 2
    assert (np.abs(np.mean(found, 0, dtype=np.float64) - x) <= steps * 0.06).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_zeros_stay_and_a_block_with_nan_or_infinity_arrives_as_nan(kind):
    x = np.zeros((3, 300), np.float32)
    x[1, 5], x[2, 270] = np.inf, np.nan
    for key in (None, jax.random.key(0)):
        found, _ = both_ways(x, kind, key)
        assert (found[0] == 0).all()
        assert np.isnan(found[1, :256]).all()
        assert (found[1, 256:] == 0).all()
        assert np.isnan(found[2, 256:]).all()


def test_a_row_depends_on_no_other_row():
    x, other = values((2, 300)), values((2, 300), 1)
    other[0] = x[0]
    np.testing.assert_array_equal(both_ways(x, "int8")[0][0], both_ways(other, "int8")[0][0])


def test_what_would_not_become_smaller_stays_as_it_is():
    tree = {
        "whole": jnp.arange(600),
        "key": jax.random.key(0),
        "complex": jnp.ones(4, complex),
        "scalar": jnp.float32(2.0),
        "thin": jnp.ones((5, 1)),
        "number of each row": jnp.ones(300),
        "empty": jnp.ones((0, 3)),
        "half": jnp.ones((1, 8), jnp.bfloat16),
        "few": jnp.ones((4, 2), jnp.bfloat16),
    }
    for kind, shrinks in (("int8", {"half"}), ("fp8", {"half"}), ("bfloat16", {"scalar", "thin", "number of each row"}), (None, set())):
        packed = compress(tree, kind)
        assert {name for name in tree if packed[name] is not tree[name]} - {"empty"} == shrinks
        found = decompress(packed, kind, tree)
        assert all((found[name].shape, found[name].dtype) == (leaf.shape, leaf.dtype) for name, leaf in tree.items())


@pytest.mark.parametrize("kind", KINDS)
def test_float64_and_float16_come_back_as_they_were(kind):
    with jax.enable_x64(True):
        for dtype in (jnp.float16, jnp.float64):
            x = jnp.asarray(values((2, 50)), dtype)
            found = decompress(compress(x, kind), kind, x)
            assert found.dtype == dtype
            assert np.abs(np.asarray(found - x, np.float64)).max() <= float(jnp.abs(x).max()) * 2**-4
