"""`jpipe train CONFIG`: train a model through a pipeline."""

import json
from typing import Annotated, Literal

import tyro

from jpipe_train.commands.parsing import Coordinator, Flag, OptionalCount, OptionalFile, Overrides, ProcessId, Seconds
from jpipe_train.console import interrupt


def train(
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")],
    overrides: Overrides = (),
    plan: Annotated[str | None, tyro.conf.arg(metavar="FILE|auto")] = None,
    resume: Literal["auto", "must", "never"] = "auto",
    from_checkpoint: OptionalCount = None,
    allow_code: Flag = False,
    coordinator: Coordinator = None,
    num_processes: OptionalCount = None,
    process_id: ProcessId = None,
    connect_limit: Seconds = 300.0,
    wait_limit: Seconds = 45.0,
    secret_file: OptionalFile = None,
) -> int:
    """Train a model through a pipeline, as a YAML file says; in several processes, each is started with this command.

    Args:
        config: The YAML file, such as configs/gpt-bytes.yaml.
        overrides: Replace one key of the file, such as train.steps=100.
        plan: Train by this plan, as with plan.file; auto: find the best one for the devices that there are first.
        resume: Go on from the newest checkpoint in run.dir: where there is one (auto), in any case (must), or not at all (never).
        from_checkpoint: Go on from the checkpoint after so many steps in place of the newest; later ones are kept under other names.
        allow_code: Import and run the functions that the file names as module:function, from the current folder or installed packages.
        coordinator: Several processes: where process 0 is, the same for all. Under SLURM or Open MPI this and the next two are detected.
        num_processes: Several processes: how many.
        process_id: Several processes: the number of this one, from 0.
        connect_limit: Several processes: how long each waits for the others at the start.
        wait_limit: Several processes: how long none of them may get on before the run is given up; more than a microbatch takes.
        secret_file: Several processes: what they recognize each other by, the same for all; by default the variable JPIPE_SECRET.
    """
    with interrupt.importing():
        from jpipe_train.run import job

    overrides = overrides if plan is None else (*overrides, f"plan.file={json.dumps(plan)}")
    address = job.Address(coordinator, num_processes, process_id, secret_file)
    return job.train(config, overrides, allow_code, resume, address, connect_limit, wait_limit, from_checkpoint)
