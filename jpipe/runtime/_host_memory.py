"""One setting of the C library that speeds up programs on CPU devices; nothing else of jpipe needs it."""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # the names of glibc's malloc.h
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process keep the memory it frees instead of giving it back to the system at once.

    On CPUs XLA takes the temporaries of each call from `malloc`. glibc maps large blocks anew every time, so each
    call of a stage touches fresh pages, which the system has to clear: a fifth of the time of a transformer step.
    A program that is one call a step (a scan over microbatches) pays that once, a pipeline once a microbatch.

    The price: threads share one arena, which makes many tiny allocations slower (a microbatch through four stages that
    compute almost nothing takes a quarter longer).

    Call it before the first array is made. For the whole process; it does nothing for GPUs. `jpipe train` calls it.

    Returns:
        Whether it took effect: False where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc: macOS, Windows, musl
        return False
    return all(mallopt(name, value) == 1 for name, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _LARGEST_INT)))
