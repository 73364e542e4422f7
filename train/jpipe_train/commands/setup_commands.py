"""Commands around a run: `launch`, `doctor`, `configs` and `completion`."""

import contextlib
from typing import Annotated, Literal

import tyro

import jpipe
from jpipe_train.console import interrupt
from jpipe_train.console.options import ALONE, Fields, Flag, OptionalCount, Process
from jpipe_train.console.terminal import fail, printable
from jpipe_train.doctor.doctor_request import Request

LAUNCHED = "-- train CONFIG [--KEY …] | -- plan CONFIG … | -- evaluate RUN … | -- generate RUN … | -- doctor"


def launch(
    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar=LAUNCHED, help_behavior_hint="(required)")],
    num_processes: Annotated[int | None, tyro.conf.arg(aliases=["-n"], metavar="N")] = None,
    pin: Flag = False,
    max_restarts: OptionalCount = None,
    elastic: Annotated[str | None, tyro.conf.arg(metavar="MIN:MAX")] = None,
    max_failures: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: 3)")] = None,
    retry_after: Annotated[float | None, tyro.conf.arg(metavar="SECONDS", help_behavior_hint="(default: 300)")] = None,
    shortage_limit: Annotated[float | None, tyro.conf.arg(metavar="SECONDS", help_behavior_hint="(default: 900)")] = None,
) -> int:
    """Start several processes on this machine, such as `jpipe launch -n 4 -- train configs/gpt-bytes.yaml`.

    If one process fails, or on Ctrl-C, all of them end.

    Args:
        command: The command of every process. launch appends the coordinator, the number of processes and the number of the process.
        num_processes: How many processes to start.
        pin: Give each process a CPU core of its own, if there are enough cores. For measurements.
        max_restarts: How often to restart all processes after one fails. They resume from the newest checkpoint of their run folder.
        elastic: In place of -n: train with MAX processes. If some are lost, the remaining processes go on, as long as there are MIN.
        max_failures: With --elastic: a process that fails so many times in a row, without a new checkpoint, is left out.
        retry_after: With --elastic: a process that was left out is tried again at a checkpoint after this time. The time doubles with each
            further failure.
        shortage_limit: With --elastic: how long to wait while fewer than MIN processes can be started.
    """
    from jpipe_train.launch.local import elastic as elastic_launcher
    from jpipe_train.launch.local import launch as launcher

    if message := launcher.problem(num_processes, command, pin=pin, max_restarts=max_restarts, elastic=elastic):
        return fail(printable(message), 2)
    options = {"max_failures": max_failures, "retry_after": retry_after, "shortage_limit": shortage_limit}
    given = {name: value for name, value in options.items() if value is not None}
    if elastic is None:
        assert num_processes is not None
        if given:
            return fail(f"launch --{next(iter(given)).replace('_', '-')} has no effect without --elastic MIN:MAX; remove the option", 2)
        return launcher.main(num_processes, command, pin=pin, max_restarts=max_restarts or 0)
    limits = elastic_launcher.limits(elastic, given)
    if isinstance(limits, str):
        return fail(printable(limits), 2)
    return elastic_launcher.main(limits, command, pin=pin)


def doctor(request: Fields[Request], process: Fields[Process] = ALONE) -> int:
    """Say what a job would find on its hosts, and what to change: versions, devices, memory, disks, links and variables.

    Nothing is trained. Start it as the job would be started: by srun, by jpipe launch, or with the options below on each host. The exit
    code is 0 without problems, and 1 with some.
    """
    with interrupt.importing():
        from jpipe_train.run import job

    return job.doctor(request, process)


def configs(
    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[copy [NAME …]]", help_behavior_hint="")] = (),
    to: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ".",
    overwrite: Flag = False,
) -> int:
    """List the configs and examples that come with jpipe, or copy them to the current folder.

    Args:
        words: Nothing: list them. copy: copy all of them. copy NAME: copy one config, such as gpt-bytes, and the Python files it names.
        to: The folder in which the folders configs and examples are created.
        overwrite: Replace existing files that differ.
    """
    from jpipe.files import expanded
    from jpipe_train.config import shipped_configs

    if not words and (to != "." or overwrite):
        raise jpipe.InputError("configs: --to and --overwrite have no effect without copy; did you mean jpipe configs copy?")
    if not words:
        shipped_configs.list_all(print)
    elif words[0] == "copy":
        shipped_configs.copy(words[1:], expanded(to, "configs copy --to"), overwrite, lambda line: print(printable(line)))
    else:
        raise jpipe.InputError(
            f"configs: expected no word or the word copy, found '{words[0]}'; did you mean jpipe configs copy {words[0]}?"
        )
    return 0


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")]) -> int:
    """Print a script that lets a shell complete jpipe's commands and options; docs/how-to/install.md says where to put the script.

    Args:
        shell: bash, zsh or fish.
    """
    from jpipe_train import commands

    with contextlib.suppress(SystemExit):  # raised by tyro after printing
        commands.application(None).cli(prog="jpipe", args=["--tyro-print-completion", shell])
    if shell == "bash":
        print("complete -o default -F _tyro_jpipe jpipe  # file names, too")
    return 0
