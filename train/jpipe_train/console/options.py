"""The options that several commands share. A request is a dataclass with them: the command line is read from it, and it is what runs."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import tyro

Count = Annotated[int, tyro.conf.arg(metavar="N")]
OptionalCount = Annotated[int | None, tyro.conf.arg(metavar="N")]
OptionalFile = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Overrides = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")]
OptionalStep = Annotated[int | Literal["best"] | None, tyro.conf.arg(metavar="N|best")]
Weights = Literal["newest", "ema"]
Seconds = Annotated[float, tyro.conf.arg(metavar="SECONDS")]


@dataclass(frozen=True)
class Process:
    """One of several processes.

    Attributes:
        coordinator: Several processes: the address of process 0, the same for all. SLURM and Open MPI provide this and the next two.
        num_processes: Several processes: their number.
        process_id: Several processes: the number of this one, from 0.
        connect_limit: Several processes: how long each waits for the other processes at the start.
        wait_limit: Several processes: how long none may make progress before they give up; longer than a microbatch takes.
        secret_file: Several processes: the file with the secret that all share; by default the variable JPIPE_SECRET has it.
    """

    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    num_processes: OptionalCount = None
    process_id: Annotated[int | None, tyro.conf.arg(metavar="I")] = None
    connect_limit: Seconds = 300.0
    wait_limit: Seconds = 45.0
    secret_file: OptionalFile = None


ALONE = Process()

_T = TypeVar("_T")
Fields = Annotated[_T, tyro.conf.arg(name="")]
"""A dataclass with fields that are the options of a command."""
