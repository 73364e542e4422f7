"""Interrupts while a state is consumed: signals wait for the result, which is kept until its caller has received it."""

import contextlib
import hashlib
import math
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax
import numpy as np

from jpipe.errors import InputError
from jpipe.runtime._interpreter import Event, Observer
from jpipe.runtime._metrics import Metrics
from jpipe.runtime.state import CONSUMED, State, is_consumed
from jpipe.runtime.transport._host_rows import to_host

Tree = Any

_DEFERRED = signal.SIGINT, signal.SIGTERM
_PATIENCE = 3.0  # seconds after which a second Ctrl-C takes effect at once, since the step may be waiting for something that never comes


@contextlib.contextmanager
def delayed_signals() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of this context.

    A signal that comes `_PATIENCE` after the first is delivered at once.
    This concerns signals that a Python function handles, and only the main thread: Python runs these functions nowhere else.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    first = math.inf  # when the first one came
    handlers = {number: handler for number in _DEFERRED if callable(handler := signal.getsignal(number))}

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal first
        received.append((number, frame))
        first = min(first, time.monotonic())
        if time.monotonic() - first > _PATIENCE:
            deliver()

    def deliver() -> None:
        late, received[:] = list(received), []
        for number, frame in late:
            handlers[signal.Signals(number)](number, frame)

    def restore(number: signal.Signals) -> None:
        if number in handlers and signal.getsignal(number) is hold:
            signal.signal(number, handlers[number])

    # Each handler may raise as soon as it is in place again: hence one block for each.
    try:
        try:
            try:
                for number in handlers:
                    signal.signal(number, hold)
                yield
            finally:
                restore(signal.SIGTERM)
        finally:
            restore(signal.SIGINT)
    finally:
        deliver()


class FailedLater:
    """An observer that calls another one until that fails, and keeps its error until the step is complete.

    Attributes:
        error: the exception of the observer, or None.
    """

    def __init__(self, observe: Observer) -> None:
        self._observe = observe
        self.error: BaseException | None = None

    def __call__(self, event: Event) -> None:
        if self.error is None:
            try:
                self._observe(event)
            except BaseException as error:
                self.error = error


class Outcome:
    """The outcome of a call that consumed a state.

    Attributes:
        result: the next state and the metrics, until the caller has received them.
        error: why there is no next state, or "".
        batch: the digest of the batch of the call, if it is known.
    """

    def __init__(self, result: tuple[State, Metrics] | None, error: str = "") -> None:
        self.result, self.error = result, error
        self.batch: bytes | None = None


class Results:
    """The results of calls that consumed a state, kept while the caller holds that state and may not have received the next one."""

    def __init__(self) -> None:
        # Not a WeakKeyDictionary: it drops entries in a callback, in which Python loses a KeyboardInterrupt.
        self._all: dict[int, tuple[weakref.ref[State], Outcome]] = {}

    def _of(self, state: State) -> Outcome | None:
        entry = self._all.get(id(state))
        return entry[1] if entry is not None and entry[0]() is state else None

    def _put(self, state: State, outcome: Outcome) -> None:
        for key in [key for key, (other, _) in self._all.items() if other() is None]:
            del self._all[key]
        self._all[id(state)] = weakref.ref(state), outcome

    def keep(self, state: State, result: tuple[State, Metrics]) -> Outcome:
        """Keep the result of a call that consumed a state; the caller sets `Outcome.result` to None when it returns."""
        outcome = Outcome(result)
        if result[0] is not state:  # it is where nothing was in flight
            self._put(state, outcome)
        return outcome

    def lose(self, state: State, error: BaseException) -> None:
        """Store why a consumed state has no next one."""
        lines = str(error).splitlines() or [""]
        said = lines[-1 if "Traceback" in str(error) else 0].strip()  # of a host callback's error JAX gives the traceback
        shown = type(error).__name__ + (f" ({said[:200]})" if said else "")
        words = (
            f"state: lost: the step or drain that consumed it ended with {shown} when it had written over some of its arrays; "
            "continue from a checkpoint or snapshot (Pipeline.restore), or begin again with init"
        )
        self._put(state, Outcome(None, words))

    def unreceived(self, state: State) -> tuple[State, Metrics] | None:
        """Return the result of the call that consumed the state, if its caller has not received it.

        Raises:
            InputError: that call failed, and there is none, or its caller has received it.
        """
        outcome = self._of(state)
        if outcome is not None and outcome.result is None:
            raise InputError(outcome.error or CONSUMED)
        return None if outcome is None else outcome.result

    def note_batch(self, state: State, batch: Tree, rows: int) -> None:
        """Store the digest of the batch of an interrupted step: the caller may overwrite the memory of the batch.

        Args:
            state: the state that the step consumed.
            batch: the batch of that step.
            rows: the number of rows to read at once.
        """
        outcome = self._of(state)
        if outcome is not None and outcome.result is not None and outcome.batch is None:
            with contextlib.suppress(Exception), delayed_signals():
                outcome.batch = _digest(batch, rows)

    def is_of(self, state: State, batch: Tree, rows: int) -> bool:
        """Return whether the state has an unreceived result of a step with this batch."""
        outcome = self._of(state)
        return outcome is not None and outcome.result is not None and outcome.batch is not None and outcome.batch == _digest(batch, rows)


def merged(first: Metrics, second: Metrics) -> Metrics:
    """Return the metrics of two consecutive calls as those of one call."""
    return Metrics(**{name: numbers | getattr(second, name) for name, numbers in first._asdict().items()})


def _digest(batch: Tree, rows: int) -> bytes:
    digest = hashlib.blake2b()
    for path, leaf in jax.tree.leaves_with_path(to_host(batch)):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        for start in range(0, leaf.shape[0], rows):
            digest.update(np.ascontiguousarray(leaf[start : start + rows]).reshape(-1).view(np.uint8).data)
    return digest.digest()


_Consuming = Callable[[State, Observer | None], tuple[State, Metrics]]


def consume(
    results: Results, before: State, current: State, carried: Metrics, call: _Consuming, observe: Observer | None
) -> tuple[Outcome, tuple[State, Metrics]]:
    """Run a call that consumes a state to its end, in spite of interrupts, and keep the result.

    Args:
        results: keeps it.
        before: the state that the caller passed.
        current: the state to consume: the same, or the one that an earlier call made of it.
        carried: the metrics of that call.
        call: consumes the state, calls the observer and returns the next state and metrics.
        observe: the caller's observer.

    Returns:
        The record of the result, and the result. The caller sets `Outcome.result` to None when it returns the result.

    Raises:
        BaseException: a signal that came meanwhile, or what the observer raised, when the result is kept; or what the call raised.
    """
    observer = None if observe is None else FailedLater(observe)
    with delayed_signals():
        try:
            state, metrics = call(current, observer)
        except BaseException as error:
            if is_consumed(current):
                results.lose(before, error)
            raise
        result = state, merged(carried, metrics)
        outcome = results.keep(before, result)
        if observer is not None and observer.error is not None:
            raise observer.error
    return outcome, result
