"""The request of `jpipe export`, which the command line is read from."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from jpipe_train import registry
from jpipe_train.console.options import OptionalStep, Overrides, Weights


@dataclass(frozen=True)
class ExportRequest:
    """The arguments of `jpipe export`, as the function of a layout gets them.

    Attributes:
        source: The folder of the run, such as runs/0001. With --layout huggingface also a config, for the weights that its run begins with.
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

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CONFIG")]
    to: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[FILE.safetensors|FOLDER]")] = None
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE.safetensors|FOLDER")] = None
    step: OptionalStep = None
    weights: Weights = "newest"
    layout: Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(registry.names('layouts'))}}}")] = "jpipe"
    overrides: Overrides = ()

    @property
    def path(self) -> str:
        """The file or folder to write."""
        return self.to or self.out or ""
