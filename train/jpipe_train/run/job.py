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
from jpipe_train.doctor.request import Request as Examination
from jpipe_train.launch import distributed, team
from jpipe_train.report.loggers import sender
from jpipe_train.report.metrics_log import RunStopped
from jpipe_train.report.summary import Summary
from jpipe_train.run import loop
from jpipe_train.run.evaluate import main
from jpipe_train.run.requests import EvaluateRequest, TrainRequest


def train(request: TrainRequest, process: Process) -> int:
    """Train as a config file says, print a line if that fails, and return the exit code."""
    overrides = request.overrides if request.plan is None else (*request.overrides, f"plan.file={json.dumps(request.plan)}")

    def work(connect: Callable[[], int]) -> int:
        config = run_folder.of_same_job(config_file.load(request.config, overrides, allow_code=request.allow_code))
        limits = process.connect_limit, process.wait_limit
        return _code_of(loop.main(config, connect(), *limits, request.resume, request.from_checkpoint, request.elastic))

    return run_process(work, process)


def evaluate(request: EvaluateRequest, process: Process) -> int:
    """Evaluate a run, print a line if that fails, and return the exit code."""

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
    """Find a plan by `find`, print a line if that fails, and return the exit code.

    Args:
        find: the work; it gets what connects the processes.
        process: the place of this process.
        alone: whether a single process plans, for machines that are not here.
    """

    def work(connect: Callable[[], int]) -> int:
        given = {"--coordinator": process.coordinator, "--num-processes": process.num_processes, "--process-id": process.process_id}
        if alone and (name := next((name for name, value in given.items() if value is not None), None)):
            raise InputError(f"{name}: only with --topology local several processes plan; leave it out, and start one process")
        find(connect)
        return 0

    return run_process(work, process)


def doctor(request: Examination, process: Process) -> int:
    """Check the hosts of a job, print what to change, and return the exit code."""

    def work(connect: Callable[[], int]) -> int:
        member = distributed.membership(process.coordinator, process.num_processes, process.process_id, process.connect_limit)
        return examination.main(request, member, connect, process.connect_limit, process.wait_limit)

    return run_process(work, process)


def run_process(work: Callable[[Callable[[], int]], int], process: Process) -> int:
    """Run `work`, print a line if it fails, and return the exit code.

    In a job of one process, an exception that is not jpipe's own propagates to `jpipe_train.cli`.

    Args:
        work: the job; it calls its argument to connect the processes, which returns their number.
        process: the place of this process.
    """
    keep_freed_memory()
    code, done = 0, 0

    def connect() -> int:
        distributed.check_limit("--wait-limit", process.wait_limit)
        place = process.coordinator, process.num_processes, process.process_id
        return distributed.start(*place, process.connect_limit, process.secret_file, process.wait_limit)

    try:
        done = work(connect)
    except InputError as error:
        code = failed(error)
    except team.ReportedElsewhere as error:
        code = fail(str(error), error.code)
    except (RunStopped, PeerLost, FloatingPointError) as error:  # the last one with jax_debug_nans
        code = fail(printable(str(error)), 1)
    except BaseException as error:
        if distributed.is_alone():
            raise
        code = _report(error)
    finally:
        code = _leave(code)
    if sender.some_are_late():  # else what a service's library does when Python ends could hold the process
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
    """Disconnect from the other processes, after the outcome is printed, and return the exit code."""
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


def _code_of(summary: Summary) -> int:
    """Return the exit code of a completed run; Ctrl-C is not a success, even if everything was saved."""
    return 128 + signal.SIGINT if summary.stopped_by == signal.SIGINT else 0
