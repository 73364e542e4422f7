"""The process of a run that talks to a logging service: it reads one JSON line per row from standard input, and answers in JSON lines.

In the run's own process, the service's threads, hooks and network waits could delay training or its end, or take its signals. It is started
as a file, with the name of the service, and imports nothing from jpipe.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ALONE = 60.0  # seconds to send the remaining rows, unless the run ends this process earlier
CONNECT = 15.0  # seconds until the rows are kept on disk instead; shorter than the run waits at its end


def main() -> None:
    """Serve the run that has started this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # signals are for the run; this process ends after it
        signal.signal(number, signal.SIG_IGN)
    lines, answers = (os.fdopen(os.dup(number), mode, encoding="utf-8") for number, mode in ((0, "r"), (1, "w")))
    with open(os.devnull, "r+b") as nowhere:  # processes of the service must not inherit these pipes
        os.dup2(nowhere.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)

    def answer(**fields: str | None) -> None:
        with contextlib.suppress(OSError):  # the run was killed
            print(json.dumps(fields), file=answers, flush=True)

    try:
        serve(lines, answer, SERVICES[sys.argv[1]])
    except Exception as error:
        answer(problem=_first_line(error))
        sys.exit(1)


def serve(lines: Iterable[str], answer: Callable[..., None], begin: Callable[[Mapping[str, Any], Callable[..., None]], Any]) -> None:
    """Start the run in the service, send its rows, and end it there.

    Args:
        lines: JSON: first the argument of `begin`, then `{"step": 3, "row": {…}}` for each row, last `{"end": 0}`, the exit code.
        answer: reports to the user: `url`, or the `folder` of a run that is offline; `problem` if that was not intended.
        begin: starts the run: one of `SERVICES`. Its argument has `folder`, `id`, `name` and `config` of the run, and the `process` that
            trains. It returns an object with `step`, the first step that the service does not have, and wandb's `log` and `finish`.
    """
    lines = iter(lines)
    run = begin(json.loads(next(lines)), answer)
    first_new_step, code = run.step, 1
    for line in lines:
        message = json.loads(line)
        if "end" in message:
            code = message["end"]
            break
        if message["step"] >= first_new_step:  # a resumed run repeats rows that the service already has
            run.log(message["row"], step=message["step"], commit=True)
    timer = threading.Timer(ALONE, os._exit, (1,))  # ends this process even if something hangs
    timer.daemon = True
    timer.start()
    run.finish(exit_code=code)


def begin_wandb(about: Mapping[str, Any], answer: Callable[..., None]) -> Any:
    """Start the run in wandb, or on disk only if wandb cannot be reached; see `serve`."""
    import wandb

    timeout: dict[str, Any] = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": CONNECT}
    settings = wandb.Settings(console="off", silent=True, x_stats_pid=about["process"], **timeout)
    options: dict[str, Any] = {"id": about["id"], "name": os.environ.get("WANDB_NAME", about["name"]), "config": about["config"]}
    options |= {"project": os.environ.get("WANDB_PROJECT", "jpipe"), "dir": os.environ.get("WANDB_DIR", about["folder"])}
    options |= {"resume": "allow", "allow_val_change": True, "settings": settings}
    problem = None
    try:
        run = wandb.init(**options)
    except wandb.errors.Error as error:  # no login, no network
        problem = _first_line(error)
        wandb.teardown()  # otherwise the name of the run stays in use
        run = wandb.init(**options, mode="offline")
    if run.disabled:
        answer(problem="it is disabled, by WANDB_MODE, say")
    elif run.offline:
        answer(folder=str(Path(run.dir).parent), problem=problem)
    else:
        answer(url=run.url)
    return run


class Trackio:
    """A run in trackio's local database; see `serve`."""

    step = 0  # trackio does not say which steps it has

    def __init__(self, about: Mapping[str, Any], answer: Callable[..., None]) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "jpipe")
        name = f"{about['name']} {about['id']}"  # by which a resumed run is found
        self._run = trackio.init(project=project, name=name, config=about["config"], resume="allow", embed=False)
        answer(url=f"trackio show --project {project} shows the run as {name}")

    def log(self, row: Mapping[str, float], step: int, commit: bool) -> None:
        self._run.log(dict(row), step=step)

    def finish(self, exit_code: int) -> None:
        self._run.finish()


class Mlflow:
    """A run in MLflow, on the server in `MLFLOW_TRACKING_URI` or in the current folder; see `serve`."""

    def __init__(self, about: Mapping[str, Any], answer: Callable[..., None]) -> None:
        import mlflow

        self._client, self._entities = mlflow.MlflowClient(), mlflow.entities
        experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "jpipe")).experiment_id
        found = self._client.search_runs([experiment], f"tags.jpipe_id = '{about['id']}'")
        run = found[0] if found else self._client.create_run(experiment, run_name=about["name"], tags={"jpipe_id": about["id"]})
        self._id = run.info.run_id
        if found:  # parameters of a run cannot be changed
            self._client.update_run(self._id, status="RUNNING")
        params = [] if found else [mlflow.entities.Param(key, text[:500]) for key, text in _flat(about["config"])]
        for first in range(0, len(params), 100):  # the most that MLflow takes at once
            self._client.log_batch(self._id, params=params[first : first + 100])
        known = self._client.get_metric_history(self._id, "loss") if found else []
        self.step = 1 + max((metric.step for metric in known), default=-1)
        answer(url=f"run {self._id} at {mlflow.get_tracking_uri()}")

    def log(self, row: Mapping[str, float], step: int, commit: bool) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[self._entities.Metric(name, value, now, step) for name, value in row.items()])

    def finish(self, exit_code: int) -> None:
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")


SERVICES: Mapping[str, Callable[[Mapping[str, Any], Callable[..., None]], Any]] = {
    "wandb": begin_wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a config by dotted key."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    main()
