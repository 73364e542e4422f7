"""Send a run's values to Weights & Biases, trackio or MLflow from a separate process, so that training never waits for it."""

import contextlib
import importlib.util
import json
import os
import queue
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from jpipe import InputError
from jpipe.files import make_folder, read_bytes, shown, write_atomically
from jpipe_train.console import interrupt

SERVICES = ("wandb", "trackio", "mlflow")
"""The services: names of Python packages, of keys in `log`, and of folders inside the folder of a run."""

_ID = "id.txt"  # holds the id by which a resumed run continues in the same run of the service
_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("process.py")))  # -P: no other wandb beside the file or in ./ is imported
_KEPT = {"wandb": "wandb sync {folder} sends what is kept there"}
_MOST_QUEUED = 100_000  # rows that are not sent yet
_LIMIT, _SHORT = 30.0, 5.0  # seconds that the end of a run waits for the process; after a signal


def check_installed(service: str) -> None:
    """Check that the library of a service is installed.

    Raises:
        InputError: it is not installed.
    """
    spec = importlib.util.find_spec(service)
    if spec is None or spec.origin is None:  # such as a folder ./wandb
        raise InputError(f"log: {service} is not installed; install it with pip install {service}, or leave it out")


class Sender:
    """Sends rows to a service; use it in a `with`, or close it.

    Problems are reported in a line, and the run continues: without a login or a network wandb keeps the rows on disk.

    Args:
        service: one of `SERVICES`.
        folder: the folder of the run.
        config: the config of the run, as plain data.
        say: prints a line.
        command: the command of the sending process; by default the service's.
        limit: seconds that `close` waits for it.
    """

    def __init__(
        self,
        service: str,
        folder: Path,
        config: Mapping[str, Any],
        say: Callable[[str], None],
        command: Sequence[str] | None = None,
        limit: float = _LIMIT,
    ) -> None:
        self._service, self._folder, self._say, self._limit = service, folder / service, say, limit
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[dict[str, str | None]] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._accepts_rows = self._has_failed = False
        self._threads: list[threading.Thread] = []
        try:
            make_folder(self._folder)
            first_message = {"id": self._id(), "name": folder.name, "process": os.getpid(), "config": config, "folder": str(folder)}
            with interrupt.delayed():
                self._start(command or (*_COMMAND, service))
        except OSError as error:
            self._say(f"{self._service}: cannot begin in '{shown(self._folder)}': {error.strerror or error}; the run continues without it")
        else:
            self._accepts_rows = True
            self._lines.put(json.dumps(first_message))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Queue the values of `step`, such as `{"loss": 2.3}`, without waiting."""
        self._print_answers()
        if not self._accepts_rows:
            return
        self._lines.put(json.dumps({"step": step, "row": dict(scalars)}))
        if self._lines.qsize() > _MOST_QUEUED:
            self._accepts_rows = False
            self._say(f"{self._service}: {_MOST_QUEUED:,} rows are waiting to be sent; the run continues, and sends no more")

    def hurry(self) -> None:
        """Limit the waiting of `close` to a few seconds."""
        self._limit = min(self._limit, _SHORT)

    def close(self, code: int = 0) -> None:
        """End the run in the service with this exit code. Wait until everything is sent, up to the limit; later values are dropped."""
        process, self._process = self._process, None
        if process is None:
            return
        self._accepts_rows = False
        for line in (json.dumps({"end": code}), None):
            self._lines.put(line)
        late = False
        try:
            process.wait(self._limit)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            process.kill()
            process.wait()
            for thread in self._threads:
                thread.join()
        self._print_answers(ended=late or process.returncode == 0)
        if late:
            kept = _KEPT.get(self._service, "metrics.jsonl has all rows").format(folder=shown(self._folder))
            self._say(f"{self._service}: not all was sent in {self._limit:g} s; {kept}")

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is not None:
            self.hurry()
        self.close(0 if kind is None else 1)

    def _start(self, command: Sequence[str]) -> None:
        """Start the process in its own session, where Ctrl-C does not reach it."""
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, **pipes, text=True, encoding="utf-8", start_new_session=True)  # noqa: S603 - ours
        for work, pipe in ((self._send, self._process.stdin), (self._read_answers, self._process.stdout)):
            thread = threading.Thread(target=work, args=(pipe,), name=self._service, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _id(self) -> str:
        """Return the id of the run in the service, the same after it is resumed."""
        file, requested = self._folder / _ID, os.environ.get("WANDB_RUN_ID") if self._service == "wandb" else None
        with contextlib.suppress(OSError):
            stored = read_bytes(file, 2**10).decode("ascii", errors="replace").strip()
            if requested in (None, stored) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", stored):
                return stored
        chosen = requested or secrets.token_hex(4)
        write_atomically(file, chosen + "\n")
        return chosen

    def _send(self, pipe: Any) -> None:
        """Write queued lines to the process, in a thread that waits while the process does not read."""
        with contextlib.suppress(OSError), pipe:  # the process may end earlier
            while (line := self._lines.get()) is not None:
                pipe.write(line + "\n")
                pipe.flush()

    def _read_answers(self, pipe: Any) -> None:
        """Read the answers of the process, in a thread."""
        with pipe:
            for line in pipe:
                with contextlib.suppress(ValueError):
                    self._answers.put(json.loads(line))
        self._answers.put({"ended": None})

    def _print_answers(self, ended: bool = False) -> None:
        """Print the answers of the process; `ended` says whether it has ended as expected."""
        while not self._answers.empty():
            answer = self._answers.get()
            problem = answer.get("problem")
            if "url" in answer:
                self._say(f"{self._service}: {answer['url']}")
            elif "folder" in answer:
                why, where = (problem or "offline").rstrip("."), shown(Path(answer["folder"] or ""))
                self._say(f"{self._service}: {why}; the rows are kept on disk, and wandb sync {where} sends them")
            elif not self._has_failed and (problem or not ended):
                self._accepts_rows, self._has_failed = False, True
                self._say(f"{self._service}: {problem or 'its process has ended'}; the run continues without it")
