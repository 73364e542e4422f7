"""The arguments of `jpipe train` and `jpipe evaluate` as dataclasses; tyro makes the command-line options from them."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from jpipe_train.console.options import Flag, OptionalCount, OptionalStep, Overrides, Weights


@dataclass(frozen=True)
class TrainRequest:
    """The arguments of `jpipe train`.

    Attributes:
        config: The YAML file, such as configs/gpt-bytes.yaml.
        overrides: Replace one key of the file, such as train.steps=100.
        plan: Train with the plan in this file, like plan.file in the config. auto: first search for the fastest plan for these devices.
        resume: Whether to resume from the newest checkpoint in run.dir. auto: if there is one; must: fail if there is none; never: start a
            new run.
        from_checkpoint: Resume from the checkpoint after N steps, or from the best. Later checkpoints are renamed and kept.
        allow_code: Import and run the functions that the file names as module:function, from the current folder or installed packages.
        elastic: The number of processes that the plan of the config needs. With fewer, a smaller plan replaces it.
    """

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    overrides: Overrides = ()
    plan: Annotated[str | None, tyro.conf.arg(metavar="FILE|auto")] = None
    resume: Literal["auto", "must", "never"] = "auto"
    from_checkpoint: OptionalStep = None
    allow_code: Flag = False
    elastic: OptionalCount = None


@dataclass(frozen=True)
class EvaluateRequest:
    """The arguments of `jpipe evaluate`.

    Attributes:
        run: The folder of the run, such as runs/0001.
        data: Data in the form of the run's; by default all validation data of the run.
        step: The checkpoint after N steps, or the best; by default the newest complete one.
        weights: The newest parameters, or their moving average (ema).
        batches: Evaluate only N batches.
        overrides: Replace one key of the run's config, such as plan.num_stages=1.
        allow_code: Import and run the functions that the config names.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    step: OptionalStep = None
    weights: Weights = "newest"
    batches: OptionalCount = None
    overrides: Overrides = ()
    allow_code: Flag = False
