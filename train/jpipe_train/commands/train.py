"""`jpipe train CONFIG`: train a model through a pipeline."""

import json
from typing import Annotated, Literal

import tyro

from jpipe_train.commands.parsing import Coordinator, Flag, OptionalCount, OptionalFile, OptionalStep, Overrides, ProcessId, Seconds
from jpipe_train.console import interrupt


def train(
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")],
    overrides: Overrides = (),
    plan: Annotated[str | None, tyro.conf.arg(metavar="FILE|auto")] = None,
    resume: Literal["auto", "must", "never"] = "auto",
    from_checkpoint: OptionalStep = None,
    allow_code: Flag = False,
    coordinator: Coordinator = None,
    num_processes: OptionalCount = None,
    process_id: ProcessId = None,
    connect_limit: Seconds = 300.0,
    wait_limit: Seconds = 45.0,
    secret_file: OptionalFile = None,
    elastic: OptionalCount = None,
) -> int:
    """Train a model through a pipeline as a YAML file says; with several processes, each is started with this command.

    Args:
        config: The YAML file, such as configs/gpt-bytes.yaml.
        overrides: Replace one key of the file, such as train.steps=100.
        plan: Train by this plan, as with plan.file; auto: first find the best one for the existing devices.
        resume: Resume from the newest checkpoint in run.dir: if there is one (auto), always (must), or not at all (never).
        from_checkpoint: Resume from the checkpoint after N steps, or the best one, instead of the newest; later ones are kept under other
            names.
        allow_code: Import and run the functions that the file names as module:function, from the current folder or installed packages.
        coordinator: Several processes: the address of process 0, the same for all. SLURM and Open MPI provide this and the next two.
        num_processes: Several processes: their number.
        process_id: Several processes: the number of this one, from 0.
        connect_limit: Several processes: how long each waits for the other processes at the start.
        wait_limit: Several processes: how long none may make progress before the run fails; longer than a microbatch takes.
        secret_file: Several processes: the file with the secret that all share; by default the variable JPIPE_SECRET has it.
        elastic: Several processes: how many the plan of the config is for; with fewer, a smaller plan takes its place.
    """
    with interrupt.importing():
        from jpipe_train.run import job

    overrides = overrides if plan is None else (*overrides, f"plan.file={json.dumps(plan)}")
    address = job.Address(coordinator, num_processes, process_id, secret_file)
    return job.train(config, overrides, allow_code, resume, address, connect_limit, wait_limit, from_checkpoint, elastic)
