"""A setting of the C library that speeds up programs on CPU devices."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # the names of glibc's malloc.h
_LARGEST_INT = 2**31 - 1
_SETTINGS = {"MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_"}


def keep_freed_memory() -> bool:
    """Make this process keep freed memory instead of returning it to the system immediately.

    On CPUs XLA allocates the temporaries of each call with `malloc`. glibc maps large blocks anew every time, so each call of a stage
    touches new pages, which the system has to clear. This takes a fifth of the time of a transformer step. A program with one call per step
    (a scan over microbatches) does so once per step; a pipeline, once per microbatch.

    The price: all threads share one arena, which makes many small allocations slower. In four stages that compute almost nothing, a
    microbatch takes a quarter longer.

    glibc before 2.38 reuses blocks aligned as XLA's badly, so a process can need twice the memory of its arrays. Settings of `malloc` in
    the environment count instead of this one: with `MALLOC_MMAP_THRESHOLD_=1048576` blocks of a megabyte or more return to the system.

    Call this function before the first array is made. It affects the whole process, but not GPUs. `jpipe train` calls it.

    Returns:
        True if the setting took effect; False if the C library is not glibc, or the environment has settings of `malloc`.
    """
    if not _SETTINGS.isdisjoint(os.environ) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc: macOS, Windows, musl
        return False
    return all(mallopt(name, value) == 1 for name, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _LARGEST_INT)))
