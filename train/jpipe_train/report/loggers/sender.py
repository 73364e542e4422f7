"""Send a run's values to Weights & Biases, trackio or MLflow from a thread, so that training never waits for it."""

import contextlib
import importlib.util
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from jpipe import InputError
from jpipe.files import make_folder, read_bytes, shown, write_atomically
from jpipe_train.console.terminal import first_line
from jpipe_train.report.loggers.services import SERVICES, About

_ID = "id.txt"  # the file with the run's id in the service, with which a resumed run continues there
_KEPT = {"wandb": "wandb sync {folder} sends the rows kept there"}
_MOST_QUEUED = 100_000  # rows that are not sent yet
_LIMIT, _SHORT = 30.0, 5.0  # seconds that the end of a run waits for the service, usually and after a signal
_late: list[str] = []  # services that did not end in time


def check_installed(service: str) -> None:
    """Check that the library of a service is installed."""
    spec = importlib.util.find_spec(service)
    if spec is None or spec.origin is None:  # no module; a folder ./wandb also has a spec
        raise InputError(f"log: {service} is not installed; install it with pip install {service}, or remove {service} from log")


def some_are_late() -> bool:
    """Return whether a service did not end in time, and so may keep Python from ending."""
    return bool(_late)


class Sender:
    """Sends rows to a service. Use it in a `with` statement, or call `close`.

    Problems are printed in one line, and the run continues. Without a login or a network, wandb keeps the rows on disk.

    Args:
        service: one of `SERVICES`.
        folder: the folder of the run.
        config: the config of the run, as plain data.
        say: prints a line.
        begin: the function that begins the run in the service; by default the function in `SERVICES`.
        limit: seconds that `close` waits for the service.
    """

    def __init__(
        self,
        service: str,
        folder: Path,
        config: Mapping[str, Any],
        say: Callable[[str], None],
        begin: Callable[[About, Callable[[str], None]], Any] | None = None,
        limit: float = _LIMIT,
    ) -> None:
        self._service, self._folder, self._say, self._limit = service, folder / service, say, limit
        self._begin = begin or SERVICES[service]
        self._rows: queue.SimpleQueue[tuple[int, Mapping[str, float]] | int] = queue.SimpleQueue()  # the last item is the exit code
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()  # lines that `write` and `close` print
        self._thread: threading.Thread | None = None
        self._accepts_rows = True
        try:
            make_folder(self._folder)
            about = About(self._id(), folder.name, config, folder, limit)
            thread = threading.Thread(target=self._send, args=(about,), name=service, daemon=True)
            thread.start()
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            self._accepts_rows = False
            self._say(f"{self._service}: cannot begin in '{shown(self._folder)}': {reason}; the run continues without it")
        else:
            self._thread = thread

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Queue the values of `step`, such as `{"loss": 2.3}`, without waiting."""
        self._print()
        if not self._accepts_rows:
            return
        self._rows.put((step, dict(scalars)))
        if self._rows.qsize() > _MOST_QUEUED:
            self._accepts_rows = False
            self._say(f"{self._service}: {_MOST_QUEUED:,} rows are waiting to be sent; the run continues, but sends no more rows")

    def hurry(self) -> None:
        """Make `close` wait only a few seconds."""
        self._limit = min(self._limit, _SHORT)

    def close(self, code: int = 0) -> None:
        """End the run in the service with the exit code `code`, and wait up to the limit until everything is sent.

        Values that are written later are dropped.
        """
        thread, self._thread, self._accepts_rows = self._thread, None, False
        if thread is None:
            return
        self._rows.put(code)
        thread.join(self._limit)
        self._print()
        if thread.is_alive():
            _late.append(self._service)
            kept = _KEPT.get(self._service, "metrics.jsonl has all rows").format(folder=shown(self._folder))
            self._say(f"{self._service}: some rows could not be sent within {self._limit:g} s; {kept}")

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is not None:
            self.hurry()
        self.close(0 if kind is None else 1)

    def _id(self) -> str:
        """Return the id of the run in the service. A resumed run has the same id."""
        file, requested = self._folder / _ID, os.environ.get("WANDB_RUN_ID") if self._service == "wandb" else None
        with contextlib.suppress(OSError):
            stored = read_bytes(file, 2**10).decode("ascii", errors="replace").strip()
            if requested in (None, stored) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", stored):
                return stored
        chosen = requested or secrets.token_hex(4)
        write_atomically(file, chosen + "\n")
        return chosen

    def _send(self, about: About) -> None:
        """Begin the run in the service, send the rows and end the run. This function runs in the thread."""
        try:
            run = self._begin(about, self._lines.put)
            while not isinstance(row := self._rows.get(), int):
                step, scalars = row
                if step >= run.step:  # a resumed run repeats rows that the service already has
                    run.log(scalars, step=step, commit=True)
            run.finish(exit_code=row)
        except BaseException as error:  # a library may also raise SystemExit
            self._accepts_rows = False
            self._lines.put(f"{first_line(error)}; the run continues without it")

    def _print(self) -> None:
        while not self._lines.empty():
            self._say(f"{self._service}: {self._lines.get()}")
