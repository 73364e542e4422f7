"""Numbers that one process computes and all may read, without anyone waiting before it asks."""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jpipe._processes import PeerLost, Processes


class Told:
    """A number that some process computes: `float(…)` of it waits until that process has told it. The same bits in all processes."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def __float__(self) -> float:
        return self._read()

    def __repr__(self) -> str:
        return "Told(…)"


def tell(processes: Processes, name: str, numbers: Callable[[], Sequence[jax.Array]]) -> None:
    """Tell the numbers, which a thread of its own asks for and waits for, to all processes; returns at once."""

    def work() -> None:
        with contextlib.suppress(PeerLost):  # the main thread is told of it
            processes.tell(name, [float(number) for number in numbers()])

    threading.Thread(target=work, daemon=True).start()


def told(processes: Processes, name: str, on: int, count: int) -> tuple[Told, ...]:
    """The numbers that process `on` tells under this name."""
    read = functools.cache(lambda: processes.told(name, on))
    return tuple(Told(lambda i=i: read()[i]) for i in range(count))  # type: ignore[misc]  # mypy takes i for an argument


def told_mean(
    processes: Processes,
    names: Sequence[tuple[str, int]],
    mean: Callable[[list[tuple[np.ndarray, np.ndarray]]], tuple[jax.Array, jax.Array]],
) -> tuple[Told, Told]:
    """(mean, total weight) of what several workers tell.

    Args:
        processes: of the run.
        names: for each worker what it tells under, and its process; it tells (sum, weight) of every so-manyeth microbatch.
        mean: of (sum, weight) of all microbatches, in their order.
    """

    @functools.cache
    def read() -> tuple[float, float]:
        rows = [np.array(processes.told(name, on), jax.dtypes.canonicalize_dtype(np.float64)).reshape(-1, 2) for name, on in names]
        count = sum(len(row) for row in rows)
        parts = [rows[k % len(rows)][k // len(rows)] for k in range(count)]
        loss, weight = mean([(part[0], part[1]) for part in parts])
        return float(loss), float(weight)

    return Told(lambda: read()[0]), Told(lambda: read()[1])
