"""`jpipe plan CONFIG`: find the fastest plan that fits into memory."""

from functools import partial

from jpipe_train.console import interrupt
from jpipe_train.console.options import ALONE, Fields, Process
from jpipe_train.plan.request import LOCAL, Options


def plan(options: Fields[Options], process: Fields[Process] = ALONE) -> int:
    """Find the plan that trains a model fastest on these machines and fits into their memory. No run is started."""
    with interrupt.importing():
        from jpipe_train.plan.inputs import Request
        from jpipe_train.plan.plan import main
        from jpipe_train.run import job

    find = partial(main, Request(**vars(options)), process.connect_limit, process.wait_limit)
    return job.plan(find, process, alone=options.topology != LOCAL)
