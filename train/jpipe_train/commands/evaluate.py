"""`jpipe evaluate RUN`: compute the loss and metrics of a run over a whole data set."""

from jpipe_train.console import interrupt
from jpipe_train.console.options import ALONE, Fields, Process
from jpipe_train.run.requests import EvaluateRequest


def evaluate(request: Fields[EvaluateRequest], process: Fields[Process] = ALONE) -> int:
    """Compute the loss, perplexity and metrics of a run over a whole data set, with the run's pipeline. The run is not changed."""
    with interrupt.importing():
        from jpipe_train.run import job

    return job.evaluate(request, process)
