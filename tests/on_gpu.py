"""A pytest plugin for `make test-gpu`: run tests of numbers on one GPU, which stands for the eight devices of the other machines.

Products of float32 are computed in float32, not in TensorFloat32, because the references are exact.
"""

import os
import re

import jax
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the GPU
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")  # trying algorithms for tiny products takes longer than the tests
jax.config.update("jax_default_matmul_precision", "highest")

NEEDS_SEVERAL_DEVICES = r"mesh|test_memory.py|\[gpt2-3\]"
IS_ABOUT_CPUS = r"notebook|in_float16_on_cpus|test_cudnn_is_refused_where_there_is_none|leaves_no_weights_behind"
# A GPU adds the rows of an embedding's gradient in any order.
NEEDS_A_FIXED_ORDER = r"test_the_first_stage_has_nothing_in_its_first_half"


def pytest_configure(config):
    """End in words where there is no GPU; elsewhere repeat the only one."""
    jax.config.update("jax_num_cpu_devices", 8)  # as in conftest.py, which may not have been read yet
    if jax.default_backend() != "gpu":
        pytest.exit("no GPU here, or none that JAX can use (pip install 'jax[cuda13]'): its tests are skipped", returncode=0)
    every = jax.devices
    jax.devices = lambda backend=None: every(backend) if backend else every()[:1] * 8


def pytest_collection_modifyitems(config, items):
    """Leave out what one GPU cannot do."""
    pattern = re.compile("|".join((NEEDS_SEVERAL_DEVICES, IS_ABOUT_CPUS, NEEDS_A_FIXED_ORDER)))
    left_out = [item for item in items if pattern.search(item.nodeid)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
