"""The processes of one run. They start with the same config and end together; process 0 prints for all."""

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, cast

import jax

import jpipe
from jpipe_train import registry
from jpipe_train.assemble.build import start_devices
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from jpipe_train.console.exit_codes import code_of, may_pass
from jpipe_train.launch.numeric_settings import numeric_settings

T = TypeVar("T")

_MAY_PASS = "whether another try may succeed"
_LONG_WORK = 600.0  # seconds that the other processes wait for work of process 0


class ReportedElsewhere(Exception):
    """This process ends for a reason that another process reports; `code` is the exit code."""

    def __init__(self, index: int, reporting: str, reason: Exception) -> None:
        super().__init__(f"process {index} ends; {reporting} says why")
        self.code = code_of(reason) if isinstance(reason, jpipe.InputError) else 1


class Team:
    """All processes of this run, for the application.

    Attributes:
        processes: the `Processes` of the library; None for a single process.
        index: the number of this process; 0 for a single process.
        is_first: whether this is process 0, which writes and prints.
        all_know: whether all processes end for a reason that each of them knows.
    """

    def __init__(self, processes: jpipe.processes.Processes | None) -> None:
        self.processes = processes
        self.index = 0 if processes is None else processes.index
        self.is_first = self.index == 0
        self.all_know = False
        self._numbers = itertools.count()  # for the names of the numbers that `largest` exchanges

    def agree(self, facts: Callable[[], dict[str, str]]) -> None:
        """Continue only if these facts are the same in all processes. Raise jpipe.InputError if they differ; reported as by `shared`."""
        if self.processes is not None:
            try:
                self.processes.agree(facts())
            except jpipe.InputError as error:
                raise self.shared(error) from None

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, if it succeeds in all processes.

        Otherwise raise jpipe.InputError. If all processes have the same error, process 0 reports it; otherwise each process reports its
        own.
        """
        try:
            done, problem = work(), None
        except jpipe.InputError as error:
            done, problem = None, error
        if self.processes is not None:
            passing = "" if problem is None or not may_pass(problem) else "yes"
            difference: jpipe.InputError | None = None
            try:
                self.processes.agree({"outcome": "" if problem is None else str(problem), _MAY_PASS: passing})
            except jpipe.InputError as error:
                difference = error
            if difference is not None:  # raised outside the handler, to keep the original cause
                self.all_know = True
                difference.may_pass = any(line.startswith(_MAY_PASS) for line in difference.args)  # type: ignore[attr-defined]
                raise problem or ReportedElsewhere(self.processes.index, "another process", difference)
        if problem is not None:
            raise self.shared(problem)
        return cast(T, done)

    def attempt(self, what: str, work: Callable[[], T], failure: type[jpipe.InputError]) -> tuple[T | None, str]:
        """Return the result of `work` and "", or, if any process fails with `failure`, in all processes None and the first message.

        Other errors are raised as by `run_on_all`.
        """

        def result_or_error() -> T | jpipe.InputError:
            try:
                return work()
            except failure as error:
                return error

        done = self.run_on_all(result_or_error)
        message = str(done) if isinstance(done, failure) else ""
        if self.processes is not None:
            messages = self.processes.gather(what, message.encode())
            message = next((text.decode() for text in messages if text), "")
        return (None, message) if message else (cast(T, done), "")

    def from_first(self, what: str, work: Callable[[], str], limit: float = _LONG_WORK) -> str:
        """Run `work` in process 0, and return its text in all processes. They wait for it, `limit` seconds at most.

        Process 0 reports an InputError of `work`.
        """

        def work_alone() -> str:
            if not self.is_first:
                return ""
            with self.working(what, limit):
                return work()

        text = self.run_on_all(work_alone)
        if self.processes is None:
            return text
        if self.is_first:
            self.processes.broadcast(what, text.encode())
        return self.processes.receive(what, 0).decode()

    def working(self, what: str, limit: float = _LONG_WORK) -> contextlib.AbstractContextManager[object]:
        """Return a context for long work, described by `what`. Other processes may wait for this work, for `limit` seconds at most."""
        return contextlib.nullcontext() if self.processes is None else self.processes.waiting(what, limit=limit)

    def meet(self, place: str) -> None:
        """Wait at most ten minutes until all processes have come to this place. The same place can be used again."""
        if self.processes is not None:
            self.processes.barrier(place)

    def largest(self, what: str, number: float) -> float:
        """Return the largest of the numbers that all processes pass; all processes call this. `what` describes the numbers in messages."""
        if self.processes is None:
            return number
        return max(map(float, self.processes.gather(f"number {next(self._numbers)}", str(number).encode(), what)))

    def start_devices(self, limit: float) -> None:
        """If there are several processes, start their devices; continue only if all devices are of one kind.

        JAX waits for the devices of all processes, so `run_on_all` cannot be used here. If a process fails, it tells the other processes.
        They wait `limit` seconds, but at least a minute, because large machines may take so long to start devices. Raise jpipe.InputError
        if this process has no devices, or the devices of processes differ; reported as by `shared`, and jpipe.PeerLost if another process
        has no devices.
        """
        if self.processes is not None:  # a single process starts them later, after more checks
            with self.processes.waiting("the devices of all processes, of one kind", limit=max(limit, 60.0)):
                start_devices()
            self.agree(devices)

    def shared(self, reason: Exception) -> Exception:
        """Return the error to raise for a reason that all processes share: only process 0 reports it."""
        self.all_know = True
        return reason if self.processes is None or self.is_first else ReportedElsewhere(self.processes.index, "process 0", reason)


@contextlib.contextmanager
def joined(num_processes: int, limit: float, wait: float) -> Iterator[Team]:
    """Join the processes of this run for the duration of this context. An error in one process ends all processes.

    The arguments are as for `jpipe.join_processes`; a single process joins nothing. Raise jpipe.InputError if process 0 cannot be reached,
    or another process did not connect, and jpipe.PeerLost if another process died, hung or stopped.
    """
    team = Team(jpipe.join_processes(limit, wait) if num_processes > 1 else None)
    try:
        yield team
    except BaseException as error:
        if team.processes is not None and not team.all_know and not isinstance(error, jpipe.PeerLost):
            team.processes.stop(_why(error, team.is_first))
        raise


def _why(error: BaseException, is_first: bool) -> str:
    """Return the reason that others print after 'process N stopped: '; for an error of process 0 it points to process 0's message."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if is_first:
        return "it says why"
    return str(error) if isinstance(error, (jpipe.InputError, RuntimeError)) else type(error).__name__


def facts(config: Config) -> dict[str, str]:
    """Return the facts that must be the same in all processes before JAX starts a device, which needs all processes."""
    return {
        "config": config_file.to_yaml(config),
        **code_facts(),
        **{
            f"code of {module}": _digest_of_module(module)
            for module in sorted({target.partition(":")[0] for target in config.code.values()})
        },
    }


def code_facts() -> dict[str, str]:
    """Return the versions and settings that must be the same in all processes of any job."""
    return {
        "code of jpipe": f"{jpipe.__version__} {_digest_of_jpipe()}",
        **{f"version of {name}": importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
        **numeric_settings(),
        "JAX_PLATFORMS": jax.config.values["jax_platforms"] or "",
    }


def devices() -> dict[str, str]:
    """Return the facts about devices that must be the same in all processes."""
    device = jax.local_devices()[0]
    return {"kind of devices": f"{device.platform} {device.device_kind}", "number of devices": str(jax.local_device_count())}


def _digest_of_module(module: str) -> str:
    """Return a digest of the source of a user's module, without importing the module; without a source file, the digest of b""."""
    folders: Sequence[str] = [str(Path.cwd()), *sys.path]
    parts, source = module.split("."), b""
    for end in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:end]), folders)
        folders = (spec and spec.submodule_search_locations) or ()
        with contextlib.suppress(OSError):  # the import reports what is wrong
            source = Path(spec.origin).read_bytes() if spec is not None and spec.origin is not None else b""
    return hashlib.sha256(source).hexdigest()[:12]


@functools.cache
def _digest_of_jpipe() -> str:
    """Return a digest of the source code of jpipe, of its planner, of this package, and of the packages that extend it."""
    digest = hashlib.sha256()
    for package in ("jpipe", "jpipe_planner", *registry.packages()):
        spec = importlib.util.find_spec(package)
        for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
            for file in sorted(folder.rglob("*.py")):
                digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]
