"""Note when arrays have arrived, without holding up the run."""

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax

Tree = Any
_Moved = TypeVar("_Moved")


class Arrivals(Generic[_Moved]):
    """A thread that waits for the arrays that one lane moves, in order.

    Args:
        note: called when what was moved has arrived.

    Attributes:
        error: why an array has not arrived: its computation failed, or the run has consumed it before this thread came to it.
    """

    def __init__(self, note: Callable[[_Moved], None]) -> None:
        self._note = note
        self.error: Exception | None = None
        self._queue: queue.SimpleQueue[tuple[_Moved, Tree] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def put(self, moved: _Moved, tree: Tree) -> None:
        """Wait for the arrays of `tree` after all that were put before."""
        self._queue.put((moved, tree))

    def stop(self) -> None:
        """Return when all of them have arrived."""
        self._queue.put(None)
        self._thread.join()

    def _wait(self) -> None:
        while (item := self._queue.get()) is not None:
            moved, tree = item
            try:
                jax.block_until_ready(tree)
                self._note(moved)
            except Exception as error:
                self.error = self.error or error
            del item, tree  # while this thread waits, nothing that was moved is kept alive
