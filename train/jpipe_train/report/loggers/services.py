"""Runs in logging services: Weights & Biases, trackio and MLflow.

Each service has a function `begin(about, tell)`, which begins a run in the service or continues it, and prints lines for the user with
`tell`. It returns an object with `step`, the first step that the service does not have yet, and the methods `log` and `finish` of wandb.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jpipe.files import shown
from jpipe_train.config.config_file import texts_of
from jpipe_train.console.terminal import first_line

CONNECT = 15.0  # seconds after which wandb gives up connecting and keeps the rows on disk; a run waits longer than this at its end


class About(NamedTuple):
    """The information about a run that a service gets."""

    id: str  # the id with which the service finds a resumed run
    name: str  # the name of the run
    config: Mapping[str, Any]  # the config of the run, as plain data
    folder: Path  # the folder for the service's files in the run folder
    limit: float  # seconds that the end of the run waits for the service


def begin_wandb(about: About, tell: Callable[[str], None]) -> Any:
    """Begin the run in wandb, or only on disk if wandb cannot be reached."""
    import wandb

    limits: dict[str, Any] = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": CONNECT}
    if "finish_timeout" in wandb.Settings.model_fields:  # newer versions of wandb have it; their exit handler also respects this limit
        limits["finish_timeout"] = about.limit
    options: dict[str, Any] = {"id": about.id, "name": os.environ.get("WANDB_NAME", about.name), "config": about.config}
    options |= {"project": os.environ.get("WANDB_PROJECT", "jpipe"), "dir": os.environ.get("WANDB_DIR", str(about.folder))}
    options |= {"resume": "allow", "allow_val_change": True, "settings": wandb.Settings(console="off", silent=True, **limits)}
    problem = "offline"
    try:
        run = wandb.init(**options)
    except wandb.errors.Error as error:  # no login, no network
        problem = first_line(error)
        wandb.teardown()  # otherwise the name of the run stays in use
        run = wandb.init(**options, mode="offline")
    if run.disabled:
        raise RuntimeError("wandb is disabled, for example by WANDB_MODE")
    if run.offline:
        folder = shown(Path(run.dir).parent)
        tell(f"{problem.rstrip('.')}; the rows are kept on disk; wandb sync {folder} sends them")
    else:
        tell(str(run.url))
    return run


class Trackio:
    """A run in trackio's local database."""

    step = 0  # trackio cannot report which steps it has

    def __init__(self, about: About, tell: Callable[[str], None]) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "jpipe")
        name = f"{about.name} {about.id}"
        self._run = trackio.init(project=project, name=name, config=about.config, resume="allow", embed=False)
        tell(f"trackio show --project {project} shows the run as {name}")

    def log(self, row: Mapping[str, float], step: int, commit: bool) -> None:
        self._run.log(dict(row), step=step)

    def finish(self, exit_code: int) -> None:
        self._run.finish()


class Mlflow:
    """A run in MLflow, on the server in `MLFLOW_TRACKING_URI` or in the current folder."""

    def __init__(self, about: About, tell: Callable[[str], None]) -> None:
        import mlflow

        self._client, self._entities = mlflow.MlflowClient(), mlflow.entities
        experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "jpipe")).experiment_id
        found = self._client.search_runs([experiment], f"tags.jpipe_id = '{about.id}'")
        run = found[0] if found else self._client.create_run(experiment, run_name=about.name, tags={"jpipe_id": about.id})
        self._id = run.info.run_id
        if found:  # the parameters of an existing run cannot be changed
            self._client.update_run(self._id, status="RUNNING")
        params = [] if found else [mlflow.entities.Param(key, text[:500]) for key, text in texts_of(about.config).items()]
        for first in range(0, len(params), 100):  # the most that MLflow takes at once
            self._client.log_batch(self._id, params=params[first : first + 100])
        known = self._client.get_metric_history(self._id, "loss") if found else []
        self.step = 1 + max((metric.step for metric in known), default=-1)
        tell(f"run {self._id} at {mlflow.get_tracking_uri()}")

    def log(self, row: Mapping[str, float], step: int, commit: bool) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[self._entities.Metric(name, value, now, step) for name, value in row.items()])

    def finish(self, exit_code: int) -> None:
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")


SERVICES: Mapping[str, Callable[[About, Callable[[str], None]], Any]] = {"wandb": begin_wandb, "trackio": Trackio, "mlflow": Mlflow}
"""The services. Their names are also the names of Python packages, the values of `log`, and folders in the run folder."""
