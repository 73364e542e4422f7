"""The only code that knows how an array gets from one worker to another."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jpipe._program import Message

Tree = Any


class LocalTransport:
    """Between devices of one process: `jax.device_put`, asynchronous. The mailbox holds what was sent and not yet received."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = devices
        self._mailbox: dict[tuple[int, Message, int], Tree] = {}

    def load(self, worker: int, data: Tree) -> Tree:
        """Bring host arrays that nobody will write to (see `rows`) to a worker."""
        return jax.device_put(data, self._devices[worker])

    def send(self, to: int, message: Message, microbatch: int, tree: Tree) -> None:
        """Start moving a message to the worker `to`."""
        self._mailbox[to, message, microbatch] = jax.device_put(tree, self._devices[to])

    def receive(self, worker: int, message: Message, microbatch: int) -> Tree:
        """Take a message that was sent to `worker`."""
        return self._mailbox.pop((worker, message, microbatch))


def rows(batch: Tree, start: int, stop: int) -> Tree:
    """Rows start .. stop - 1 of every array of a batch, copied: `device_put` reads late, and the caller may overwrite its batch at once."""
    return jax.tree.map(lambda leaf: leaf[start:stop].copy(), batch)


def to_host(batch: Tree) -> Tree:
    """The batch as NumPy arrays (no copy where they are already)."""
    return jax.tree.map(np.asarray, batch)
