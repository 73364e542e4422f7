"""A run's numbers for TensorBoard: `tensorboard --logdir RUN` shows them while the run goes on."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from jpipe.files import make_folder
from train.console import interrupt

_START = 1  # of a session: what earlier files say of this step and later ones is left out
_FLUSH_SECONDS = 2.0  # a flush waits for the disk: not at every step


class TensorBoard:
    """Writes scalars into a folder; close it, or use it in a `with`.

    A run is worth more than its curves: when the folder cannot be written (a full disk, say), this says so once and
    writes nothing more. A Ctrl-C inside a write waits until the record is whole.

    Args:
        folder: it is created if it does not exist.
        say: takes the message, one line.
        flush_seconds: how long what was written may wait until it can be seen.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], flush_seconds: float = _FLUSH_SECONDS) -> None:
        # Its SummaryWriter writes in a thread, which dies of a full disk and leaves the run waiting for ever: below it are records.
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import RecordWriter

        self._event = Event
        self._folder, self._say, self._flush_seconds = folder, say, flush_seconds
        self._flushed = 0.0
        self._started = False
        self._records: RecordWriter | None = None
        with self._surviving():
            make_folder(folder)
            # Read in the order of their names: those of a run that goes on later come behind. It follows links: the end is random.
            name = f"events.out.tfevents.{time.time_ns()}.{secrets.token_hex(8)}"
            self._records = RecordWriter(str(folder.absolute() / name))
        self._write({"file_version": "brain.Event:2"})

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the values of `step`, such as `{"loss": 2.3, "val_loss": 2.4}`; those that are not finite are shown as such."""
        if not self._started:
            self._started = True
            self._write({"step": step, "session_log": {"status": _START}})
        values = [{"tag": name, "simple_value": value} for name, value in scalars.items()]
        self._write({"step": step, "summary": {"value": values}})

    def close(self) -> None:
        """Bring everything to the disk; what is written afterwards is dropped."""
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
            with interrupt.held():
                yield
        except OSError as error:
            self._say(f"tensorboard: cannot write in '{self._folder}': {error.strerror or error}; the run goes on without TensorBoard")
            if self._records:
                with contextlib.suppress(OSError):  # the same once more, but it is closed
                    self._records.close()
                self._records = None
