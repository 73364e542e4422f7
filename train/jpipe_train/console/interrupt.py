"""Ctrl-C that is never lost: Python drops a KeyboardInterrupt raised in a callback, so the signal is also recorded."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from jpipe_train.console import signals
from jpipe_train.console.terminal import printable

_pressed = False
_is_delayed = False


@contextmanager
def watched() -> Iterator[None]:
    """Record the first Ctrl-C in this context in addition to raising KeyboardInterrupt; the second ends the process immediately.

    It has an effect only if Python's own handler is installed: not in other threads, and not in a background job, which ignores Ctrl-C.
    """
    global _pressed
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _pressed = False
    report_unraisable = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if isinstance(lost.exc_value, KeyboardInterrupt) else report_unraisable(lost)
    signal.signal(signal.SIGINT, _press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = report_unraisable
        _pressed = False


@contextmanager
def delayed() -> Iterator[None]:
    """Complete the code in this context before a Ctrl-C takes effect: the next `check` raises it."""
    global _is_delayed
    _is_delayed = True
    try:
        yield
    finally:
        _is_delayed = False


@contextmanager
def importing() -> Iterator[None]:
    """Finish the imports in this context before a Ctrl-C takes effect: modules in C may crash when interrupted."""
    with delayed():
        yield
    check()


def check() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed, even if the first KeyboardInterrupt was lost."""
    if _pressed:
        raise KeyboardInterrupt


def pressed() -> bool:
    """Return whether Ctrl-C was pressed inside `watched`."""
    return _pressed


def forget() -> None:
    """Continue after a Ctrl-C inside `watched` that has had its effect; the next one is recorded again."""
    global _pressed
    if _pressed:
        _pressed = False
        signal.signal(signal.SIGINT, _press)


def is_ours() -> bool:
    """Return whether `watched` is active, and Ctrl-C was not pressed yet."""
    return signal.getsignal(signal.SIGINT) is _press


def words(error: BaseException) -> str | None:
    """Return a line to print for an error that Ctrl-C caused, or None for another error."""
    # A KeyboardInterrupt that passes through C code can become any other error.
    if not isinstance(error, KeyboardInterrupt) and not _pressed:
        return None
    message = isinstance(error, KeyboardInterrupt) and str(error)
    return printable(message or "interrupted before the run began")


def _press(number: int, frame: FrameType | None) -> None:
    global _pressed
    _pressed = True
    signal.signal(signal.SIGINT, signals.usual(signal.SIGINT))
    if not _is_delayed:
        raise KeyboardInterrupt
