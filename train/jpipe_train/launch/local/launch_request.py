"""The arguments of `jpipe launch` as a dataclass; tyro makes the command-line options from it. This imports no JAX."""

import os
import re
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from jpipe import InputError
from jpipe_train.console.options import Count, Flag, OptionalCount, Seconds

LAUNCHED = "-- train CONFIG [--KEY …] | -- plan CONFIG … | -- evaluate RUN … | -- generate RUN … | -- doctor"
_MOST_PROCESSES = 256  # more must be a typo: each process needs hundreds of megabytes for JAX
_SEVERAL = ("train", "plan", "evaluate", "generate", "doctor")  # commands that run in several processes
_RESERVED = ("--coordinator", "--num-processes", "--process-id")
_EXAMPLE = "such as jpipe launch -n 2 -- train CONFIG"


@dataclass(frozen=True)
class Request:
    """The arguments of `jpipe launch`.

    Attributes:
        command: The command of every process. launch appends the coordinator, the number of processes and the number of the process.
        num_processes: How many processes to start.
        pin: Give each process a CPU core of its own, if there are enough cores. For measurements.
        max_restarts: How often to restart all processes after one fails, from the newest checkpoint.
        elastic: In place of -n: train with MAX processes, and with fewer, at least MIN, if some are lost.
        max_failures: With --elastic: a process that fails this many times in a row, without a new checkpoint, is left out.
        retry_after: With --elastic: a process that was left out is tried again after this time, which doubles with each failure.
        shortage_limit: With --elastic: how long to wait while fewer than MIN processes can be started.
    """

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar=LAUNCHED, help_behavior_hint="(required)")]
    num_processes: Annotated[int | None, tyro.conf.arg(aliases=["-n"], metavar="N")] = None
    pin: Flag = False
    max_restarts: OptionalCount = None
    elastic: Annotated[str | None, tyro.conf.arg(metavar="MIN:MAX")] = None
    max_failures: Count = 3
    retry_after: Seconds = 300.0
    shortage_limit: Seconds = 900.0

    @property
    def minimum(self) -> int:
        """The smallest number of processes that train, with `elastic`."""
        return int((self.elastic or "").partition(":")[0])

    @property
    def maximum(self) -> int:
        """The number of processes when none is missing, with `elastic`."""
        return int((self.elastic or "").partition(":")[2])

    def check(self) -> None:
        """Check the arguments."""
        if self.elastic is None:
            self._check_number()
        else:
            self._check_elastic(self.elastic)
        if self.max_restarts is not None and self.max_restarts < 0:
            raise InputError(f"launch --max-restarts: expected 0 or more, found {self.max_restarts}; 0 means no restart")
        if not self.command:
            raise InputError(f"launch: expected a command after --, found none; {_EXAMPLE}")
        if self.command[0] not in _SEVERAL:
            some = f"only {', '.join(_SEVERAL[:-1])} and {_SEVERAL[-1]} run in several processes"
            raise InputError(f"launch: expected `train CONFIG …` after --, found '{self.command[0]}'; {some}")
        for argument in self.command:
            if (name := argument.partition("=")[0].replace("_", "-")) in _RESERVED or (self.elastic and name == "--elastic"):
                raise InputError(f"launch: {name} after -- has no effect, because launch sets it for each process; leave it out")
        if self.pin and not hasattr(os, "sched_setaffinity"):
            raise InputError(f"launch --pin: {sys.platform} cannot bind a process to a core; leave it out")

    def _check_number(self) -> None:
        if self.num_processes is None:
            raise InputError(f"launch: expected -n N or --elastic MIN:MAX, found neither; {_EXAMPLE}")
        if not 1 <= self.num_processes <= _MOST_PROCESSES:
            raise InputError(f"launch -n: expected 1 to {_MOST_PROCESSES} processes, found {self.num_processes}")
        for name in ("max_failures", "retry_after", "shortage_limit"):
            if getattr(self, name) != getattr(Request, name):
                raise InputError(f"launch --{name.replace('_', '-')} has no effect without --elastic MIN:MAX; remove the option")

    def _check_elastic(self, elastic: str) -> None:
        for name, value in (("-n", self.num_processes), ("--max-restarts", self.max_restarts)):
            if value is not None:
                raise InputError(f"launch --elastic: expected neither -n nor --max-restarts beside it, found {name}; leave out one of them")
        if self.command and self.command[0] != "train":
            raise InputError(
                f"launch --elastic: expected `train CONFIG …` after --, found '{self.command[0]}'; the other commands have no checkpoints"
            )
        if not re.fullmatch(r"\d{1,4}:\d{1,4}", elastic, re.ASCII) or not all(
            1 <= number <= _MOST_PROCESSES for number in (self.minimum, self.maximum)
        ):
            expected = f"MIN:MAX, the fewest and the most processes, such as 2:4, at most {_MOST_PROCESSES}"
            raise InputError(f"launch --elastic: expected {expected}, found '{elastic}'")
        if self.minimum > self.maximum:
            change = f"write {self.maximum}:{self.minimum}"
            raise InputError(f"launch --elastic: expected MIN:MAX, found '{elastic}', in which MIN is larger than MAX; {change}")
        if self.max_failures < 1:
            raise InputError(f"launch --max-failures: expected 1 or more, found {self.max_failures}")
        for name, seconds in (("--retry-after", self.retry_after), ("--shortage-limit", self.shortage_limit)):
            if not 0 <= seconds <= 1e9:
                raise InputError(f"launch {name}: expected seconds, 0 to 1e9, found {seconds:g}")
