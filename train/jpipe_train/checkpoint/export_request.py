"""The request of `jpipe export`, made from the command line."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from jpipe_train import registry
from jpipe_train.console.options import Flag, OptionalStep, Overrides, Weights


@dataclass(frozen=True)
class ExportRequest:
    """The arguments of `jpipe export`, which the function of a layout receives.

    Attributes:
        source: The folder of the run, such as runs/0001. With --layout huggingface also a config, for its weights before training.
        to: The new file to write, with parameters and layer state by layer id and path. With --layout it is a new folder.
        out: The file or folder to write, as an option.
        step: The checkpoint after N steps, or the best; by default the newest complete one.
        weights: The newest parameters, or their moving average (ema).
        layout: orbax: a tree with the same names, which ocp.StandardCheckpointer restores. model: such a tree with the model's own paths,
            if model.target is a whole model. huggingface: a folder with config.json and model.safetensors, for decoders and BERT, with
            adapters merged into the weights. peft: a folder with only the adapters.
        overrides: Replace one key of a config, such as model.preset=gpt2-124m.
        push: Then upload it under this name, such as hf:me/my-model; you are asked first.
        yes: With --push, do not ask.
        public: With --push, let everyone read a new model. By default it is private.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CONFIG")]
    to: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[FILE.safetensors|FOLDER]")] = None
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE.safetensors|FOLDER")] = None
    step: OptionalStep = None
    weights: Weights = "newest"
    layout: Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(registry.names('layouts'))}}}")] = "jpipe"
    overrides: Overrides = ()
    push: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    yes: Flag = False
    public: Flag = False

    @property
    def path(self) -> str:
        """The file or folder to write."""
        return self.to or self.out or ""
