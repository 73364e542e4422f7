"""Freed host memory is reused, so that allocating it again touches no fresh page."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource
from jpipe import keep_freed_memory

def fresh_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        block = bytearray(b"x") * 50_000_000
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(fresh_pages(), keep_freed_memory(), fresh_pages(), fresh_pages())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_blocks_are_reused():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    before, took_effect, _, after = done.stdout.split()
    if took_effect == "True":  # False: a C library other than glibc
        assert int(before) > 10_000
        assert int(after) < 1_000


@pytest.mark.parametrize("setting", [{"MALLOC_MMAP_THRESHOLD_": "1048576"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}])
def test_settings_in_the_environment_count(setting):
    code, environment = "import jpipe; print(jpipe.keep_freed_memory())", os.environ | setting
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, env=environment)
    assert done.stdout == "False\n"
