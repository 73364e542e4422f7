"""Timing of a transfer and a sum by the transport of a pipeline, alone and while a computation runs."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.meshes._place import Place
from jpipe.programs._instructions import AllReduce, Receive, Send
from jpipe.runtime._join import join_processes
from jpipe.runtime._transport import Sent, Transport, arrived

Tree = Any
Moved = Literal["transfer", "sum"]

ROUNDS = 7
_LONGER = 3  # the computation takes this many times as long as the transfer, because transferring threads may have to share a core
_ELEMENTS = 2**20  # float32 elements of a message, 4 MB
_MOST_CALLS = 1000
_numbers = itertools.count()


class OverlapTimes(NamedTuple):
    """The times of a computation, of a transfer or sum, and of both at once: medians, in seconds.

    Attributes:
        computation: the time of the computation alone.
        moved: the time of a transfer to the last device and back, or of a sum over all devices, alone.
        both: the time until both have ended, if the transfer or sum is begun right before the computation, as in a run.
    """

    computation: float
    moved: float
    both: float

    @property
    def hidden(self) -> float:
        """The share of the shorter time that the longer one hides: 1 if both together take the longer time, 0 if the times add up."""
        shorter = min(self.computation, self.moved)
        return min(max((self.computation + self.moved - self.both) / shorter, 0.0), 1.0) if shorter > 0 else 0.0


def time_overlap(devices: Sequence[jax.Device] | None = None, elements: int = _ELEMENTS) -> Mapping[Moved, OverlapTimes] | None:
    """Time a transfer and a sum between devices, alone and while the first device computes. All processes call it.

    The devices are the first device of each process, or two devices if there is only one process. Arrays move as between the stages and
    replicas of a pipeline: copies from the first device to the next ones and back. On CPUs the computation runs on one core.

    Args:
        devices: the devices of the run; by default all.
        elements: the number of float32 elements to move; by default 2^20, which are 4 MB.

    Returns:
        The times of "transfer" and "sum"; None in processes without the first device, and if there is only one device.
    """
    devices = jax.devices() if devices is None else list(devices)
    first = {device.process_index: device for device in reversed(devices)}
    ends = [first[process] for process in sorted(first)] if len(first) > 1 else devices[:2]
    if len(ends) < 2:
        return None
    moves = _Moves(ends, elements)
    if not moves.local:
        return None
    moving: dict[Moved, Callable[[], Tree]] = {"transfer": moves.transfer, "sum": moves.sum}
    if 0 not in moves.local:
        for move in moving.values():
            for _ in range(2 * ROUNDS + 2):
                _seconds(move)
        return None
    return {name: _times(move, ends[0]) for name, move in moving.items()}


def _times(move: Callable[[], Tree], device: jax.Device) -> OverlapTimes:
    """Time the transfer or sum that `move` begins, alone and before a computation. `move` is called 2 × `ROUNDS` + 2 times."""
    compute, start = _computation(device)

    def work(calls: int) -> jax.Array:
        x = start
        for _ in range(calls):
            x = compute(x)
        return x

    _seconds(lambda: (move(), work(2)))
    seconds = min(_seconds(lambda: work(10)) for _ in range(2)) / 10
    calls = min(max(round(_LONGER * _seconds(move) / max(seconds, 1e-9)), 1), _MOST_CALLS)
    rounds = list[tuple[float, ...]]()
    for _ in range(ROUNDS):
        alone = _seconds(lambda: work(calls)), _seconds(move)
        begin = time.perf_counter()
        moved, computed = move(), work(calls)
        jax.block_until_ready((jax.tree.map(arrived, moved), computed))
        rounds.append((*alone, time.perf_counter() - begin))
    return OverlapTimes(*(statistics.median(times) for times in zip(*rounds, strict=True)))


def _seconds(begin: Callable[[], Tree]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(jax.tree.map(arrived, begin()))
    return time.perf_counter() - start


def _computation(device: jax.Device) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """Return a jitted computation that takes a fraction of a millisecond, and its first argument."""
    if device.platform == "cpu":
        steps = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda _, y: y * 0.999 + 0.001, x))
        return steps, jax.device_put(np.ones(64, np.float32), device)
    return jax.jit(lambda x: x @ x * 1e-3), jax.device_put(np.ones((2048, 2048), np.float32), device)


def _same(total: jax.Array) -> jax.Array:
    return total


class _Moves:
    """Transfers and sums like a pipeline's, with one worker on each of some devices.

    For transfers the workers are consecutive stages, for sums they are replicas of a stage.

    Attributes:
        local: the workers of this process.
    """

    def __init__(self, devices: Sequence[jax.Device], elements: int) -> None:
        places = [Place((device,)) for device in devices]
        self.local, self._last = [w for w, place in enumerate(places) if place.process_index == jax.process_index()], len(places) - 1
        array = jax.ShapeDtypeStruct((elements,), np.float32)
        specs = [place.specs(array) for place in places]
        self._transport = Transport(places, [range(len(places))], join_processes())
        there = [Sent(Send(w, 0, "activation", w + 1), 0, specs[w], specs[w + 1]) for w in range(self._last)]
        back = [Sent(Send(w + 1, 0, "gradient", w), 0, specs[w + 1], specs[w]) for w in range(self._last)]
        self._transport.compile([*there, *back], [(0, specs[0])], {})
        self._transport.connect(f"overlap {next(_numbers)}")
        self._arrays = {w: jax.device_put(np.ones(array.shape, array.dtype), devices[w]) for w in self.local}
        self._batches = itertools.count()
        self._add, self._finish = jax.jit(jnp.add), None if not self.local else jax.jit(_same).lower(specs[self.local[0]]).compile()

    def transfer(self) -> Tree:
        """Begin to send an array from the first device to the last one and back; return the result, or None without the first device."""
        array = self._arrays.get(0)
        for w in range(self._last):
            array = self._hop(w, w + 1, "activation", array)
        for w in range(self._last, 0, -1):
            array = self._hop(w, w - 1, "gradient", array)
        return array if 0 in self.local else None

    def _hop(self, source: int, to: int, message: str, array: Tree) -> Tree:
        """Do this process's part of a hop between two devices. Return the received array, or `array` if it receives none."""
        if source in self.local:
            self._transport.send(Send(source, 0, message, to), 0, arrived(array))
        return self._transport.receive(Receive(to, 0, message, source), 0) if to in self.local else array

    def sum(self) -> Tree:
        """Begin to sum an array over all devices, and return the sums on this process's devices."""
        batch, sums = next(self._batches), dict[int, Tree]()
        assert self._finish is not None
        for w in self.local:
            sums |= self._transport.all_reduce(AllReduce(w, batch), batch, self._arrays[w], self._add, self._finish)
        return list(sums.values())
