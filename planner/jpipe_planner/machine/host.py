"""The memory of the host as a device uses it, for what waits there (`jpipe.plan.HostMemory`), and the link to it."""

import math
from typing import Annotated

from pydantic import BeforeValidator, Field

import jpipe
from jpipe_planner.machine.units import Data, Positive, Possible, in_unit, seconds


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
        """The link; each direction carries one move at a time."""
        return jpipe.Link(self.bandwidth, self.latency)

    @property
    def limit(self) -> float:
        """The bytes that a plan may use for each device; infinity: not limited."""
        return math.inf if self.memory is None else self.memory

    def changed_by(self, other: "Host | None") -> "Host":
        """Return a copy with the figures that were given to another one."""
        given = () if other is None else other.model_fields_set
        return self.model_copy(update={name: getattr(other, name) for name in given})
