"""`jpipe runs`: list the runs in a folder."""

from typing import Annotated

import tyro

from jpipe_train.console import interrupt
from jpipe_train.console.options import Flag


def runs(
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]", help_behavior_hint="")] = "runs",
    as_json: Annotated[Flag, tyro.conf.arg(name="json")] = False,
) -> int:
    """List the runs in a folder with their state, step, losses, plan and time, and how long ago each logged a step.

    A run is *running* while a process holds the lock of its folder. It is *complete* after its last step, and *stopped early* if early
    stopping ended it. It is *stopped* if it saved at a signal, such as Ctrl-C, and *unfinished* if it failed or was killed.

    Args:
        folder: A folder that contains run folders, or the folder of one run.
        as_json: Print one JSON object per run, with more fields than the table.
    """
    with interrupt.importing():
        from jpipe_train.runs import listing

    listing.main(folder, as_json, print)
    return 0
