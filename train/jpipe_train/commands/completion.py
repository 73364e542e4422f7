"""`jpipe completion SHELL`: print a completion script."""

import contextlib
from typing import Annotated, Literal

import tyro


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")]) -> int:
    """Print a script with which a shell completes these commands and their options; docs/how-to/install.md says where to put it.

    Args:
        shell: bash, zsh or fish.
    """
    from jpipe_train import commands

    with contextlib.suppress(SystemExit):  # raised by tyro after printing
        commands.application(None).cli(prog="jpipe", args=["--tyro-print-completion", shell])
    if shell == "bash":
        print("complete -o default -F _tyro_jpipe jpipe  # names of files, too")
    return 0
