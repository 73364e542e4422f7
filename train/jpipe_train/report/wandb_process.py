"""The process of a run that talks to Weights & Biases. It gets a line of JSON per row on standard input, and answers in such lines.

In the process of the run itself, wandb's threads, hooks and waits for the network could delay training or its end, or take its signals.
It is started as a file and imports nothing of jpipe's: what `train` is elsewhere does not matter.
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

ALONE = 60.0  # seconds for what is left to send, if the run itself does not end this process before
CONNECT = 15.0  # seconds until the rows are kept on disk instead; less than the end of a run waits


def main() -> None:
    """Serve the run that has started this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the run, after whose end this process ends
        signal.signal(number, signal.SIG_IGN)
    lines, answers = (os.fdopen(os.dup(number), mode, encoding="utf-8") for number, mode in ((0, "r"), (1, "w")))
    with open(os.devnull, "r+b") as nowhere:  # wandb has a process of its own, which must not hold the ends of these pipes
        os.dup2(nowhere.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)

    def answer(**words: str | None) -> None:
        with contextlib.suppress(OSError):  # the run was killed
            print(json.dumps(words), file=answers, flush=True)

    try:
        serve(lines, answer)
    except Exception as error:
        answer(problem=_first_line(error))
        sys.exit(1)


def serve(lines: Iterable[str], answer: Callable[..., None]) -> None:
    """Begin the run in wandb, send its rows, and end it there.

    Args:
        lines: JSON: first what `begin` takes, then `{"step": 3, "row": {…}}` for each row, last `{"end": 0}`, the exit code.
        answer: gets what the user is to know: `url`, or the `folder` of a run that is offline; `problem` if that is not what was asked for.
    """
    lines = iter(lines)
    run = begin(json.loads(next(lines)), answer)
    there, code = run.step, 1
    for line in lines:
        message = json.loads(line)
        if "end" in message:
            code = message["end"]
            break
        if message["step"] >= there:  # a run that is resumed writes its last rows again, which wandb has already
            run.log(message["row"], step=message["step"], commit=True)
    timer = threading.Timer(ALONE, os._exit, (1,))  # whatever hangs, and whether or not the run lives and waits for it
    timer.daemon = True
    timer.start()
    run.finish(exit_code=code)


def begin(about: Mapping[str, Any], answer: Callable[..., None]) -> Any:
    """The run in wandb; where it cannot be reached, one that is only on disk.

    Args:
        about: `folder`, `id`, `name`, `project` and `config` of the run, and the `process` that trains.
        answer: as in `serve`.
    """
    import wandb

    patience: dict[str, Any] = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": CONNECT}
    settings = wandb.Settings(console="off", silent=True, x_stats_pid=about["process"], **patience)
    options: dict[str, Any] = {name: about[name] for name in ("id", "name", "project", "config")}
    options |= {"dir": about["folder"], "resume": "allow", "allow_val_change": True, "settings": settings}
    problem = None
    try:
        run = wandb.init(**options)
    except wandb.errors.Error as error:  # no login, no network
        problem = _first_line(error)
        wandb.teardown()  # else the name of the run would be taken
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
