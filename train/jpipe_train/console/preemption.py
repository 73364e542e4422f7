"""Handle SIGTERM, SIGHUP and Ctrl-C during training: all processes save at the same step and then end at the same step.

JAX's sync point for this (`jax.experimental.multihost_utils.reached_preemption_sync_point`) is not used, for two reasons. First, it waits
in C++ with Python's lock until all processes have answered. If a process dies, the other processes are blocked for longer than any limit of
jpipe, and cannot report it. Second, its handler catches every SIGTERM after the processes have connected, but a SIGTERM during compilation
and a second SIGTERM should end the process immediately.
"""

import contextlib
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Literal, cast

import jpipe
from jpipe_train.console import interrupt

Decision = Literal["continue", "save", "leave", "last", "trace"]
"""The decision of all processes before a step: continue, save after the step, leave before it, end after it, or start tracing with it."""
_CAME = "signal"  # the topic of messages with which a process tells the other processes that it received a signal


class Preemption:
    """Records the first signal, and decides before each step what to do. A second signal ends the process immediately.

    SIGHUP never counts as a second signal. When a connection drops, a shell and the kernel send several, and systemd sends SIGHUP together
    with SIGTERM. Under `jpipe launch` no signal counts as a second one, because schedulers signal all processes and the launcher also
    forwards its own signal. If the launcher receives a second signal, it kills all processes.
    Process 0 decides for all processes, one step ahead, so the others wait only if process 0 is more than a step behind. Even then a lost
    process is detected. A callback in process 0 can also end the run. The run then ends after the step that follows the decision, so its
    end does not depend on the speed of any process.

    Args:
        processes: the processes of the run; None if there is only one.
        saves: whether the run writes checkpoints. If it does not, the signals have their default effect.
        returns: whether Ctrl-C ends a run without checkpoints after a step, so that the caller gets the state.
        stops: in process 0, a function that returns whether a callback has asked to end the run; None in all processes without callbacks.
        traces: in process 0, a function that returns whether to trace the next steps; None in all processes if none can be traced.

    Attributes:
        cut: the step of the checkpoint that a signal caused; None before a signal.
        returns: the argument.
    """

    def __init__(
        self,
        processes: jpipe.processes.Processes | None,
        *,
        saves: bool,
        returns: bool = False,
        stops: Callable[[], bool] | None = None,
        traces: Callable[[], bool] | None = None,
    ) -> None:
        self._processes, self._saves, self._stops, self._traces, self.returns = processes, saves, stops, traces, returns
        self._received: int | None = None  # the first signal to this process
        self._passed_on = False
        self._until_end = contextlib.ExitStack()
        self._signal_elsewhere: int | None = None  # the first signal to another process
        self._announced = False  # whether process 0 has decided on the next step
        self.cut: int | None = None

    @property
    def signal(self) -> int | None:
        """The signal that some process of the run has received, or None. After a signal there is little time."""
        if self._received is None and self._processes is not None and self._processes.has_message(_CAME):
            self._signal_elsewhere = self._signal_elsewhere or int(self._processes.receive(_CAME))
        return self._received or self._signal_elsewhere

    def decide(self, step: int, is_saved: Callable[[], bool]) -> Decision:
        """Return what to do before `step`; the decision is the same in all processes. Each process calls this before every step.

        `is_saved`, which only process 0 calls, returns whether all processes have written the snapshot or failed. Raise PeerLost if another
        process was lost.
        """
        if not self._saves and not self.returns and self._stops is None and self._traces is None:
            return "continue"
        decision = self._decide_alone(is_saved) if self._processes is None else self._decided(self._processes, step)
        if decision == "save":
            self.cut = step + 1
        if self._processes is not None:
            self._announce(self._processes, step + 1, is_saved)
        return decision

    def __enter__(self) -> "Preemption":
        # Other handlers are kept: the program that calls jpipe may have installed them, or a shell may have made it ignore the signals.
        ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if self._saves and interrupt.is_usual(number)]
        if (self._saves or self.returns) and interrupt.is_ours():
            ours.append(signal.SIGINT)
        self._until_end.enter_context(interrupt.handled(ours, self._record, _leaver_at_second_signal()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._until_end.close()

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = number
        if number != signal.SIGHUP and not interrupt.is_launched():
            for other in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(other) == self._record:
                    signal.signal(other, interrupt.usual(other))

    def _decide_alone(self, is_saved: Callable[[], bool]) -> Decision:
        if self.signal is None or not self._saves:
            if self.signal is not None or (self._stops is not None and self._stops()):
                return "last"
            return "trace" if self._traces is not None and self._traces() else "continue"
        if self.cut is None:
            return "save"
        return "leave" if is_saved() else "continue"

    def _decided(self, processes: jpipe.processes.Processes, step: int) -> Decision:
        """Return the decision that process 0 announced one step earlier. Before the first step the decision is "continue"."""
        if not self._announced:
            return "continue"
        return cast(Decision, processes.receive(_name(step), 0, f"a message from process 0 about step {step}").decode())

    def _announce(self, processes: jpipe.processes.Processes, step: int, is_saved: Callable[[], bool]) -> None:
        self._announced = True
        if self._received is not None and not self._passed_on:
            self._passed_on = True
            processes.broadcast(_CAME, str(self._received).encode())
        if processes.index == 0:
            processes.broadcast(_name(step), self._decide_alone(is_saved).encode())


def _leaver_at_second_signal() -> Callable[[int], None]:
    """Return a function that counts the signals that arrive, and ends the process at the second signal."""
    count, launched = 0, interrupt.is_launched()

    def count_signal(number: int) -> None:
        nonlocal count
        count += number != signal.SIGHUP and interrupt.usual(number) is not signal.default_int_handler
        if count == 2 and not launched:
            interrupt.leave(number)

    return count_signal


def _name(step: int) -> str:
    return f"decision before step {step}"
