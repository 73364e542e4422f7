"""Commands around a run: `launch`, `doctor`, `configs` and `completion`."""

import contextlib
from typing import Annotated, Literal

import tyro

import jpipe
from jpipe_train.console import interrupt
from jpipe_train.console.options import ALONE, Fields, Flag, Process
from jpipe_train.console.terminal import printable
from jpipe_train.doctor.doctor_request import Request
from jpipe_train.launch.local.launch_request import Request as LaunchRequest


def launch(request: Fields[LaunchRequest]) -> int:
    """Start several processes on this machine, such as `jpipe launch -n 4 -- train configs/gpt-bytes.yaml`.

    If one process fails, or on Ctrl-C, all of them end.
    """
    from jpipe_train.launch.local import elastic, launch

    request.check()
    return (launch if request.elastic is None else elastic).main(request)


def doctor(request: Fields[Request], process: Fields[Process] = ALONE) -> int:
    """Check what a job would find on its hosts, and say what to change: versions, devices, memory, disks, links and variables.

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
