"""`jpipe export RUN`: write the weights of a run for inference."""

import os

import jpipe
from jpipe_train import registry
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.console import interrupt
from jpipe_train.console.options import Fields
from jpipe_train.console.terminal import printable


def export(request: Fields[ExportRequest]) -> int:
    """Write the weights of a run into one file, for inference or for another run to begin with; or as transformers loads them."""
    with interrupt.importing():
        write = registry.find("layouts", request.layout)
    if (request.to is None) == (request.out is None):
        raise jpipe.InputError("export: expected the file or folder to write, once, such as --out gpt.safetensors")
    if request.overrides and not os.path.isfile(request.source):
        raise jpipe.InputError(f"--set {request.overrides[0]} has no effect for a run; leave it out")
    write(request, lambda line: print(printable(line)))
    return 0
