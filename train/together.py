"""The processes of one run start alike and end together, and process 0 speaks for all of them."""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

import jax

import jpipe
from train import config_file, distributed
from train.config import Config

T = TypeVar("T")


class ToldElsewhere(Exception):
    """This process ends for a reason that another one tells.

    Args:
        index: of this process.
        teller: who tells it.
        reason: the mistake, or what came of it.

    Attributes:
        code: the exit code of a process that ends for this reason.
    """

    def __init__(self, index: int, teller: str, reason: Exception) -> None:
        super().__init__(f"process {index} ends; {teller} says why")
        self.code = 2 if isinstance(reason, jpipe.InputError) else 1


class Together:
    """All processes of this run, as the application sees them.

    Attributes:
        processes: those of the library; None where this one is alone.
        is_first: whether this is process 0, which writes and speaks.
        all_know: whether all processes end for a reason that all know.
    """

    def __init__(self, processes: jpipe.Processes | None) -> None:
        self.processes = processes
        self.is_first = processes is None or processes.index == 0
        self.all_know = False

    def agree(self, facts: Callable[[], dict[str, str]]) -> None:
        """Go on only if these facts are the same in all processes.

        Raises:
            jpipe.InputError: they are not; as `shared`.
        """
        if self.processes is not None:
            try:
                self.processes.agree(facts())
            except jpipe.InputError as error:
                raise self.shared(error) from None

    def alike(self, work: Callable[[], T]) -> T:
        """What `work` gives, if it succeeds in all processes.

        Raises:
            jpipe.InputError: it does not. Told by process 0 if all have the same, otherwise by those that have it.
        """
        try:
            done, problem = work(), None
        except jpipe.InputError as error:
            done, problem = None, error
        if self.processes is not None:
            try:
                self.processes.agree({"outcome": "" if problem is None else str(problem)})
            except jpipe.InputError as difference:
                self.all_know = True
                raise problem or ToldElsewhere(self.processes.index, "another process", difference) from None
        if problem is not None:
            raise self.shared(problem)
        return cast(T, done)

    def shared(self, reason: Exception) -> Exception:
        """What to raise for a reason that all processes have: only process 0 tells it."""
        self.all_know = True
        return reason if self.processes is None or self.is_first else ToldElsewhere(self.processes.index, "process 0", reason)


@contextlib.contextmanager
def joined(num_processes: int) -> Iterator[Together]:
    """Join the processes of this run for as long as it goes on; what ends this one ends all.

    Args:
        num_processes: how many there are; with one nobody is asked.

    Raises:
        jpipe.PeerLost: another one did not come, died, hung or stopped.
    """
    together = Together(distributed.join() if num_processes > 1 else None)
    try:
        yield together
    except BaseException as error:
        if together.processes is not None and not together.all_know and not isinstance(error, jpipe.PeerLost):
            together.processes.stop(_why(error, together.is_first))
        raise


def _why(error: BaseException, is_first: bool) -> str:
    """What the others are told: the words of process 0 can be read where theirs can."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if is_first:
        return "it says why"
    return str(error) if isinstance(error, (jpipe.InputError, RuntimeError)) else type(error).__name__


def facts(config: Config) -> dict[str, str]:
    """What has to be the same in all processes before anything is built."""
    device = jax.local_devices()[0]
    return {
        "config": config_file.to_yaml(config),
        "code of jpipe": f"{jpipe.__version__} {_code()}",
        "version of JAX": jax.__version__,
        "kind of devices": f"{device.platform} {device.device_kind}",
        "number of devices": str(jax.local_device_count()),
    }


@functools.cache
def _code() -> str:
    """A digest of the source of jpipe and of this application."""
    digest = hashlib.sha256()
    for package in (Path(jpipe.__file__).parent, Path(__file__).parent):
        for file in sorted(package.rglob("*.py")):
            digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]
