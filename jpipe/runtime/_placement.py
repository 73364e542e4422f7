"""The device of each worker, and the placement as text."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jpipe.errors import InputError, short
from jpipe.plan import Plan


def place(plan: Plan, devices: Sequence[jax.Device] | None = None) -> tuple[jax.Device, ...]:
    """The device of each worker, which is that of its rank.

    Args:
        plan: the plan, with `placement` or `keep_together`.
        devices: one for each rank, in their order. None: all devices of all processes, by process; if there are fewer devices than
            ranks, neighbouring ranks share one.

    Raises:
        InputError: the number of devices does not fit (the message lists workers and devices), or they are of different kinds.
    """
    of_ranks = _place_ranks(plan, devices)
    return _one_kind(plan, tuple(of_ranks[rank] for rank in plan.rank_of))


def _place_ranks(plan: Plan, devices: Sequence[jax.Device] | None) -> Sequence[jax.Device]:
    count = len(plan.rank_workers)
    if devices is not None:
        if len(devices) != count:
            each = "stage" if count == plan.depth == len(plan.workers) else "rank"
            raise InputError(f"devices: expected {count}, one for each {each}, found {len(devices)}")
        return devices
    everywhere = _everywhere()
    if plan.placement is not None:
        numbers = [number for ranks in plan.placement for number in ranks]
        if max(numbers) >= len(everywhere):
            found = f"there are {len(everywhere)} devices (0 to {len(everywhere) - 1}); name one of them"
            raise InputError(f"plan: placement names device {max(numbers)}, but {found}", *_both_grids(plan, everywhere))
        return [everywhere[number] for number in numbers]
    processes = jax.process_count()
    if processes > 1 and count < len(everywhere):
        raise InputError(
            f"plan: expected at least as many ranks as devices in a run of {processes} processes, found {count} ranks for "
            f"{len(everywhere)} devices; change stages, replicas or the number of processes, or name the devices in placement",
            *_both_grids(plan, everywhere),
        )
    placed = {rank: everywhere[n * min(len(everywhere), count) // count] for n, rank in enumerate(plan.placing_order)}
    return [placed[rank] for rank in range(count)]


def checked_devices(devices: Any) -> tuple[jax.Device, ...]:
    """The devices that a caller gave.

    Raises:
        InputError: they are not a list of devices.
    """
    if not isinstance(devices, Iterable) or isinstance(devices, str):
        raise InputError(f"devices: expected a list of devices, found {type(devices).__name__}; give some of jax.devices()")
    found = tuple(devices)
    for device in found:
        if not isinstance(device, jax.Device):
            raise InputError(f"devices: expected devices such as jax.devices()[0], found {short(device)}; give some of jax.devices()")
    return found


def placement_grid(plan: Plan, devices: Sequence[jax.Device]) -> str:
    """The placement as text: a row for each stage, a column for each replica, with the numbers of worker (`w`) and process (`p`).

    Devices have the numbers that `placement` uses, counted over all processes.

    Args:
        plan: the plan.
        devices: the device of each worker, from `place`.
    """
    several = len({device.process_index for device in devices}) > 1
    names = device_names(devices)
    cells = [f"w{w} {f'p{device.process_index} ' if several else ''}{names[device]}" for w, device in enumerate(devices)]
    rows = [[cells[w] for w in workers] for workers in plan.stage_workers]
    columns = max(len(row) for row in rows)
    table = [["", *(f"replica {r}" for r in range(columns))], *([f"stage {s}", *row] for s, row in enumerate(rows))]
    widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(columns + 1)]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip() for row in table)


def _everywhere() -> list[jax.Device]:
    """All devices of all processes, in the order in which `placement` counts them."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def device_names(devices: Sequence[jax.Device]) -> dict[jax.Device, str]:
    """Platform and number of each device. JAX's own numbers have gaps on CPUs: 2048 is the first of the second process."""
    numbers = {device: number for number, device in enumerate(_everywhere())}
    return {device: f"{device.platform}:{numbers.get(device, device.id)}" for device in devices}


def _one_kind(plan: Plan, devices: tuple[jax.Device, ...]) -> tuple[jax.Device, ...]:
    kinds = {device.device_kind: device for device in reversed(devices)}
    if len(kinds) > 1:
        found = " and ".join(f"'{kind}' (process {device.process_index})" for kind, device in sorted(kinds.items()))
        raise InputError(f"devices: expected devices of one kind, found {found}; run on one kind of device")
    idle = set(range(jax.process_count())) - {device.process_index for device in devices}
    if idle and jax.process_count() > 1:
        raise InputError(
            f"plan: expected a worker in every process, found none in process {min(idle)}; place one there, or start fewer processes",
            *placement_grid(plan, devices).splitlines(),
        )
    return devices


def _both_grids(plan: Plan, devices: Sequence[jax.Device]) -> list[str]:
    """The workers and the devices, as lines of text."""
    workers = [f"  stage {s}: {' '.join(f'w{w}' for w in workers)}" for s, workers in enumerate(plan.stage_workers)]
    of: dict[int, list[str]] = {}
    for device, name in device_names(devices).items():
        of.setdefault(device.process_index, []).append(name)
    return ["workers:", *workers, "devices:", *(f"  process {p}: {' '.join(names)}" for p, names in of.items())]
