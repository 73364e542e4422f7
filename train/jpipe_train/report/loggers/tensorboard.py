"""Write a run's values for TensorBoard: `tensorboard --logdir RUN` shows them during the run."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from jpipe.files import make_folder
from jpipe_train.console import interrupt

_START = 1  # start of a session: TensorBoard ignores this step and later ones in earlier files
_FLUSH_SECONDS = 2.0  # a flush waits for the disk: not at every step


class TensorBoard:
    """Writes scalars into a folder; use it in a `with`, or close it.

    If it cannot write into the folder, for example because the disk is full, it reports that once and stops writing; the run continues. A
    Ctrl-C during a write waits until the record is complete.

    Args:
        folder: the folder; it is created if it does not exist.
        say: prints a line.
        flush_seconds: the longest time until written values are visible.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], flush_seconds: float = _FLUSH_SECONDS) -> None:
        # TensorBoard's SummaryWriter writes in a thread, which dies of a full disk, so that the run would wait forever.
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import RecordWriter

        self._event = Event
        self._folder, self._say, self._flush_seconds = folder, say, flush_seconds
        self._flushed = 0.0
        self._started = False
        self._records: RecordWriter | None = None
        with self._surviving():
            make_folder(folder)
            # Files are read in the order of their names: a resumed run comes later. Opening follows links, so names end randomly.
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
                with contextlib.suppress(OSError):  # it may fail again, but the file is closed
                    self._records.close()
                self._records = None
