"""SIGTERM while a run trains: all processes save at one step, and leave at one step when that is written.

JAX has a sync point for it (`jax.experimental.multihost_utils.reached_preemption_sync_point`), which is not used. Asking it waits in C++,
Python's lock held, until all processes have answered: where one has died in that moment, the others stand still, for longer than any
limit of jpipe, and cannot even say who is missing. And its handler takes every SIGTERM from the moment when processes connect, in which
one that compiles should end at once; the second one, too.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Literal, get_args

import jpipe

Order = Literal["go on", "save", "leave"]
"""What all processes do before a step: take a cut behind it, or end without it; or neither."""

_ORDERS: tuple[Order, ...] = get_args(Order)
_watching = False  # whether some Preemption takes SIGTERM in this process
_CAME = "SIGTERM"  # under which the others tell process 0


class Preemption:
    """Notes the first SIGTERM inside, and says before each step what comes of it; the second one ends the process at once.

    Process 0 decides, for all, a step ahead: nobody waits for it unless it is more than a step behind. A process that is lost
    meanwhile is noticed as ever.

    Args:
        processes: of the run; None where this one is alone.
        saves: whether the run writes checkpoints at all; where not, SIGTERM ends the process as it does outside.

    Attributes:
        cut: the step of the checkpoint that is taken because of it; None before.
    """

    def __init__(self, processes: jpipe.Processes | None, *, saves: bool) -> None:
        self._processes, self._saves = processes, saves
        self._noted = self._passed_on = False
        self._wakes: tuple[int, int] | None = None  # what wakes the thread that counts signals, and what was in its place
        self._announced = False  # whether process 0 has decided on the step that comes
        self.cut: int | None = None

    @property
    def came(self) -> bool:
        """Whether time is short: SIGTERM came to this process, or, as far as process 0 knows, to another one."""
        return self._noted or (self._processes is not None and self._processes.heard(_CAME))

    def order(self, step: int, is_saved: Callable[[], bool]) -> Order:
        """What to do before `step`, the same in all processes; each asks before every step.

        Args:
            step: that comes next.
            is_saved: whether the cut is written in all processes, or cannot be; process 0 is asked.

        Raises:
            PeerLost: the run is lost.
        """
        if not self._saves:
            return "go on"
        order = self._decide(is_saved) if self._processes is None else self._decided(self._processes, step)
        if order == "save":
            self.cut = step + 1
        if self._processes is not None:
            self._announce(self._processes, step + 1, is_saved)
        return order

    def __enter__(self) -> "Preemption":
        global _watching
        # What somebody else does about it stays: a program around this one, a shell that has it ignored.
        ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._saves and ours:
            writer = _count_in_a_thread()
            self._wakes = writer, signal.set_wakeup_fd(writer)
            signal.signal(signal.SIGTERM, self._note)
            _watching = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        global _watching
        if self._wakes is not None:
            _watching = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            writer, before = self._wakes
            signal.set_wakeup_fd(before)
            os.close(writer)
            self._wakes = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _decide(self, is_saved: Callable[[], bool]) -> Order:
        if not self.came:
            return "go on"
        if self.cut is None:
            return "save"
        return "leave" if is_saved() else "go on"

    def _decided(self, processes: jpipe.Processes, step: int) -> Order:
        """What process 0 has announced, a step ago; before the first step it has not."""
        if not self._announced:
            return "go on"
        (number,) = processes.told(_name(step), 0, f"word from process 0 about step {step}")
        return _ORDERS[int(number)]

    def _announce(self, processes: jpipe.Processes, step: int, is_saved: Callable[[], bool]) -> None:
        self._announced = True
        if processes.index == 0:
            processes.tell(_name(step), [_ORDERS.index(self._decide(is_saved))])
        elif self._noted and not self._passed_on:
            self._passed_on = True
            processes.tell(_CAME, [])


def _count_in_a_thread() -> int:
    """A file descriptor for signals as they come; a thread ends the process at the second SIGTERM, until the descriptor is closed.

    While the main thread waits in C, for a device, say, Python calls no handler, and takes two signals for one.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def count() -> None:
        came = 0
        with open(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                came += number == bytes([signal.SIGTERM])
                if came == 2:
                    os._exit(128 + signal.SIGTERM)

    threading.Thread(target=count, name="signals", daemon=True).start()
    return writer


def _leave_to_parent() -> None:
    """In a child that a program forks: SIGTERM ends it, and is not counted as one of its parent."""
    if _watching:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_to_parent)


def _name(step: int) -> str:
    return f"order before step {step}"
