"""SIGTERM, SIGHUP and Ctrl-C while a run trains: all processes save at one step, and leave at one step when that is written.

JAX has a sync point for it (`jax.experimental.multihost_utils.reached_preemption_sync_point`), which is not used. Asking it waits in C++,
Python's lock held, until all processes have answered: where one has died in that moment, the others stand still, for longer than any
limit of jpipe, and cannot even say who is missing. And its handler takes every SIGTERM from the moment when processes connect, in which
one that compiles should end at once; the second one, too.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Literal, get_args

import jpipe
from train.console import interrupt, signals

Order = Literal["go on", "save", "leave"]
"""What all processes do before a step: take a cut behind it, or end without it; or neither."""

_ORDERS: tuple[Order, ...] = get_args(Order)
_CAME = "signal"  # under which a process sends the others the signal that it got
LAUNCHER = "JPIPE_LAUNCHER"  # the variable with the process id of `jpipe launch`, which sets it; JAX is not imported there


class Preemption:
    """Notes the first of these signals inside, and says before each step what comes of it; the second one ends the process at once.

    SIGHUP never counts as a second one: when a connection drops, a shell and the kernel send several, and systemd sends it with SIGTERM.
    Under `jpipe launch` nothing does: schedulers signal all processes, and the launcher passes its own signal on besides. At its second
    signal the launcher kills all.

    Process 0 decides, for all, a step ahead: nobody waits for it unless it is more than a step behind. A process that is lost
    meanwhile is still detected.

    Args:
        processes: of the run; None where this one is alone.
        saves: whether the run writes checkpoints at all; where not, the signals end the process as they do outside.

    Attributes:
        cut: the step of the checkpoint that is taken because of it; None before.
    """

    def __init__(self, processes: jpipe.processes.Processes | None, *, saves: bool) -> None:
        self._processes, self._saves = processes, saves
        self._noted: int | None = None  # the first signal that came to this process
        self._passed_on = False
        self._until_end = contextlib.ExitStack()
        self._told: int | None = None  # the first that came to another one
        self._announced = False  # whether process 0 has decided on the step that comes
        self.cut: int | None = None

    @property
    def signal(self) -> int | None:
        """Which signal came, to this process or, as far as this one knows, to another one; None for none. Then time is short."""
        if self._noted is None and self._processes is not None and self._processes.has_message(_CAME):
            self._told = self._told or int(self._processes.receive(_CAME)[0])
        return self._noted or self._told

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
        # What somebody else does about them stays: a program around this one, a shell that has them ignored.
        ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signals.is_usual(number)]
        if interrupt.is_ours():
            ours.append(signal.SIGINT)
        self._until_end.enter_context(signals.handled(ours if self._saves else (), self._note, _leave_at_the_second()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._until_end.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is None:
            self._noted = number
        if number != signal.SIGHUP and not _is_launched():
            for other in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(other) == self._note:
                    signal.signal(other, signals.usual(other))

    def _decide(self, is_saved: Callable[[], bool]) -> Order:
        if self.signal is None:
            return "go on"
        if self.cut is None:
            return "save"
        return "leave" if is_saved() else "go on"

    def _decided(self, processes: jpipe.processes.Processes, step: int) -> Order:
        """What process 0 has announced, a step ago; before the first step it has not."""
        if not self._announced:
            return "go on"
        (number,) = processes.receive(_name(step), 0, f"word from process 0 about step {step}")
        return _ORDERS[int(number)]

    def _announce(self, processes: jpipe.processes.Processes, step: int, is_saved: Callable[[], bool]) -> None:
        self._announced = True
        if self._noted is not None and not self._passed_on:
            self._passed_on = True
            processes.broadcast(_CAME, [self._noted])
        if processes.index == 0:
            processes.broadcast(_name(step), [_ORDERS.index(self._decide(is_saved))])


def _leave_at_the_second() -> Callable[[int], None]:
    """What counts signals as they come."""
    count, launched = 0, _is_launched()

    def hear(number: int) -> None:
        nonlocal count
        count += number != signal.SIGHUP
        if count == 2 and not launched:
            signals.leave(number)

    return hear


def _is_launched() -> bool:
    return os.environ.get(LAUNCHER) == str(os.getppid())


def _name(step: int) -> str:
    return f"order before step {step}"
