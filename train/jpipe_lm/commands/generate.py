"""`jpipe generate RUN`: continue texts with a trained model."""

from jpipe_lm.generate.request import Request
from jpipe_train.console import interrupt
from jpipe_train.console.options import ALONE, Fields, Process


def generate(request: Fields[Request], process: Fields[Process] = ALONE) -> int:
    """Continue texts with a trained model, or chat with it. The model's text is printed on standard output."""
    with interrupt.importing():
        from jpipe_lm.generate import command
        from jpipe_train.run import job

    return job.run_process(lambda connect: command.run(request, connect, process.connect_limit, process.wait_limit), process)
