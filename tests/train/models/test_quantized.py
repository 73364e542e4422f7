"""Quantized kernels: the nearest numbers, in as many bits as promised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe import InputError
from jpipe_train.models.quantized import dequantize, quantize

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
    with pytest.raises(InputError, match="nf4 keeps inputs in pairs, found a kernel with 5; use int8"):
        quantize(jnp.ones((5, 2)), "nf4")
