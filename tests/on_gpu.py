"""A pytest plugin for `make check-gpu`: run tests on one GPU, which stands for the eight devices of the other machines.

Products of float32 are computed in float32, not in TensorFloat32, because the references are exact. Programs that tests start inherit the
settings. With `JPIPE_CHECK=rehearse` the first CPU device takes the part of the GPU.
"""

import json
import os
import re
from pathlib import Path

import jax
import pytest

CHECK = "JPIPE_CHECK"  # set here: one device is shared; "rehearse": it is a CPU device
RESULTS = "JPIPE_CHECK_RESULTS"  # the file for a line of JSON for each test, which is read even if the tests are cut off

os.environ.setdefault(CHECK, "gpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the GPU
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")  # trying algorithms for tiny products takes longer than the tests
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
jax.config.update("jax_default_matmul_precision", "highest")

NEEDS_SEVERAL_DEVICES = r"mesh|test_memory.py|\[gpt2-3\]"
IS_ABOUT_CPUS = r"notebook|in_float16_on_cpus|test_cudnn_is_refused_where_there_is_none|leaves_no_weights_behind"
# A GPU adds the rows of an embedding's gradient in any order.
NEEDS_A_FIXED_ORDER = r"test_the_first_stage_has_nothing_in_its_first_half"


def share_device():
    """Let the first device stand for eight."""
    every = jax.devices
    jax.devices = lambda backend=None: every(backend) if backend else every()[:1] * 8


def pytest_configure(config):
    """End in words where there is no GPU; elsewhere repeat the only one."""
    jax.config.update("jax_num_cpu_devices", 8)  # as in conftest.py, which may not have been read yet
    if jax.default_backend() != "gpu" and os.environ[CHECK] != "rehearse":
        pytest.exit("no GPU here, or none that JAX can use: its tests are skipped; `make check-gpu` says what to install", returncode=0)
    share_device()


def pytest_collection_modifyitems(config, items):
    """Leave out what one GPU cannot do."""
    pattern = re.compile("|".join((NEEDS_SEVERAL_DEVICES, IS_ABOUT_CPUS, NEEDS_A_FIXED_ORDER)))
    left_out = [item for item in items if pattern.search(item.nodeid)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_runtest_logreport(report):
    """Write down how a test, or a part of it, ended."""
    is_news = report.when == "call" or report.outcome != "passed"
    if RESULTS not in os.environ or "PYTEST_XDIST_WORKER" in os.environ or not is_news:
        return
    part = getattr(getattr(report, "context", None), "msg", None)
    line = {"test": report.nodeid + (f", {part}" if part else ""), "outcome": report.outcome, "seconds": report.duration}
    if report.failed:
        line["says"] = report.longreprtext[-3000:]
    with Path(os.environ[RESULTS]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
