"""Devices and ports that differ from the others of a topology: slower devices, other memory, a host with a slower link."""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from jpipe import InputError
from jpipe_planner.machine.device import Device
from jpipe_planner.machine.targets import Host, find_target
from jpipe_planner.machine.units import Bandwidth, Data, Positive, Possible, in_unit

MOST = 2**14  # the most devices in an entry
MOST_ENTRIES = 256
_EQUAL = 1.02  # up to this ratio between the speed-ups in two dtypes, a device counts as equally faster in all dtypes


def _numbers(value: Any) -> Any:
    """Read a number, a list of numbers, or text with ranges, such as `0, 8-11`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if not isinstance(value, str):
        return value
    numbers = list[int]()
    for part in value.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,7})\s*(?:-\s*([0-9]{1,7})\s*)?", part)
        if match is None:
            raise ValueError(f"expected numbers of devices, such as 3 or 8-11, found {value!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < MOST or len(numbers) > MOST:
            raise ValueError(f"expected a range from its first to its last device, below {MOST:,}, found {part.strip()!r}")
        numbers += range(first, last + 1)
    return tuple(numbers)


class Differing(Data):
    """Devices that differ from `Topology.device` in the given fields.

    Attributes:
        devices: the numbers of the devices, counted from 0: a number, text such as `8-11`, or a list.
        name: a name to show; by default the name of the target.
        target: a name in the table of `jpipe target`, or a YAML file of the same format. It gives memory, reserved bytes and speed.
        speed: the speed relative to the other devices, such as 0.5 for half as fast. The default is 1. With a target, it is the ratio of
            `flops` times `efficiency` of both devices.
        memory: bytes.
        reserved: bytes that a plan leaves free.
        bandwidth: bytes per second of their ports, by the name or number of the level (0 is the innermost). A component of a level has one
            port for all its devices.
        host: the memory of their hosts and the link to it. Missing fields are as for the other devices.
    """

    devices: Annotated[tuple[Annotated[int, Field(ge=0, lt=MOST, strict=True)], ...], BeforeValidator(_numbers), Field(min_length=1)]
    name: str = ""
    target: str | None = None
    speed: Annotated[float, Field(ge=1e-3, le=1e3, allow_inf_nan=False)] | None = None
    memory: Annotated[float, in_unit("bytes"), Positive, Possible] | None = None
    reserved: Annotated[float, in_unit("bytes"), Field(ge=0, le=1e15)] | None = None
    bandwidth: dict[Annotated[str, BeforeValidator(str)], Bandwidth] = Field(default_factory=dict)  # in YAML a key may be a number
    host: Host | None = None

    @field_validator("target")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        _ = name is None or find_target(name)
        return name

    def device(self, usual: Device) -> Device:
        """Return the figures of these devices; `usual` has the figures of the other devices."""
        figures = usual if self.target is None else Device(target=self.target)
        name = self.name or (figures.name + ("" if self.target or self.speed in (None, 1) else f" at {self.speed:g}"))
        of_host = {} if self.host is None else {given: getattr(self.host, given) for given in self.host.model_fields_set}
        update: dict[str, Any] = {"name": name, "host": figures.host.model_copy(update=of_host)}
        update |= {} if self.memory is None else {"memory": self.memory}
        update |= {} if self.reserved is None else {"reserved": {"reserved": self.reserved}}
        return figures.model_copy(update=update)

    def relative_speed(self, usual: Device, place: str = "") -> float:
        """Return the speed relative to the usual device. Raise InputError if it does not follow from the figures of both devices."""
        if self.speed is not None or self.target is None:
            return self.speed or 1.0
        target = find_target(self.target)
        ratios = [
            target.flops[dtype] * target.efficiency / (rate * usual.efficiency)
            for dtype, rate in usual.flops.items()
            if dtype in target.flops
        ]
        if not ratios or max(ratios) > _EQUAL * min(ratios):
            why = "the ratio of their flops is not the same for all dtypes" if ratios else "their flops have no dtype in common"
            found = f"ratios from {min(ratios):.3g} to {max(ratios):.3g}" if ratios else "no speed"
            expected = f"the speed relative to {usual.name}, because {why}"
            raise InputError(where=f"{place}speed", expected=expected, found=found, change="set speed")
        return min(ratios)

    def check(self, place: str, usual: Device, sizes: Sequence[int], level_number: Callable[[str, str], int]) -> None:
        """Check that the devices are in the topology, and that their figures fit together. Raise InputError if not.

        `sizes` has the number of devices in a component of each level, `place` begins the names of keys in messages, such as
        `differing.0.`, and `level_number` returns the number of a level from its name and `place`.
        """
        count = sizes[-1]
        if max(self.devices) >= count:
            expected, change = f"numbers from 0 to {count - 1}", f"levels have {count:,} devices"
            raise InputError(where=f"{place}devices", expected=expected, found=max(self.devices), change=change)
        if (usual.memory is None) != (self.device(usual).memory is None):
            missing = "device.memory" if usual.memory is None else "memory"
            expected = "the memory of all devices, or of none"
            raise InputError(where=f"{place}memory", expected=expected, found=f"none for {missing}", change="add it")
        if (limit := self.device(usual).limit) is not None and limit <= 0:
            raise InputError(where=f"{place}reserved", expected="less than the memory", found=f"{-limit:,.0f} bytes more")
        self.relative_speed(usual, place)
        numbers = set(self.devices)
        for name in self.bandwidth:
            size = (1, *sizes)[level_number(name, place)]
            for first in sorted({number // size * size for number in numbers}):
                if not numbers.issuperset(range(first, first + size)):
                    found = next(number for number in self.devices if number // size * size == first)
                    raise InputError(
                        where=f"{place}bandwidth.{name}",
                        expected=f"whole components of {size} devices, which share a port",
                        found=f"device {found} without all of {first}-{first + size - 1}",
                        change="name them all",
                    )
