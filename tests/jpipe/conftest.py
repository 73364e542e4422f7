"""Fixtures for the tests of the library."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Programs that are equal are compiled once in a module: hundreds of pipelines over the same tiny stack."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture
def float64():
    """Numbers of 64 bits inside the test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def lenient():
    """JAX's usual promotion: Flax's own norms mix bfloat16 and float32."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
