"""Fixtures for the tests of the library."""

import jax
import pytest


@pytest.fixture
def float64():
    """Enable numbers of 64 bits inside the test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def lenient():
    """Allow JAX's standard promotion: Flax's own norms mix bfloat16 and float32."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
