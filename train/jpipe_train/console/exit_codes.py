"""The exit code of a command that fails: 2 where the user has to change something, 1 where another try may succeed.

This imports neither JAX nor the library.
"""

import errno

from jpipe_train.console.terminal import fail, printable

FAILED, BAD_INPUT = 1, 2


# Of a disk or a network that is out of order, of one that is full, and of what other programs use.
_PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "ESTALE", "ENODEV", "EREMOTEIO", "ENOTCONN", "ENOLINK", "ECOMM", "EPROTO", "ESHUTDOWN", "EBADFD", "ENOMEDIUM"),
        *("ETIMEDOUT", "ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENETRESET"),
        *("ENOSPC", "EDQUOT", "ENOMEM", "ENOBUFS", "EMFILE", "ENFILE", "EAGAIN", "EINTR", "EBUSY", "ETXTBSY", "ENOLCK", "EDEADLK"),
        *("EADDRINUSE", "EPIPE"),
    )
    if hasattr(errno, name)
)


def code_of(error: Exception) -> int:
    """Return the exit code of a command that ends with this error."""
    return FAILED if may_pass(error) else BAD_INPUT


def failed(error: Exception) -> int:
    """Print on standard error why a command ends; return its exit code."""
    return fail("\n".join(map(printable, str(error).split("\n"))), code_of(error))


def may_pass(error: BaseException) -> bool:
    """Return whether another try may succeed: the error has a true `may_pass`, or the system has reported something that may pass."""
    if getattr(error, "may_pass", False):
        return True
    reported = reported_by_system(error)
    return reported is not None and (reported.errno in _PASSING or isinstance(reported, ConnectionError | TimeoutError))


def reported_by_system(error: BaseException) -> OSError | None:
    """Return the error of the system that an error was raised for, if there is one: the last before it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and (seen.errno is not None or isinstance(seen, ConnectionError | TimeoutError)):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None
