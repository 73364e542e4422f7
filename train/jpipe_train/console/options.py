"""The options that several commands share. The arguments of a command are a dataclass, from which tyro makes command-line options."""

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
    """The place of a process in a job of several processes.

    Attributes:
        coordinator: With several processes, the address of process 0, the same in all. SLURM and Open MPI set this and the next two.
        num_processes: With several processes, their number.
        process_id: With several processes, the number of this process, from 0.
        connect_limit: With several processes, how long each waits for the other processes at the start.
        wait_limit: With several processes, how long they wait without progress before they give up; longer than a microbatch takes.
        secret_file: With several processes, the file with their shared secret; by default the secret is in the variable JPIPE_SECRET.
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
"""A parameter of a command with this type is a dataclass; its fields are options of the command."""
