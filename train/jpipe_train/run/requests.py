"""The requests of `jpipe train` and `jpipe evaluate`, which the command line is read from."""

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
        plan: Train by this plan, as with plan.file; auto: first find the best one for the existing devices.
        resume: Resume from the newest checkpoint in run.dir: if there is one (auto), always (must), or not at all (never).
        from_checkpoint: Resume from the checkpoint after N steps, or the best one, instead of the newest; later ones are kept under other
            names.
        allow_code: Import and run the functions that the file names as module:function, from the current folder or installed packages.
        elastic: Several processes: how many the plan of the config is for; with fewer, a smaller plan takes its place.
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
        data: Data in the form of the run's own; by default all of the run's validation data.
        step: The checkpoint after N steps, or the best one of a run with checkpoint.best; by default the newest complete one.
        weights: The newest parameters, or their moving average (ema), of a run with optimizer.ema_decay.
        batches: Only N batches; the run's own validations have train.eval_batches of them.
        overrides: Replace one key of the run's config, such as plan.num_stages=1.
        allow_code: Import and run the functions that the config names, as in train.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    step: OptionalStep = None
    weights: Weights = "newest"
    batches: OptionalCount = None
    overrides: Overrides = ()
    allow_code: Flag = False
