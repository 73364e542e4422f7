"""`jpipe evaluate RUN`: compute the loss and metrics of a run over a whole data set."""

from typing import Annotated

import tyro

from jpipe_train.commands.parsing import (
    Coordinator,
    Flag,
    OptionalCount,
    OptionalFile,
    OptionalStep,
    Overrides,
    ProcessId,
    Seconds,
    Weights,
)
from jpipe_train.console import interrupt


def evaluate(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None,
    step: OptionalStep = None,
    weights: Weights = "newest",
    batches: OptionalCount = None,
    overrides: Overrides = (),
    allow_code: Flag = False,
    coordinator: Coordinator = None,
    num_processes: OptionalCount = None,
    process_id: ProcessId = None,
    connect_limit: Seconds = 300.0,
    wait_limit: Seconds = 45.0,
    secret_file: OptionalFile = None,
) -> int:
    """Compute loss, perplexity and metrics of a run over a whole data set, through its pipeline. The run is not changed.

    Args:
        run: The folder of the run, such as runs/0001.
        data: Data in the form of the run's own; by default all of the run's validation data.
        step: The checkpoint after N steps, or the best one of a run with checkpoint.best; by default the newest complete one.
        weights: The newest parameters, or their moving average (ema), of a run with optimizer.ema_decay.
        batches: Only N batches; the run's own validations have train.eval_batches of them.
        overrides: Replace one key of the run's config, such as plan.num_stages=1.
        allow_code: Import and run the functions that the config names, as in train.
        coordinator: Several processes: as in train, like the following options.
        num_processes: Several processes: their number.
        process_id: Several processes: the number of this one, from 0.
        connect_limit: Several processes: how long each waits for the other processes at the start.
        wait_limit: Several processes: how long none may make progress before they give up.
        secret_file: Several processes: the file with the secret that all share.
    """
    with interrupt.importing():
        from jpipe_train.run import job
        from jpipe_train.run.evaluate import Request

    address = job.Address(coordinator, num_processes, process_id, secret_file)
    request = Request(run, data, step, weights, batches, overrides, allow_code)
    return job.evaluate(request, address, connect_limit, wait_limit)
