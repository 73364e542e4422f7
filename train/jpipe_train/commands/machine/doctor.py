"""`jpipe doctor`: say what a job would find."""

from typing import Annotated

import tyro

from jpipe_train.console import interrupt
from jpipe_train.console.options import ALONE, Fields, Flag, Overrides, Process


def doctor(
    config: Annotated[str | None, tyro.conf.arg(metavar="CONFIG")] = None,
    overrides: Overrides = (),
    json: Flag = False,
    process: Fields[Process] = ALONE,
) -> int:
    """Say what a job would find on its hosts, and what to change: versions, devices, memory, disks, links and variables.

    Nothing is trained. Start it as the job would be started: by srun, by jpipe launch, or with the options below on each host. The exit
    code is 0 without problems, and 1 with some.

    Args:
        config: The YAML file of a run: its folder and cache are tried; by default as of a run without run.dir.
        overrides: Replace one key of the config, such as run.dir=/shared/runs/1.
        json: Print findings and facts as JSON, for programs.
        process: Several processes.
    """
    with interrupt.importing():
        from jpipe_train.doctor.doctor import Request
        from jpipe_train.run import job

    return job.doctor(Request(config, overrides, json), process)
