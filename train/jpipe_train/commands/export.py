"""`jpipe export RUN`: write the weights of a run for inference."""

import os
from typing import Annotated

import tyro

import jpipe
from jpipe_train import registry
from jpipe_train.console import interrupt
from jpipe_train.console.options import OptionalStep, Overrides, Weights
from jpipe_train.console.terminal import printable


def export(
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CONFIG")],
    to: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[FILE.safetensors|FOLDER]")] = None,
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE.safetensors|FOLDER")] = None,
    step: OptionalStep = None,
    weights: Weights = "newest",
    layout: Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(registry.names('layouts'))}}}")] = "jpipe",
    overrides: Overrides = (),
) -> int:
    """Write the weights of a run into one file, for inference or for another run to begin with; or as transformers loads them.

    Args:
        folder: The folder of the run, such as runs/0001. With --layout huggingface also a config, for the weights that its run begins with.
        to: What to write, a new file. It holds the parameters and the layer state, by layer id and path. With --layout a new folder.
        out: The same as an option.
        step: The checkpoint after this number of steps, or the best one of a run with checkpoint.best; by default the newest that is
            complete.
        weights: The newest parameters, or their moving average (ema), of a run with optimizer.ema_decay.
        layout: Orbax's (orbax) is one tree that ocp.StandardCheckpointer restores, by the same names.
            The whole model's (model) is such a tree with the model's own paths, for a model.target that is a whole model.
            Hugging Face's (huggingface) is a folder with config.json and model.safetensors, for decoders and BERT;
            adapters are added to the weights. PEFT's (peft) is a folder with the adapters alone.
        overrides: Replace one key of a config, such as model.preset=gpt2-124m.
    """
    with interrupt.importing():
        from jpipe_train.checkpoint.export import Request

        write = registry.find("layouts", layout)
    if (to is None) == (out is None):
        raise jpipe.InputError("export: expected the file or folder to write, once, such as --out gpt.safetensors")
    if overrides and not os.path.isfile(folder):
        raise jpipe.InputError(f"--set {overrides[0]} has no effect for a run; leave it out")
    write(Request(folder, to or out or "", step, lambda line: print(printable(line)), weights, overrides))
    return 0
