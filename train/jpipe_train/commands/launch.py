"""`jpipe launch -n N -- COMMAND`: start several processes on this machine."""

from typing import Annotated

import tyro

from jpipe_train.commands.parsing import Count, Flag
from jpipe_train.console.terminal import fail, printable

LAUNCHED = "-- train CONFIG [--KEY …] | -- plan CONFIG … | -- evaluate RUN … | -- generate RUN … | -- doctor"
"""Long enough for the usage line to abbreviate the options of launch and show them first, in the order in which they are typed."""


def launch(
    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar=LAUNCHED, help_behavior_hint="(required)")],
    num_processes: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")],
    pin: Flag = False,
    max_restarts: Count = 0,
) -> int:
    """Start several processes on this machine, such as `jpipe launch -n 4 -- train configs/gpt-bytes.yaml`.

    When one process fails, or on Ctrl-C, all of them end.

    Args:
        command: The command of every process; the coordinator, the count and the number of the process are added to it.
        num_processes: How many processes.
        pin: Give each process a CPU core of its own, if there are enough. For measurements.
        max_restarts: How often to restart all when one fails; they resume from the newest checkpoint of their run folder.
    """
    from jpipe_train.launch import launch as launcher

    if message := launcher.problem(num_processes, command, pin=pin, max_restarts=max_restarts):
        return fail(printable(message), 2)
    return launcher.main(num_processes, command, pin=pin, max_restarts=max_restarts)
