"""The process of a run that talks to Weights & Biases: it reads a JSON line per row on standard input and answers in such lines.

In the process of the run itself, wandb's threads, hooks and network waits could delay training or its end, or take its signals. It is
started as a file and imports nothing of jpipe's.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ALONE = 60.0  # seconds to send the remaining rows, unless the run ends this process earlier
CONNECT = 15.0  # seconds until the rows are kept on disk instead; shorter than the run waits at its end


def main() -> None:
    """Serve the run that has started this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # signals are for the run; this process ends after it
        signal.signal(number, signal.SIG_IGN)
    lines, answers = (os.fdopen(os.dup(number), mode, encoding="utf-8") for number, mode in ((0, "r"), (1, "w")))
    with open(os.devnull, "r+b") as nowhere:  # wandb's own process must not inherit these pipes
        os.dup2(nowhere.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)

    def answer(**fields: str | None) -> None:
        with contextlib.suppress(OSError):  # the run was killed
            print(json.dumps(fields), file=answers, flush=True)

    try:
        serve(lines, answer)
    except Exception as error:
        answer(problem=_first_line(error))
        sys.exit(1)


def serve(lines: Iterable[str], answer: Callable[..., None]) -> None:
    """Start the run in wandb, send its rows, and end it there.

    Args:
        lines: JSON: first the argument of `begin`, then `{"step": 3, "row": {…}}` for each row, last `{"end": 0}`, the exit code.
        answer: reports to the user: `url`, or the `folder` of a run that is offline; `problem` if that was not intended.
    """
    lines = iter(lines)
    run = begin(json.loads(next(lines)), answer)
    first_new_step, code = run.step, 1
    for line in lines:
        message = json.loads(line)
        if "end" in message:
            code = message["end"]
            break
        if message["step"] >= first_new_step:  # a resumed run repeats rows that wandb already has
            run.log(message["row"], step=message["step"], commit=True)
    timer = threading.Timer(ALONE, os._exit, (1,))  # ends this process even if something hangs
    timer.daemon = True
    timer.start()
    run.finish(exit_code=code)


def begin(about: Mapping[str, Any], answer: Callable[..., None]) -> Any:
    """Start the run in wandb, or only on disk if wandb cannot be reached.

    Args:
        about: `folder`, `id`, `name`, `project` and `config` of the run, and the `process` that trains.
        answer: as in `serve`.
    """
    import wandb

    timeout: dict[str, Any] = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": CONNECT}
    settings = wandb.Settings(console="off", silent=True, x_stats_pid=about["process"], **timeout)
    options: dict[str, Any] = {name: about[name] for name in ("id", "name", "project", "config")}
    options |= {"dir": about["folder"], "resume": "allow", "allow_val_change": True, "settings": settings}
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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    main()
