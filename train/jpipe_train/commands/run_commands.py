"""Commands for several runs: `runs`, `compare` and `sweep`."""

from typing import Annotated

import tyro

from jpipe_train.console import interrupt
from jpipe_train.console.options import Fields, Flag
from jpipe_train.runs.sweep_request import Request


def runs(
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]", help_behavior_hint="")] = "runs",
    as_json: Annotated[Flag, tyro.conf.arg(name="json")] = False,
) -> int:
    """List the runs in a folder with their state, step, losses, plan and time, and how long ago each logged a step.

    Args:
        folder: A folder that contains run folders, or the folder of one run.
        as_json: Print one JSON object per run, with more fields than the table.
    """
    with interrupt.importing():
        from jpipe_train.runs import listing

    listing.main(folder, as_json, print)
    return 0


def compare(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN RUN …", help_behavior_hint="(required)")],
    out: Annotated[str, tyro.conf.arg(metavar="FILE.html")] = "compare.html",
) -> int:
    """Compare the configs and the losses of runs. The comparison is printed, and written as a page and a picture.

    Args:
        runs: The folders of the runs, such as runs/0001 runs/0002.
        out: The page to write. The picture has the same name with the ending svg.
    """
    with interrupt.importing():
        from jpipe_train.console.progress import Reporter
        from jpipe_train.runs import comparing

    comparing.main(runs, out, Reporter(1, 1, "steps"))
    return 0


def sweep(request: Fields[Request], task: Annotated[int | None, tyro.conf.arg(metavar="I")] = None, slurm: Flag = False) -> int:
    """Train one run for every combination of some config values, one after the other, and compare the runs.

    The same command continues a sweep, and another grid adds runs to it.

    Args:
        request: What is trained.
        task: Train only combination I, counted from 0, and compare nothing. Tasks of a SLURM job array use this.
        slurm: Print the script of a SLURM job array with one task for each run, and train nothing.
    """
    with interrupt.importing():
        from jpipe_train.runs import sweeping

    if slurm:
        print(sweeping.slurm_script(request, task), end="")
        return 0
    return sweeping.main(request, task)
