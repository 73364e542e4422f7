"""`jpipe runs`: list the runs in a folder."""

from typing import Annotated

import tyro

from jpipe_train.console import interrupt
from jpipe_train.console.options import Flag


def runs(
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]", help_behavior_hint="")] = "runs",
    as_json: Annotated[Flag, tyro.conf.arg(name="json")] = False,
) -> int:
    """List the runs in a folder with their state, step, losses, plan, time, and how long ago they logged a step.

    A run is running while a process holds the lock of its folder; complete, or stopped early, when it has come to its end; stopped if it
    saved at a signal, such as Ctrl-C; and unfinished if it failed or was killed after its last checkpoint.

    Args:
        folder: The folder that holds the folders of the runs, or the folder of one run.
        as_json: Write a JSON object for each folder, with more than the table has.
    """
    with interrupt.importing():
        from jpipe_train.runs import listing

    listing.main(folder, as_json, print)
    return 0
