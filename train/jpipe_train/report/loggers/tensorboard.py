"""Write a run's values for TensorBoard: `tensorboard --logdir RUN` shows them during the run."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from jpipe.files import make_folder
from jpipe_train.console import interrupt

_START = 1  # the start of a session: from its step on, TensorBoard ignores the values in earlier files
_FLUSH_SECONDS = 2.0  # a flush waits for the disk, so not every step is flushed


class TensorBoard:
    """Writes scalars into a folder. Use it in a `with` statement, or call `close`.

    If the folder cannot be written, for example because the disk is full, this is reported once, no more is written, and the run continues.
    Ctrl-C during a write takes effect after the record is complete.

    Args:
        folder: the folder; it is created if it does not exist.
        say: prints a line.
        flush_seconds: the longest time until written values are visible.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], flush_seconds: float = _FLUSH_SECONDS) -> None:
        # SummaryWriter of tensorboardX writes in a thread. If the disk is full the thread dies, and the run would wait forever.
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import RecordWriter

        self._event = Event
        self._folder, self._say, self._flush_seconds = folder, say, flush_seconds
        self._flushed = 0.0
        self._started = False
        self._records: RecordWriter | None = None
        with self._surviving():
            make_folder(folder)
            # TensorBoard reads files in the order of their names, so the name begins with the time. It ends with a random part, because
            # opening a file follows a link that somebody has put there.
            name = f"events.out.tfevents.{time.time_ns()}.{secrets.token_hex(8)}"
            self._records = RecordWriter(str(folder.absolute() / name))
        self._write({"file_version": "brain.Event:2"})

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the values of `step`, such as `{"loss": 2.3, "val_loss": 2.4}`; they need not be finite."""
        if not self._started:
            self._started = True
            self._write({"step": step, "session_log": {"status": _START}})
        values = [{"tag": name, "simple_value": value} for name, value in scalars.items()]
        self._write({"step": step, "summary": {"value": values}})

    def close(self) -> None:
        """Write everything to disk; later values are dropped."""
        with self._surviving():
            if self._records:
                self._records.flush()
                self._records.close()
                self._records = None

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _write(self, content: Mapping[str, object]) -> None:
        with self._surviving():
            if self._records:
                self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
                if time.monotonic() - self._flushed >= self._flush_seconds:
                    self._records.flush()
                    self._flushed = time.monotonic()

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            with interrupt.delayed():
                yield
        except OSError as error:
            self._say(f"tensorboard: cannot write in '{self._folder}': {error.strerror or error}; the run continues without TensorBoard")
            if self._records:
                with contextlib.suppress(OSError):  # closing may fail again, but it closes the file
                    self._records.close()
                self._records = None
