"""Quantized kernels: the nearest numbers, in as many bits as promised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe import InputError
from jpipe_lm.models.quantized import dequantize, multiply, quantize

NF4 = [-1.0, -0.69619, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0, 0.07958, 0.16093, 0.24611, 0.33792, 0.44071, 0.56262]
NF4 = np.asarray([*NF4, 0.72296, 1.0])  # Dettmers et al., QLoRA, appendix E
KERNEL = np.asarray(jax.random.normal(jax.random.key(0), (192, 6)) * jnp.linspace(0.1, 10, 6)[None], np.float32)


@pytest.mark.oldest
@pytest.mark.parametrize(("kind", "rows"), [("int8", 192), ("nf4", 96)])
def test_each_number_becomes_the_nearest_one(kind, rows):
    codes, scale = quantize(jnp.asarray(KERNEL), kind)
    assert (codes.shape, codes.dtype.itemsize, scale.shape) == ((rows, 6), 1, (3, 6))
    blocks = KERNEL.reshape(3, 64, 6)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    levels = np.arange(-128, 128) / 127.5 if kind == "int8" else NF4
    least = np.abs(blocks[..., None] - levels * largest[..., None]).min(-1)
    found = np.abs(np.asarray(dequantize(codes, scale, kind)).reshape(3, 64, 6) - blocks)
    np.testing.assert_allclose(found / largest, least / largest, atol=1e-5)


def test_kernels_of_other_sizes_have_smaller_blocks():
    codes, scale = quantize(jnp.asarray(KERNEL[:40]), "nf4")
    assert (codes.shape, scale.shape) == ((20, 6), (5, 6))
    assert np.abs(np.asarray(dequantize(codes, scale, "nf4")) - KERNEL[:40]).max() < np.abs(KERNEL[:40]).max() * 0.16


def test_nf4_needs_pairs():
    with pytest.raises(InputError, match="nf4 needs kernels with an even number of inputs, found 5; use int8"):
        quantize(jnp.ones((5, 2)), "nf4")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_products_and_their_gradients_are_those_of_the_dequantized_kernel(kind):
    codes, scale = quantize(jnp.asarray(KERNEL), kind)
    x, weights = jnp.asarray(KERNEL.T[None]), jnp.arange(36.0).reshape(1, 6, 6)
    actual = jax.value_and_grad(lambda x: (multiply(x, codes, scale, kind) * weights).sum())(x)
    expected = jax.value_and_grad(lambda x: ((x @ dequantize(codes, scale, kind)) * weights).sum())(x)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-6)


def test_a_chain_of_kernels_needs_the_memory_of_few():
    """XLA would dequantize all of them first."""
    codes, scale = quantize(jnp.ones((256, 256)), "int8")

    def chain(x: jax.Array, kernels: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        for codes, scale in kernels:
            x = jnp.tanh(multiply(x, codes, scale, "int8"))
        return x.sum()

    compiled = jax.jit(jax.grad(chain)).lower(jnp.ones((2, 256)), [(codes, scale)] * 8).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 256 * 256 * 4
