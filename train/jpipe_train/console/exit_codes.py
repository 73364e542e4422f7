"""Choose the exit code of a failed command: 2 if the user has to change something, 1 if another try may succeed.

This imports neither JAX nor the library.
"""

import errno

from jpipe_train.console.terminal import fail, printable

FAILED, BAD_INPUT = 1, 2


# Errors of a disk or network that is broken or full, and of resources that other programs use.
_TEMPORARY = frozenset(
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
    """Print the error of a command on standard error, and return its exit code."""
    return fail("\n".join(map(printable, str(error).split("\n"))), code_of(error))


def may_pass(error: BaseException) -> bool:
    """Return whether another try may succeed: the error has the attribute `may_pass`, or a temporary system error caused it."""
    if getattr(error, "may_pass", False):
        return True
    system_error = reported_by_system(error)
    return system_error is not None and (system_error.errno in _TEMPORARY or isinstance(system_error, ConnectionError | TimeoutError))


def reported_by_system(error: BaseException) -> OSError | None:
    """Return the most recent system error among the causes of an error, or None."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, OSError) and (current.errno is not None or isinstance(current, ConnectionError | TimeoutError)):
            return current
        current = current.__cause__ or current.__context__
    return None
