"""What processes exchange in a check: their facts, their clocks, and whether they see the same folder."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jpipe.files import create
from jpipe.processes import Processes
from jpipe_train.doctor.system import temporary_name

ROUNDS = 15
"""How often each process asks process 0 for the time; the quickest answer counts."""

_APPEARS = 15.0  # seconds after which a file of another host has to be seen; network file systems remember for some that there was none
_LOOK = 0.2  # seconds between two looks


class Clock(NamedTuple):
    """The clock of a process, compared with process 0's.

    Attributes:
        offset: seconds by which it is ahead.
        uncertainty: the most seconds by which `offset` may be wrong: half of the round trip.
        round_trip: seconds from a message to process 0 to its answer.
    """

    offset: float
    uncertainty: float
    round_trip: float


def collect(processes: Processes, what: str, text: str) -> list[str]:
    """Return the texts of all processes in process 0, and [] elsewhere; all processes call it.

    Args:
        processes: the processes of the job.
        what: what the text is, unique in a job.
        text: the text of this process, at most some hundred kilobytes.

    Raises:
        jpipe.PeerLost: the job is lost.
    """
    processes.broadcast(f"{what} of process {processes.index}", list(map(float, text.encode())))
    if processes.index:
        return []
    return [bytes(map(int, processes.receive(f"{what} of process {k}", k))).decode() for k in range(processes.count)]


def compare_clocks(processes: Processes, clock: Callable[[], float] = time.time) -> Clock:
    """Compare the clock of this process with process 0's; all processes call it, and ask one after the other.

    Args:
        processes: the processes of the job.
        clock: gives the time in seconds.

    Raises:
        jpipe.PeerLost: the job is lost.
    """
    asked = [(k, number) for k in range(1, processes.count) for number in range(ROUNDS)]
    if processes.index == 0:
        for k, number in asked:
            processes.receive(f"time for process {k}, {number}", k)
            processes.broadcast(f"time of process 0 for process {k}, {number}", [clock()])
        return Clock(0.0, 0.0, 0.0)
    samples = []
    for k, number in asked:
        if k == processes.index:
            began = clock()
            processes.broadcast(f"time for process {k}, {number}", [])
            (there,) = processes.receive(f"time of process 0 for process {k}, {number}", 0)
            samples.append((began, there, clock()))
    return quickest(samples)


def quickest(samples: Sequence[tuple[float, float, float]]) -> Clock:
    """Return the offset from the sample with the quickest answer.

    Args:
        samples: for each question, the time when it was sent, the time in the answer, and the time when the answer came.
    """
    began, there, ended = min(samples, key=lambda sample: sample[2] - sample[0])
    round_trip = max(ended - began, 0.0)
    return Clock((began + ended) / 2 - there, round_trip / 2, round_trip)


def see_same_folder(processes: Processes, folder: Path | None, limit: float = _APPEARS) -> bool | None:
    """Return whether this process sees a file that process 0 writes into a folder; all processes call it.

    Args:
        processes: the processes of the job.
        folder: an existing folder, which has the same path in all processes; None where this process has none.
        limit: seconds that the file may take to appear.

    Returns:
        Whether it is there; None if process 0 cannot write.

    Raises:
        jpipe.PeerLost: the job is lost.
    """
    with contextlib.ExitStack() as files:
        if processes.index == 0:
            name = temporary_name()
            try:
                assert folder is not None
                with create(folder / name) as file:
                    file.write(name.encode())
                files.callback((folder / name).unlink, missing_ok=True)
            except (OSError, AssertionError):
                name = ""
            processes.broadcast("name of the shared file", list(map(float, name.encode())))
        name = bytes(map(int, processes.receive("name of the shared file", 0))).decode()
        seen = None if not name else folder is not None and _appears(folder / name, limit)
        processes.barrier("the shared file")
    return seen


def _appears(file: Path, limit: float) -> bool:
    end = time.monotonic() + limit
    while True:
        with contextlib.suppress(OSError):
            if file.read_bytes() == file.name.encode():
                return True
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK)
