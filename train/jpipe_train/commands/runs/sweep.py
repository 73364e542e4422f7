"""`jpipe sweep CONFIG --grid KEY=VALUES`: train with every combination of some config values."""

from typing import Annotated

import tyro

from jpipe_train.console import interrupt
from jpipe_train.console.options import Fields, Flag
from jpipe_train.runs.request import Request


def sweep(request: Fields[Request], task: Annotated[int | None, tyro.conf.arg(metavar="I")] = None, slurm: Flag = False) -> int:
    """Train one run for every combination of some config values, one after the other, and compare the runs.

    Complete runs are skipped, and unfinished runs are resumed. So the same command continues a sweep, and another grid adds runs to it.

    Args:
        request: What is trained.
        task: Train only combination I, counted from 0, and compare nothing. A task of a SLURM job array trains one combination in this way.
        slurm: Print the script of a SLURM job array with one task for each run, and train nothing.
    """
    with interrupt.importing():
        from jpipe_train.runs import sweeping

    if slurm:
        print(sweeping.slurm_script(request, task), end="")
        return 0
    return sweeping.main(request, task)
