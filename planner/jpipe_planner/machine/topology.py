"""Topologies: devices that are joined by levels of links, with the fastest links innermost, and the figures of the devices."""

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from pydantic import BeforeValidator, Field

import jpipe
from jpipe import InputError, files
from jpipe_planner.machine.device import Device
from jpipe_planner.machine.differing import MOST_ENTRIES, Differing
from jpipe_planner.machine.plain_yaml import parse
from jpipe_planner.machine.units import Bandwidth, Data, seconds

FORMAT = "jpipe-topology/1"


class Level(Data):
    """A level of a topology: its links join components of the next inner level; at the innermost level, these are single devices.

    Attributes:
        count: the number of components that the links join.
        bandwidth: bytes per second that a component's devices together can send to other components, and receive at the same time; a
            number, or text such as `25 Gbit/s`.
        latency: seconds until a message arrives; a number, or text such as `5 us`.
        name: a name to show, such as `NVLink` or `Ethernet`.
    """

    count: Annotated[int, Field(ge=1, le=2**20, strict=True)]
    bandwidth: Bandwidth
    latency: Annotated[float, BeforeValidator(seconds), Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    name: str = ""


class Topology(Data):
    """The machines to plan for: their devices, and the levels of links that join them.

    Neighbouring numbers are in the same component: devices 0 .. levels[0].count - 1 are joined by the innermost level.

    Attributes:
        format: "jpipe-topology/1".
        name: a name to show.
        levels: the levels, the innermost first, as in figure 7 of PipeDream (SOSP 2019); at least one.
        device: the figures of each device; profiles are for this device.
        differing: devices and ports that differ from the others. If several entries name a device, the last one counts. By default all
            devices are equal, and so are all links of a level.
        cores: the number of devices that can compute at the same time without slowing each other down, if they share the cores of a CPU. If
            more devices compute, they share the cores evenly. None: all devices.

    Raises:
        InputError: a field is invalid; the message says what was expected.
    """

    format: Literal["jpipe-topology/1"] = "jpipe-topology/1"
    name: str = ""
    levels: Annotated[tuple[Level, ...], Field(min_length=1)]
    device: Device = Device()
    differing: Annotated[tuple[Differing, ...], Field(max_length=MOST_ENTRIES)] = ()
    cores: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except pydantic.ValidationError as error:
            raise jpipe.errors.explain(error, Topology, "topology") from None

    @pydantic.model_validator(mode="after")
    def _countable(self) -> "Topology":
        if self.num_devices > 2**20:
            raise ValueError(f"levels: expected at most {2**20:,} devices in all, found {self.num_devices:,}")
        for n, one in enumerate(self.differing):
            one.check(f"differing.{n}.", self.device, self.sizes, self.level_number)
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """For each level, the innermost first, the number of devices that it and the levels inside it join."""
        return tuple(math.prod(level.count for level in self.levels[: k + 1]) for k in range(len(self.levels)))

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return math.prod(level.count for level in self.levels)

    def level(self, first: int, last: int) -> int:
        """Return the number of the highest level that a message between two devices crosses: 0 is the innermost; -1 if they are equal."""
        if first == last:
            return -1
        for k, level in enumerate(self.levels):
            first, last = first // level.count, last // level.count
            if first == last:
                return k
        raise IndexError(f"there are {self.num_devices} devices")

    def link(self, source: int, target: int) -> jpipe.Link:
        """Return the link from one device to another; the devices of a component share its ports."""
        k = self.level(source, target)
        inside = self.sizes[k - 1] if k > 0 else 1
        bandwidth = self.levels[k].bandwidth
        if self.differing:
            bandwidth = float(self.ports(k)[[source // inside, target // inside]].min())
        return _link(bandwidth, self.levels[k].latency, k, source // inside, target // inside)

    def level_number(self, name: str, place: str = "") -> int:
        """Return the number of the level with this name or number; 0 is the innermost. Raise InputError if there is not one."""
        names = [level.name for level in self.levels]
        if names.count(name) == 1:
            return names.index(name)
        if name in map(str, range(len(names))):
            return int(name)
        known = ", ".join(known for known in names if known and names.count(known) == 1)
        numbers = f"a number from 0 to {len(names) - 1}"
        expected = f"the name of a level, {f'{known}, or ' if known else ''}{numbers}"
        raise InputError(where=f"{place}bandwidth", expected=expected, found=f"'{name}'")

    @property
    def devices(self) -> list[Device]:
        """The figures of each device."""
        devices = [self.device] * self.num_devices
        for one in self.differing:
            figures = one.device(self.device)
            for number in one.devices:
                devices[number] = figures
        return devices

    @property
    def slowness(self) -> Any:
        """An array with the time of each device, divided by the time in the profile."""
        slowness = np.ones(self.num_devices)
        for one in self.differing:
            slowness[list(one.devices)] = 1 / one.relative_speed(self.device)
        return slowness

    @property
    def limits(self) -> Any:
        """An array with the bytes that a plan may use on each device; infinity: not limited."""
        limits = np.full(self.num_devices, math.inf if self.device.limit is None else self.device.limit)
        for one in self.differing:
            limit = one.device(self.device).limit
            limits[list(one.devices)] = math.inf if limit is None else limit
        return limits

    def ports(self, k: int) -> Any:
        """Return an array with the bandwidth of the port of each component that level k joins."""
        inside = self.sizes[k - 1] if k > 0 else 1
        ports = np.full(self.num_devices // inside, self.levels[k].bandwidth)
        for one in self.differing:
            for name, bandwidth in one.bandwidth.items():
                if self.level_number(name) == k:
                    ports[[number // inside for number in one.devices]] = bandwidth
        return ports

    def orders(self) -> list[tuple[int, ...]]:
        """Return orders of the devices to try: as numbered, and in each component the fastest (then the largest) first or last."""
        figures = list(zip((-self.slowness).tolist(), self.limits.tolist(), strict=True))
        found = [tuple(range(self.num_devices))]
        for sign in (-1, 1) if self.differing else ():
            blocks = [[number] for number in range(self.num_devices)]
            for level in self.levels:
                groups = [blocks[start : start + level.count] for start in range(0, len(blocks), level.count)]
                key = {
                    id(block): tuple(sign * sum(figures[n][part] for n in block) for part in (0, 1)) for group in groups for block in group
                }
                blocks = [[number for block in sorted(group, key=lambda block: key[id(block)]) for number in block] for group in groups]
            found.append(tuple(blocks[0]))
        return list(dict.fromkeys(found))

    def ordered(self, order: Sequence[int] | None) -> "Topology":
        """Return the topology with the devices numbered in another order, one of `orders`; None: as they are."""
        if order is None:
            return self
        places = np.argsort(order)
        differing = [one.model_copy(update={"devices": tuple(sorted(places[list(one.devices)].tolist()))}) for one in self.differing]
        return self.model_copy(update={"differing": tuple(differing)})

    @property
    def most_in_mesh(self) -> int:
        """The number of devices that the innermost level joins, for example in a server: the size of the largest mesh tried by default."""
        return self.levels[0].count

    def can_group(self, size: int) -> bool:
        """Return whether meshes of `size` neighbouring devices fill the machine evenly, and the devices of each mesh are equal."""
        return self._joined(size) is not None

    def groups(self, size: int) -> "Topology":
        """Return the topology in which each mesh of `size` neighbouring devices counts as one device. The devices of a mesh are equal.

        Each bandwidth is divided by the devices of a mesh.

        Args:
            size: the number of devices of a mesh, which fills whole components of each level, or divides them evenly.

        Raises:
            InputError: meshes of `size` devices do not fill the machine evenly.
        """
        joined = self._joined(size)
        if joined is None:
            sizes = ", ".join(str(n) for n in range(1, self.num_devices + 1) if self.can_group(n))
            raise InputError(where="mesh", expected=f"meshes that fill the machine evenly, of {sizes} devices", found=f"one of {size}")
        levels = []
        for level, count, inside in zip(self.levels, joined, (1, *self.sizes), strict=False):
            shared = {"count": level.count // count, "bandwidth": level.bandwidth / min(size, inside)}
            levels.append(level.model_copy(update=shared))
        cores = None if self.cores is None else max(self.cores / size, 1.0)
        differing = tuple(
            one.model_copy(
                update={
                    "devices": tuple(sorted({number // size for number in one.devices})),
                    "bandwidth": {
                        name: value / min(size, (1, *self.sizes)[self.level_number(name)]) for name, value in one.bandwidth.items()
                    },
                }
            )
            for one in self.differing
        )
        return self.model_copy(update={"levels": tuple(levels), "cores": cores, "differing": differing})

    def mesh_link(self, size: int) -> jpipe.Link:
        """Return the slowest link inside a mesh of `size` devices, as each device's share while all of them send."""
        crossed = range(self.level(0, size - 1) + 1)
        slowest = [float(self.ports(k).min()) if self.differing else level.bandwidth for k, level in enumerate(self.levels)]
        bandwidths = [slowest[k] / (self.sizes[k - 1] if k else 1) for k in crossed if self.levels[k].count > 1]
        return jpipe.Link(min(bandwidths, default=math.inf), max((self.levels[k].latency for k in crossed), default=0.0))

    def _joined(self, size: int) -> tuple[int, ...] | None:
        """Return how many components of each level a mesh joins; None if it does not fill or divide them, or has unequal devices."""
        joined, whole = [], size
        for level in self.levels:
            count = math.gcd(level.count, size)
            if count < min(level.count, size):
                return None
            joined.append(count)
            size //= count
        uneven = any(len({number // whole for number in one.devices}) * whole != len(set(one.devices)) for one in self.differing)
        return tuple(joined) if size == 1 and not uneven else None

    @classmethod
    def flat(cls, count: int, bandwidth: float, latency: float = 0.0, memory: float | None = None) -> "Topology":
        """Return a topology of `count` devices with links between all of them."""
        return cls(levels=({"count": count, "bandwidth": bandwidth, "latency": latency},), device={"memory": memory})

    @classmethod
    def from_yaml(cls, text: str, where: str = "topology", folder: Path | None = None) -> "Topology":
        """Read a topology from YAML.

        Args:
            text: YAML, as in `configs/topologies/`.
            where: the source, such as a file name, for error messages.
            folder: the folder of target files that devices name; by default the current folder.

        Raises:
            InputError: the text is not YAML (with line and column), not a topology, or has impossible numbers.
        """
        data = parse(text, where)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            actual = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise InputError(f"{where}: expected YAML with 'format: {FORMAT}', found {actual!r}; is this a topology of jpipe?")
        differing = data.get("differing")
        for device in (data.get("device"), *(differing if isinstance(differing, list) else ())):
            if folder is not None and isinstance(device, dict) and str(device.get("target")).endswith((".yaml", ".yml")):
                device["target"] = str(folder / files.expanded(device["target"], f"{where}: device.target"))
        try:
            return cls(**{str(key): value for key, value in data.items()})
        except InputError as error:
            raise error.at(where) from None


@lru_cache(maxsize=2**17)
def _link(bandwidth: float, latency: float, level: int, source: int, target: int) -> jpipe.Link:
    """Return the link from one component of a level to another."""
    return jpipe.Link(bandwidth, latency, (("out", level, source), ("in", level, target)))
