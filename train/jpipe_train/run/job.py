"""One process of a job, from its command line to its exit code."""

import json
import signal
import sys
import traceback
from collections.abc import Callable

from jpipe import InputError, PeerLost, keep_freed_memory
from jpipe_train.checkpoint import run_folder
from jpipe_train.config import config_file
from jpipe_train.console import interrupt
from jpipe_train.console.exit_codes import failed
from jpipe_train.console.options import Process
from jpipe_train.console.terminal import fail, printable
from jpipe_train.doctor import doctor as examination
from jpipe_train.doctor.doctor_request import Request as Examination
from jpipe_train.launch import distributed, team
from jpipe_train.report.loggers import sender
from jpipe_train.report.metrics_log import RunStopped
from jpipe_train.run import loop
from jpipe_train.run.evaluate import main
from jpipe_train.run.requests import EvaluateRequest, TrainRequest


def train(request: TrainRequest, process: Process) -> int:
    """Train with a config file, print one line if training fails, and return the exit code."""
    overrides = request.overrides if request.plan is None else (*request.overrides, f"plan.file={json.dumps(request.plan)}")

    def work(connect: Callable[[], int]) -> int:
        config = run_folder.of_same_job(config_file.load(request.config, overrides, allow_code=request.allow_code))
        limits = process.connect_limit, process.wait_limit
        summary = loop.main(config, connect(), *limits, request.resume, request.from_checkpoint, request.elastic)
        return 128 + signal.SIGINT if summary.stopped_by == signal.SIGINT else 0  # after Ctrl-C it is not 0, even if everything was saved

    return run_process(work, process)


def evaluate(request: EvaluateRequest, process: Process) -> int:
    """Evaluate a run, print one line if the evaluation fails, and return the exit code."""

    def work(connect: Callable[[], int]) -> int:
        try:
            main(request, connect(), process.connect_limit, process.wait_limit)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or interrupt.pressed():
                raise KeyboardInterrupt("interrupted") from None
            raise
        return 0

    return run_process(work, process)


def plan(find: Callable[[Callable[[], int]], None], process: Process, *, alone: bool) -> int:
    """Find a plan with `find`, print one line if it fails, and return the exit code.

    `find` gets a function that connects the processes and returns how many there are. Only one process may plan `alone`, for other
    machines.
    """

    def work(connect: Callable[[], int]) -> int:
        given = {"--coordinator": process.coordinator, "--num-processes": process.num_processes, "--process-id": process.process_id}
        if alone and (name := next((name for name, value in given.items() if value is not None), None)):
            raise InputError(f"{name}: several processes plan only with --topology local; remove {name}, and start one process")
        find(connect)
        return 0

    return run_process(work, process)


def doctor(request: Examination, process: Process) -> int:
    """Check the hosts of a job, print what to change, and return the exit code."""

    def work(connect: Callable[[], int]) -> int:
        return examination.main(request, distributed.membership(process), connect, process.connect_limit, process.wait_limit)

    return run_process(work, process)


def run_process(work: Callable[[Callable[[], int]], int], process: Process) -> int:
    """Run `work`, print one line if it fails, and return its exit code.

    `work` gets a function that connects the processes and returns how many there are. In a job of one process, an exception that is not
    jpipe's own propagates to `jpipe_train.cli`.
    """
    keep_freed_memory()
    code, done = 0, 0

    try:
        done = work(lambda: distributed.start(process))
    except InputError as error:
        code = failed(error)
    except team.ReportedElsewhere as error:
        code = fail(str(error), error.code)
    except (RunStopped, PeerLost, FloatingPointError) as error:  # JAX raises FloatingPointError if jax_debug_nans is set
        code = fail(printable(str(error)), 1)
    except BaseException as error:
        if distributed.is_alone():
            raise
        code = _report(error)
    finally:
        code = _leave(code)
    if sender.some_are_late():  # without this, the exit handlers of a logging service's library could keep the process from ending
        distributed.leave_at_once(code or done)
    return code or done


def _report(error: BaseException) -> int:
    line = interrupt.words(error)
    if line is None:
        traceback.print_exception(error)
        return 1
    print(line)
    return 130


def _leave(code: int) -> int:
    """Disconnect from the other processes after the outcome is printed, and return the exit code."""
    if code:
        sys.stdout.flush()
        distributed.leave_in_time(code)
    try:
        distributed.stop()
    except PeerLost as error:
        code = code or fail(printable(str(error)), 1)
    if code and not distributed.is_alone():
        distributed.leave_at_once(code)
    return code
