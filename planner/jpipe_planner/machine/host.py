"""The memory of the host as a device uses it, for what waits there (`jpipe.plan.HostMemory`), and the link to it."""

import math
import statistics
import time
from typing import Annotated

import jax
import numpy as np
from pydantic import BeforeValidator, Field

import jpipe
from jpipe_planner.machine.units import Data, Positive, Possible, in_unit, seconds

_KIND = "pinned_host"
_SMALL, _LARGE = 1, 2**22  # elements of float32 in an array that is moved: 4 bytes, 17 MB
_ROUNDS = 7


class Host(Data):
    """The memory of the host of a device, and the link to it.

    Attributes:
        bandwidth: bytes per second from the device to host memory, and as many back at the same time. By default half of what 16 lanes of
            PCIe 3.0 carry, because two devices may share them.
        latency: seconds until what is moved is there.
        memory: bytes of it that a plan may use for each device; 0: nothing can be moved there. None: not limited.
    """

    bandwidth: Annotated[float, in_unit("bytes per second"), Positive, Possible] = 8e9
    latency: Annotated[float, BeforeValidator(seconds), Field(ge=0, le=1e9, allow_inf_nan=False)] = 1e-5
    memory: Annotated[float, in_unit("bytes"), Field(ge=0, le=1e30)] | None = None

    @property
    def link(self) -> jpipe.Link:
        """The link, each direction of which carries one move at a time."""
        return jpipe.Link(self.bandwidth, self.latency)

    @property
    def limit(self) -> float:
        """The bytes that a plan may use for each device; infinity: not limited."""
        return math.inf if self.memory is None else self.memory

    def changed_by(self, other: "Host | None") -> "Host":
        """Return the same with the figures that another one was given."""
        given = () if other is None else other.model_fields_set
        return self.model_copy(update={name: getattr(other, name) for name in given})


def measured_host(device: jax.Device, memory: float | None) -> Host:
    """Measure the link of a device of this process to the memory of its host, in the slower direction.

    Args:
        device: the device.
        memory: bytes of host memory that a plan may use for it; None: not known.

    Returns:
        The figures; of a device that has no memory of the kind `pinned_host` the default ones, and no memory.
    """
    if _KIND not in {each.kind for each in device.addressable_memories()}:
        return Host(memory=0)
    at_device, at_host = (jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in (device.default_memory().kind, _KIND))

    def times(elements: int) -> list[float]:
        """Return the median seconds in each direction."""
        x, rounds = jax.device_put(np.ones(elements, np.float32), at_device).block_until_ready(), list[tuple[float, float]]()
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            moved = jax.device_put(x, at_host).block_until_ready()
            there = time.perf_counter()
            x = jax.device_put(moved, at_device).block_until_ready()
            rounds.append((there - began, time.perf_counter() - there))
        return [statistics.median(direction) for direction in zip(*rounds, strict=True)]

    small, large = times(_SMALL), times(_LARGE)
    slower = max(more - less for less, more in zip(small, large, strict=True))
    return Host(bandwidth=4 * (_LARGE - _SMALL) / max(slower, 1e-6), latency=max(small), memory=memory)
