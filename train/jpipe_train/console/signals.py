"""Signals that end a process immediately, whatever it is doing, even if it is process 1 of a container.

For process 1 the kernel has no default action: with SIG_DFL it ignores a signal.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

_replaced: dict[int, Any] = {}  # the handlers that `handled` has temporarily replaced


def leave(number: int, frame: FrameType | None = None) -> None:
    """End this process immediately, with the exit code that a shell shows for the signal."""
    os._exit(128 + number)


def usual(number: int) -> Any:
    """Return the handler for the default action of a signal; for process 1, a function with the same effect."""
    return leave if os.getpid() == 1 else signal.SIG_DFL


def is_usual(number: int) -> bool:
    """Return whether a signal has its default handler; a parent, such as nohup, may have made this process ignore it."""
    return signal.getsignal(number) in (signal.SIG_DFL, leave)


@contextlib.contextmanager
def handled(numbers: Collection[int], handler: Callable[[int, FrameType | None], None], received: Callable[[int], None]) -> Iterator[None]:
    """Handle signals in this context. It has no effect outside the main thread or if `numbers` is empty.

    Args:
        numbers: the signals.
        handler: called by the main thread when it runs Python code.
        received: called by another thread for each signal as it arrives. While the main thread waits in C, for example for a device,
            Python calls no handler, and counts two signals as one.
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


def default_in_process_1() -> contextlib.AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP end this process in this context, even if it is process 1 of a container."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    return handled(numbers if os.getpid() == 1 else (), leave, leave)


def _watch_in_a_thread(numbers: Collection[int], received: Callable[[int], None]) -> int:
    """Return a file descriptor for signals as they arrive; a thread reads them until the descriptor is closed."""
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
    """Restore the earlier handlers in a forked child, and do not report its signals to the parent."""
    if _replaced:
        signal.set_wakeup_fd(-1)
        for number, handler in _replaced.items():
            signal.signal(number, signal.SIG_DFL if handler is leave else handler)


os.register_at_fork(after_in_child=_restore_in_child)
