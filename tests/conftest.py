"""What holds in every test: eight devices on any machine, strict numbers, types checked at run time."""

import os

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
# No silent widening and no silent broadcasting in our code. Optax's own Adam mixes int and float: jpipe allows that to optax alone.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# From here on both packages are imported with every annotation, shapes included, checked at each call.
install_import_hook(["jpipe", "planner", "train"], "beartype.beartype")


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Programs that are equal are compiled once in a session: many pipelines over the same tiny stacks."""
    session = tmp_path_factory.getbasetemp()
    shared = session.parent if "PYTEST_XDIST_WORKER" in os.environ else session  # by all workers of the session
    jax.config.update("jax_compilation_cache_dir", str(shared / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
