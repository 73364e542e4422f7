"""Handle failures of standard output and standard error: a closed pipe, a full disk, a lost terminal."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class _Output:
    """A text stream. If writing fails, the process ends if `ends` is set; otherwise all further output is dropped."""

    def __init__(self, stream: Any, *, ends: bool) -> None:
        self._stream, self._ends = stream, ends

    def write(self, text: str) -> int:
        with self._dropped():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        with self._dropped():
            self._stream.writelines(lines)

    def flush(self) -> None:
        with self._dropped():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _dropped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Python flushes its buffers when it ends, and C++ code writes directly. From here on both succeed.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if not self._ends:
                return
            if error.errno == errno.EPIPE:
                raise SystemExit(128 + signal.SIGPIPE) from None  # without a message, like programs that SIGPIPE ends
            print(f"jpipe: cannot write to standard output: {error.strerror or error}", file=sys.stderr)
            raise SystemExit(1) from None


@contextlib.contextmanager
def steady(*, ends: bool) -> Iterator[None]:
    """Keep prints in this context from failing if the output is lost.

    If the process `ends` then, it does so as most command-line tools do. A training run continues.
    """
    _reserve_standard_descriptors()
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _Output(sys.stdout, ends=ends))
    sys.stderr = cast(TextIO, _Output(sys.stderr, ends=False))
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            sys.stdout, sys.stderr = before


def _reserve_standard_descriptors() -> None:
    """Reserve the descriptors of standard streams that are closed at the start (`>&-`), so that no file gets them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
