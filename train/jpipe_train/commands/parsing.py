"""The command-line application and the options that several commands share."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

app = tyro.extras.SubcommandApp()

Count = Annotated[int, tyro.conf.arg(metavar="N")]
OptionalCount = Annotated[int | None, tyro.conf.arg(metavar="N")]
OptionalFile = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Overrides = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")]
OptionalStep = Annotated[int | Literal["best"] | None, tyro.conf.arg(metavar="N|best")]
Weights = Literal["newest", "ema"]
Coordinator = Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")]
ProcessId = Annotated[int | None, tyro.conf.arg(metavar="I")]
Seconds = Annotated[float, tyro.conf.arg(metavar="SECONDS")]


@dataclass(frozen=True)
class Process:
    """One of several processes.

    Attributes:
        coordinator: Several processes: as in train, like the following options.
        num_processes: Several processes: their number.
        process_id: Several processes: the number of this one, from 0.
        connect_limit: Several processes: how long each waits for the other processes at the start.
        wait_limit: Several processes: how long none may make progress before they give up.
        secret_file: Several processes: the file with the secret that all share.
    """

    coordinator: Coordinator = None
    num_processes: OptionalCount = None
    process_id: ProcessId = None
    connect_limit: Seconds = 300.0
    wait_limit: Seconds = 45.0
    secret_file: OptionalFile = None


ALONE = Process()
