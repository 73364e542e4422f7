"""`jpipe doctor`: say what a job would find."""

from jpipe_train.console import interrupt
from jpipe_train.console.options import ALONE, Fields, Process
from jpipe_train.doctor.request import Request


def doctor(request: Fields[Request], process: Fields[Process] = ALONE) -> int:
    """Say what a job would find on its hosts, and what to change: versions, devices, memory, disks, links and variables.

    Nothing is trained. Start it as the job would be started: by srun, by jpipe launch, or with the options below on each host. The exit
    code is 0 without problems, and 1 with some.
    """
    with interrupt.importing():
        from jpipe_train.run import job

    return job.doctor(request, process)
