"""Transfers between processes in progress: the threads that run them, and placeholders for their results."""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

import jax

from jpipe.processes._membership import Processes
from jpipe.stages._bytes import nbytes

Tree = Any

_LOOK_SECONDS = 0.5  # between two looks at whether the run is lost


class Lane:
    """A thread that does transfers, one after the other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Tree], Tree, Callable[[BaseException], None], Future[Tree]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()  # a daemon: a collective whose peer is gone never ends

    def put(self, transfer: Callable[[], Tree], needs: Tree, fail: Callable[[BaseException], None]) -> "Future[Tree]":
        """Queue a transfer that runs once the arrays it needs are computed; `fail` gets its error, since perhaps nobody waits for it."""
        future: Future[Tree] = Future()
        self._queue.put((transfer, needs, fail, future))
        return future

    def _work(self) -> None:
        while True:
            transfer, needs, fail, future = self._queue.get()
            try:
                jax.block_until_ready(needs)  # else the collective would wait in the device's queue, and computations behind it
                future.set_result(transfer())
            except BaseException as error:
                future.set_exception(error)
                fail(error)
            del transfer, needs, fail, future  # while this thread waits, nothing that was moved is kept alive


@functools.cache
def lane_of(devices: Hashable) -> Lane:
    """Return the thread of a link, or of a set of devices, which all groups of replicas on these devices share."""
    return Lane()


class PendingTransfer:
    """A message in transfer from another process.

    Args:
        future: the arrays.
        words: what is waited for; converted to text only when it is printed.
        on: the processes waited for.
        processes: of the run.
        specs: gives the shapes and dtypes of the arrays.
        keys: which part of the arrays this is; by default all of them.
    """

    def __init__(
        self,
        future: "Future[Tree]",
        words: object,
        on: tuple[int, ...],
        processes: Processes,
        specs: Callable[[], Tree],
        keys: tuple[int, ...] = (),
    ) -> None:
        self._future: Future[Tree] | None = future
        self._words, self._on, self._processes = words, on, processes
        self._specs, self._keys = specs, keys

    @property
    def nbytes(self) -> int:
        """The size of its arrays."""
        return nbytes(self.specs)

    @property
    def specs(self) -> Tree:
        """The shapes and dtypes of its arrays."""
        return self._entry(self._specs())

    def __getitem__(self, key: int) -> "PendingTransfer":
        """Return one part of the arrays."""
        assert self._future is not None
        return PendingTransfer(self._future, self._words, self._on, self._processes, self._specs, (*self._keys, key))

    def is_deleted(self) -> bool:
        """Return whether it was deleted, as arrays are."""
        return self._future is None

    def delete(self) -> None:
        """Drop the arrays."""
        self._future = None

    def when_done(self, call: Callable[[], None]) -> None:
        """Have a function called when the arrays have arrived, by the thread that moves them; at once if they have."""
        assert self._future is not None
        self._future.add_done_callback(lambda future: call() if future.exception() is None else None)

    def wait(self) -> Tree:
        """Return the arrays.

        Raises:
            PeerLost: a process of the run died, hung or stopped.
        """
        assert self._future is not None
        if not self._future.done() or self._future.exception() is not None:
            with self._processes.waiting(self._words, self._on):
                while not self._future.done():
                    self._processes.check()
                    with contextlib.suppress(TimeoutError):
                        self._future.exception(timeout=_LOOK_SECONDS)
                while self._future.exception() is not None:  # mostly because a process is gone; the lane finds out and has `check` raise
                    self._processes.check()
                    time.sleep(_LOOK_SECONDS)
        return self._entry(self._future.result())

    def _entry(self, tree: Tree) -> Tree:
        return functools.reduce(lambda part, key: part[key], self._keys, tree)


def arrived(tree: Tree) -> Tree:
    """Return the arrays of a message, waiting for those that are still in transfer from another process."""
    return tree.wait() if isinstance(tree, PendingTransfer) else tree
