"""Commands that train a model and use what was trained: `train`, `evaluate` and `export`."""

import os

import jpipe
from jpipe.files import expanded
from jpipe_train import registry
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.console import interrupt
from jpipe_train.console.options import ALONE, Fields, Process
from jpipe_train.console.terminal import printable
from jpipe_train.run.requests import EvaluateRequest, TrainRequest


def train(request: Fields[TrainRequest], process: Fields[Process] = ALONE) -> int:
    """Train the model that a YAML config describes, through a pipeline. With several processes, start each with this command."""
    with interrupt.importing():
        from jpipe_train.run import job

    return job.train(request, process)


def evaluate(request: Fields[EvaluateRequest], process: Fields[Process] = ALONE) -> int:
    """Compute the loss, perplexity and metrics of a run over a whole data set, with the run's pipeline. The run is not changed."""
    with interrupt.importing():
        from jpipe_train.run import job

    return job.evaluate(request, process)


def export(request: Fields[ExportRequest]) -> int:
    """Write the weights of a run into one file, for inference or for another run to begin with, or in the format of transformers."""
    with interrupt.importing():
        write = registry.find("layouts", request.layout)
    if (request.to is None) == (request.out is None):
        raise jpipe.InputError("export: expected one file or folder to write, such as --out gpt.safetensors")
    if request.overrides and not os.path.isfile(request.source):
        raise jpipe.InputError(f"--set {request.overrides[0]} has no effect for a run; leave it out")
    if request.push is None and (request.yes or request.public):
        raise jpipe.InputError("export: --yes and --public have no effect without --push; add --push NAME, or leave them out")
    scheme = None if request.push is None else registry.scheme_of(request.push)
    if request.push is not None and scheme is None:
        known = " or ".join(f"{name}:…" for name in registry.names("schemes"))
        raise jpipe.InputError(where="--push", expected=f"a name {known}", found=f"'{request.push}'", change="correct it")
    if scheme is not None:
        scheme.check(request.push, is_confirmed=request.yes)
    write(request, _print)
    if scheme is not None:
        scheme.push(request.push, expanded(request.path, "--out"), _print, is_confirmed=request.yes, is_public=request.public)
    return 0


def _print(line: str) -> None:
    print(printable(line))
