"""`jpipe launch -n N -- COMMAND`: start several processes on this machine."""

from typing import Annotated

import tyro

from jpipe_train.console.options import Flag, OptionalCount
from jpipe_train.console.terminal import fail, printable

LAUNCHED = "-- train CONFIG [--KEY …] | -- plan CONFIG … | -- evaluate RUN … | -- generate RUN … | -- doctor"
"""The placeholder of the command. It is so long that the usage line abbreviates the options of launch and shows them before it."""


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
