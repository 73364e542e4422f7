"""`jpipe completion SHELL`: print a completion script."""

import contextlib
from typing import Annotated, Literal

import tyro


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
