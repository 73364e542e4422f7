"""Handle signals in commands. This module does not import JAX.

- Ctrl-C is never lost: Python drops a KeyboardInterrupt that is raised in a callback, so the signal is also recorded (`watched`).
- Signals end a process immediately, even process 1 of a container. The kernel has no default action for process 1: with SIG_DFL it
  ignores a signal.
- A run that saves and ends at signals (`jpipe_train.console.preemption`) receives each signal when it arrives (`handled`).
- A program that starts other programs records signals and passes them on (`recorded`).
A step of the library delays signals itself (`jpipe._interrupts`), so that it works in any program with any signal handlers.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from jpipe_train.console.terminal import printable

LAUNCHER = "JPIPE_LAUNCHER"
"""The variable with the process id of `jpipe launch`, which sets it."""

_pressed = False
_is_delayed = False
_replaced: dict[int, Any] = {}  # the handlers that `handled` has temporarily replaced


@contextmanager
def watched() -> Iterator[None]:
    """Record the first Ctrl-C in this context and raise KeyboardInterrupt. A second Ctrl-C has its `usual` effect.

    This has an effect only in the main thread and with Python's own handler. A background job, which ignores Ctrl-C, keeps ignoring it.
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
    """Complete the code in this context before a Ctrl-C takes effect. The next `check` raises KeyboardInterrupt."""
    global _is_delayed
    _is_delayed = True
    try:
        yield
    finally:
        _is_delayed = False


@contextmanager
def importing() -> Iterator[None]:
    """Finish the imports in this context before a Ctrl-C takes effect, because C modules may crash when interrupted."""
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
    """Forget a Ctrl-C inside `watched` that has taken effect. The next Ctrl-C is recorded again."""
    global _pressed
    if _pressed:
        _pressed = False
        signal.signal(signal.SIGINT, _press)


def is_ours() -> bool:
    """Return whether `watched` is active and Ctrl-C has not been pressed yet."""
    return signal.getsignal(signal.SIGINT) is _press


def words(error: BaseException) -> str | None:
    """Return a line to print for an error that Ctrl-C caused; None for any other error."""
    # A KeyboardInterrupt that passes through C code can turn into any other error.
    if not isinstance(error, KeyboardInterrupt) and not _pressed:
        return None
    message = isinstance(error, KeyboardInterrupt) and str(error)
    return printable(message or "interrupted before the run began")


def leave(number: int, frame: FrameType | None = None) -> None:
    """End this process immediately, with the exit code of a process that the signal ended."""
    os._exit(128 + number)


def usual(number: int) -> Any:
    """Return the handler that ends the process immediately; in an interactive session, Ctrl-C only raises KeyboardInterrupt."""
    if number == signal.SIGINT and is_interactive():
        return signal.default_int_handler
    return leave if os.getpid() == 1 else signal.SIG_DFL


def is_interactive() -> bool:
    """Return whether a person types the program, for example into a notebook; the session holds objects that a signal must not destroy."""
    return hasattr(sys, "ps1")


def is_usual(number: int) -> bool:
    """Return whether a signal has its default handler; a parent, such as nohup, may have made this process ignore it."""
    return signal.getsignal(number) in (signal.SIG_DFL, leave)


@contextmanager
def handled(numbers: Collection[int], handler: Callable[[int, FrameType | None], None], received: Callable[[int], None]) -> Iterator[None]:
    """Handle signals in this context. This has no effect if `numbers` is empty, or outside the main thread.

    Another thread calls `received` as soon as a signal arrives. While the main thread waits in C, for example for a device, Python calls no
    handler, and merges two signals into one.
    """
    if not numbers or threading.current_thread() is not threading.main_thread():
        yield
        return
    replaced_outside = dict(_replaced)
    writer = _watch_in_a_thread(numbers, received)
    descriptor = signal.set_wakeup_fd(writer)
    previous = {number: signal.signal(number, handler) for number in numbers}
    _replaced.update(previous)
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before)
        signal.set_wakeup_fd(descriptor)
        os.close(writer)
        _replaced.clear()
        _replaced.update(replaced_outside)


def default_in_process_1() -> AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP end this process in this context, even if it is process 1 of a container."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    return handled(numbers if os.getpid() == 1 else (), leave, leave)


def is_launched() -> bool:
    """Return whether `jpipe launch` started this process; it passes its signals on to this process."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


@contextmanager
def recorded() -> Iterator[list[int]]:
    """Yield a list to which the signals that ask this process to end are appended when they arrive.

    Signals that the process ignores, as under nohup, stay ignored.
    """
    received: list[int] = []
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]

    def record(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP or not received:  # when a connection drops, several SIGHUP arrive, perhaps with SIGTERM
            received.append(number)

    before = {number: signal.signal(number, record) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _press(number: int, frame: FrameType | None) -> None:
    global _pressed
    _pressed = True
    signal.signal(signal.SIGINT, usual(signal.SIGINT))
    if not _is_delayed:
        raise KeyboardInterrupt


def _watch_in_a_thread(numbers: Collection[int], received: Callable[[int], None]) -> int:
    """Return a file descriptor to which Python writes signals when they arrive. A thread reads them until the descriptor is closed."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def read() -> None:
        with open(reader, "rb", buffering=0) as signals_arrived:
            while number := signals_arrived.read(1):
                if number[0] in numbers:
                    received(number[0])

    threading.Thread(target=read, name="signals", daemon=True).start()
    return writer


def _restore_in_child() -> None:
    """Restore the earlier handlers in a forked child, and stop it from reporting its signals to the parent."""
    if _replaced:
        signal.set_wakeup_fd(-1)
        for number, handler in _replaced.items():
            signal.signal(number, signal.SIG_DFL if handler is leave else handler)


os.register_at_fork(after_in_child=_restore_in_child)
