"""`jpipe train CONFIG`: train a model through a pipeline."""

from jpipe_train.console import interrupt
from jpipe_train.console.options import ALONE, Fields, Process
from jpipe_train.run.requests import TrainRequest


def train(request: Fields[TrainRequest], process: Fields[Process] = ALONE) -> int:
    """Train the model that a YAML config describes, through a pipeline. With several processes, start each with this command."""
    with interrupt.importing():
        from jpipe_train.run import job

    return job.train(request, process)
