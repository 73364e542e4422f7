"""The speed, memory and links of a stage if the devices of a topology differ.

A stage computes as fast as its slowest device, because its replicas take turns with the microbatches. On each device it may use only as
many bytes as its smallest device has. Its sums and messages take as long as over the slowest port of its devices.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import jpipe
from jpipe_planner.machine.topology import Topology

__all__ = ["DeviceRanges", "Kind"]

TIMES = ("forward", "backward", "backward_input", "backward_weight", "update")  # the fields of a stage's costs that are seconds


class Kind(NamedTuple):
    """The properties of a range of devices.

    Attributes:
        link: the slowest link of all levels that the range crosses.
        slowness: the time of its slowest device, divided by the time in the profile.
        share: the memory of its smallest device, divided by the memory of the usual device.
    """

    link: jpipe.Link = jpipe.Link()
    slowness: float = 1.0
    share: float = 1.0


class DeviceRanges:
    """The kinds of all ranges of the devices of a topology."""

    def __init__(self, topology: Topology) -> None:
        limits, first = topology.limits, np.arange(topology.num_devices - 1)
        self._slowness = topology.slowness
        self._shares: Any = np.ones(len(limits)) if topology.device.limit is None else limits / topology.device.limit
        # The slowest link of a range is the slowest link between two neighbouring devices of the range.
        self._bandwidths: Any = np.full(len(first), np.inf)
        self._latencies: Any = np.zeros(len(first))
        for k, (level, inside) in enumerate(zip(topology.levels, (1, *topology.sizes), strict=False)):
            is_crossed = first // inside != (first + 1) // inside  # this level, between a device and the next one
            if level.count > 1:
                ports, crossing = topology.ports(k), first[is_crossed]
                slowest = np.minimum(ports[crossing // inside], ports[(crossing + 1) // inside])
                self._bandwidths[is_crossed] = np.minimum(self._bandwidths[is_crossed], slowest)
                self._latencies[is_crossed] = np.maximum(self._latencies[is_crossed], level.latency)

    def kind(self, first: int, last: int) -> Kind:
        """Return the kind of the range of devices first .. last."""
        inside, devices = slice(first, last), slice(first, last + 1)
        link = jpipe.Link(float(self._bandwidths[inside].min(initial=np.inf)), float(self._latencies[inside].max(initial=0.0)))
        return Kind(link, float(self._slowness[devices].max()), float(self._shares[devices].min()))


def device_numbers(plan: jpipe.Plan) -> tuple[int, ...]:
    """Return the number of each rank's device, or mesh, as `jpipe.Pipeline` places them on as many devices as there are ranks."""
    if plan.placement is not None:
        size = plan.stages[0].devices_each
        return tuple(number // size for rank in plan.placement for number in rank)
    return tuple(int(number) for number in np.argsort(plan.placing_order))


def network(plan: jpipe.Plan, topology: Topology) -> jpipe.programs.Network:
    """Return a function that gives the link between any two ranks of a plan, where the plan places them."""
    devices = device_numbers(plan)

    def link(source: int, target: int) -> jpipe.Link:
        return topology.link(devices[source], devices[target])

    return cache(link) if topology.differing else link


def _of_ranks(plan: jpipe.Plan) -> list[list[int]]:
    """Return the devices of the replicas of each pipeline rank."""
    numbers, devices = device_numbers(plan), list[list[int]]([] for _ in plan.pipeline_ranks)
    for (p, _), number in zip(plan.rank_positions, numbers, strict=True):
        devices[p].append(number)
    return devices


def slowness_of(plan: jpipe.Plan, topology: Topology) -> tuple[float, ...]:
    """Return for each stage of a plan the time of its slowest device, divided by the time in the profile."""
    slowness, of_ranks = topology.slowness, zip(plan.pipeline_ranks, _of_ranks(plan), strict=True)
    of_stages = {s: float(slowness[devices].max()) for stages, devices in of_ranks for s in stages}
    return tuple(of_stages[s] for s in range(plan.depth))


def slowed(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], topology: Topology) -> Sequence[jpipe.programs.StageCost]:
    """Return the costs of the stages of a plan on their devices. Each stage is as slow as its slowest device."""
    if not topology.differing:
        return costs

    def slower(cost: jpipe.programs.StageCost, factor: float) -> jpipe.programs.StageCost:
        times = {name: factor * getattr(cost, name) for name in TIMES}
        return dataclasses.replace(cost, **times, by_slice=tuple(slower(each, factor) for each in cost.by_slice))

    return [*map(slower, costs, slowness_of(plan, topology))]


def host_limits_of(plan: jpipe.Plan, topology: Topology) -> tuple[float, ...]:
    """Return the bytes of host memory that each pipeline rank may use for each of its devices; infinity: not limited."""
    limits = [device.host.limit for device in topology.devices]
    return tuple(min(limits[number] for number in devices) for devices in _of_ranks(plan))


def limits_of(plan: jpipe.Plan, topology: Topology) -> tuple[float, ...]:
    """Return for each pipeline rank the bytes that it may use on each of its devices; infinity: not limited."""
    limits = topology.limits
    return tuple(float(limits[devices].min()) for devices in _of_ranks(plan))


def lacking(memory: Sequence[float], limits: Sequence[float]) -> tuple[int, float]:
    """Return the pipeline rank that lacks the most memory, and how many bytes it lacks: 0 or less if all ranks fit."""
    lacks = [size - limit for size, limit in zip(memory, limits, strict=True)]
    worst = max(range(len(lacks)), key=lacks.__getitem__)
    return worst, lacks[worst]


def kinds_of(plan: jpipe.Plan, topology: Topology) -> tuple[str, ...]:
    """Return the names of the devices of each pipeline rank, such as `2 × A100, V100`; empty if all devices are equal."""
    return tuple(map(_counted, _names(plan, topology)))


def order_of(plan: jpipe.Plan, topology: Topology) -> str:
    """Return the names of the devices in the order of the pipeline ranks, such as `8 × A100, 4 × V100`; "" if all devices are equal."""
    return _counted([name for names in _names(plan, topology) for name in names])


def _names(plan: jpipe.Plan, topology: Topology) -> list[list[str]]:
    """Return the names of the devices of each pipeline rank; empty if all devices are equal."""
    if not topology.differing:
        return []
    size = plan.stages[0].devices_each
    names = ["".join(c if c.isprintable() else "?" for c in device.name) for device in topology.devices]
    return [[names[number] for number in numbers for _ in range(size)] for numbers in _of_ranks(plan)]


def _counted(names: Sequence[str]) -> str:
    """Return names as text. Equal names in a row are counted, as in `2 × A100, V100`."""
    counts = [(name, len(list(same))) for name, same in itertools.groupby(names)]
    return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in counts)
