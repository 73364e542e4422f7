"""`jpipe sweep CONFIG --grid KEY=VALUES`: train with every combination of some values."""

from typing import Annotated

import tyro

from jpipe_train.console import interrupt
from jpipe_train.console.options import Fields, Flag
from jpipe_train.runs.request import Request


def sweep(request: Fields[Request], task: Annotated[int | None, tyro.conf.arg(metavar="I")] = None, slurm: Flag = False) -> int:
    """Train a run for every combination of some values, one after the other, and compare them.

    Runs that are complete are skipped, and others are resumed, so the same command continues a sweep, and another grid adds runs to it.

    Args:
        request: What is trained.
        task: Train only combination number I, from 0, and compare nothing, as a job of an array does.
        slurm: Print the script of a SLURM job array with a task for each run, and train nothing.
    """
    with interrupt.importing():
        from jpipe_train.runs import sweeping

    if slurm:
        print(sweeping.slurm_script(request, task), end="")
        return 0
    return sweeping.main(request, task)
