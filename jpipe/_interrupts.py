"""Interrupts while a state is consumed: signals wait until the call has its result, which the consumed state keeps for the caller."""

import contextlib
import hashlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import numpy as np

from jpipe.errors import InputError
from jpipe.runtime._interpreter import Event, Observer
from jpipe.runtime._metrics import Metrics
from jpipe.runtime.state import CONSUMED, State, is_consumed
from jpipe.stages._batch import to_host

Tree = Any

_DEFERRED = signal.SIGINT, signal.SIGTERM
_PATIENCE = 3.0  # seconds after which a second Ctrl-C takes effect at once, because the step may wait forever


@contextlib.contextmanager
def delayed_signals() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of this context.

    A signal that comes more than `_PATIENCE` seconds after the first one is delivered at once. Only signals that a Python function handles
    are delayed, and only in the main thread, because Python runs handlers only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    first = math.inf  # when the first signal came
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

    # A handler may raise as soon as it is restored, so each has its own block.
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


class Outcome:
    """The outcome of a call that consumes a state, which the state keeps.

    Attributes:
        result: the next state and the metrics, until the caller has received them.
        error: why there is no next state; "" if there is one.
        batch: the digest of the batch of an interrupted step.
    """

    def __init__(self) -> None:
        self.result: tuple[State, Metrics] | None = None
        self.error = ""
        self.batch: bytes | None = None

    def note_batch(self, batch: Tree, pieces: int) -> None:
        """Store the digest of an interrupted step's batch, which is read in `pieces` parts, because the caller may overwrite its memory."""
        if self.result is not None:
            with contextlib.suppress(Exception), delayed_signals():
                self.batch = _digest(batch, pieces)

    def is_of(self, batch: Tree, pieces: int) -> bool:
        """Return whether this is the outcome of an interrupted step with the same batch."""
        return self.batch is not None and self.batch == _digest(batch, pieces)


@contextlib.contextmanager
def consuming(before: State, current: State, observe: Observer | None) -> Iterator[tuple[Outcome, Observer | None]]:
    """Run a body to its end in spite of interrupts. It consumes the state, which keeps the outcome.

    The body sets `Outcome.result`. The caller sets `Outcome.result` to None when it returns the result.

    Args:
        current: the state to consume: `before`, or the result of an interrupted call that consumed `before`.

    Yields:
        The outcome, and the observer for the body. It calls the caller's observer until that raises an error.

    Raises:
        BaseException: what the body raised; or, after the outcome is kept, what a signal's handler or the observer raised.
    """
    outcome, earlier, failed = Outcome(), before._outcome, list[BaseException]()

    def observer(event: Event) -> None:
        if observe is not None and not failed:
            try:
                observe(event)
            except BaseException as error:
                failed.append(error)

    with delayed_signals():
        try:
            yield outcome, None if observe is None else observer
        except BaseException as error:
            if is_consumed(current):
                outcome.error = _words(error)
                _keep(before, outcome)
            raise
        assert outcome.result is not None
        if earlier is not None:
            state, metrics = outcome.result
            outcome.result = state, merged(earlier.result[1], metrics)
        _keep(before, outcome)
        if failed:
            raise failed[0]


def current_state(state: State) -> State:
    """Return the state to continue from: this one, or the result of an interrupted call that consumed it."""
    outcome, current = state._outcome, state
    if outcome is not None:
        if outcome.result is None:
            raise InputError(outcome.error or CONSUMED)
        current, _ = outcome.result
    if is_consumed(current):
        raise InputError(CONSUMED)
    return current


def _keep(before: State, outcome: Outcome) -> None:
    object.__setattr__(before, "_outcome", outcome)  # the class is frozen for all other code


def merged(first: Metrics, second: Metrics) -> Metrics:
    """Join the metrics of two consecutive calls into the metrics of one call."""
    return Metrics(**{name: type(numbers)(numbers | getattr(second, name)) for name, numbers in first._asdict().items()})


def _words(error: BaseException) -> str:
    """Return the message for a state that a failed call has consumed."""
    lines = str(error).splitlines() or [""]
    said = lines[-1 if "Traceback" in str(error) else 0].strip()  # for an error in a host callback JAX's message is a traceback
    shown = type(error).__name__ + (f" ({said[:200]})" if said else "")
    return (
        f"state: lost: the step or drain that consumed it ended with {shown} after overwriting some of its arrays; "
        "continue from a checkpoint or snapshot (Pipeline.restore), or begin again with init"
    )


def _digest(batch: Tree, pieces: int) -> bytes:
    digest = hashlib.blake2b()
    for path, leaf in jax.tree.leaves_with_path(to_host(batch)):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        rows = -(-leaf.shape[0] // pieces)
        for start in range(0, leaf.shape[0], rows):
            digest.update(np.ascontiguousarray(leaf[start : start + rows]).reshape(-1).view(np.uint8).data)
    return digest.digest()
