"""One process of a training job, from its command line to its exit code."""

import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jpipe import InputError, PeerLost, keep_freed_memory
from jpipe_train.checkpoint import run_folder
from jpipe_train.checkpoint.resume import Resume
from jpipe_train.config import config_file
from jpipe_train.console import interrupt
from jpipe_train.console.exit_codes import failed
from jpipe_train.console.terminal import fail, printable
from jpipe_train.launch import distributed, together
from jpipe_train.report.metrics_log import RunStopped
from jpipe_train.report.summary import Summary
from jpipe_train.run import loop
from jpipe_train.run.evaluate import Request, main


class Address(NamedTuple):
    """Where a process stands among those of its job; what is None is detected, or there is one process.

    Attributes:
        coordinator: HOST:PORT of process 0.
        num_processes: how many there are.
        process_id: which this one is.
        secret_file: what they recognize each other by.
    """

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    secret_file: str | None


def train(
    config: str,
    overrides: Sequence[str],
    allow_code: bool,
    resume: Resume,
    address: Address,
    connect_limit: float,
    wait_limit: float,
    from_checkpoint: int | None = None,
) -> int:
    """Train as the file `config` says; returns the exit code. Whatever ends the run is printed in a line."""

    def work(connect: Callable[[], int]) -> int:
        settings = run_folder.of_same_job(config_file.load(config, overrides, allow_code=allow_code))
        return _code_of(loop.main(settings, connect(), connect_limit, wait_limit, resume, from_checkpoint))

    return _run(work, address, connect_limit, wait_limit)


def evaluate(request: Request, address: Address, connect_limit: float, wait_limit: float) -> int:
    """Evaluate a run; returns the exit code, as `train` does."""

    def work(connect: Callable[[], int]) -> int:
        try:
            main(request, connect(), connect_limit, wait_limit)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or interrupt.pressed():
                raise KeyboardInterrupt("interrupted") from None
            raise
        return 0

    return _run(work, address, connect_limit, wait_limit)


def _run(work: Callable[[Callable[[], int]], int], address: Address, connect_limit: float, wait_limit: float) -> int:
    """Run `work`, which connects the processes of the job and gets their number by calling its argument; returns the exit code.

    An exception that is no message of jpipe's leaves a job of one process, for `jpipe_train.cli` to report.
    """
    keep_freed_memory()
    code, count, done = 0, 1, 0

    def connect() -> int:
        nonlocal count
        distributed.check_limit("--wait-limit", wait_limit)
        count = distributed.start(address.coordinator, address.num_processes, address.process_id, connect_limit, address.secret_file)
        return count

    try:
        done = work(connect)
    except InputError as error:
        code = failed(error)
    except together.ReportedElsewhere as error:
        code = fail(str(error), error.code)
    except (RunStopped, PeerLost, FloatingPointError) as error:  # the last one with jax_debug_nans
        code = fail(printable(str(error)), 1)
    except BaseException as error:
        if count == 1:
            raise
        code = _report(error)
    finally:
        code = _leave(code, count)
    return code or done


def _report(error: BaseException) -> int:
    words = interrupt.words(error)
    if words is None:
        traceback.print_exception(error)
        return 1
    print(words)
    return 130


def _leave(code: int, count: int) -> int:
    """Leave the other processes, now that how this one ended is printed; returns the exit code."""
    if code:
        sys.stdout.flush()
        together.leave_in_time(code)
    try:
        distributed.stop()
    except PeerLost as error:
        code = code or fail(printable(str(error)), 1)
    if count > 1 and code:
        distributed.leave_at_once(code)
    return code


def _code_of(summary: Summary) -> int:
    """Ctrl-C is no success, even where it saved all."""
    return 128 + signal.SIGINT if summary.stopped_by == signal.SIGINT else 0
