"""The devices where each worker computes, and the placement as text."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jpipe._frozen import FrozenMapping
from jpipe.errors import InputError, Problem, short, shortened
from jpipe.meshes._place import Place
from jpipe.plan import Plan


def place(plan: Plan, devices: Sequence[jax.Device] | None = None) -> tuple[Place, ...]:
    """Return where each worker computes (devices and mesh). All workers of a rank share the rank's place.

    Without a `placement` in the plan, `keep_together` decides the order of the ranks. `devices` has one device for each rank, or as many as
    the rank's mesh has. By default it has all devices of all processes, by process; with fewer devices than ranks need, neighbouring ranks
    share devices. Raise InputError if the number of devices is wrong (the message lists workers and devices), the devices are of different
    kinds, or a mesh has devices of several processes.
    """
    sizes = [plan.stages[plan.pipeline_ranks[p][0]].devices_each for p, _ in plan.rank_positions]
    of_ranks = _place_ranks(plan, sizes, devices)
    for devices_of_rank in of_ranks:
        _check_chips(devices_of_rank[:1], len(devices_of_rank))
    _check_apart(plan, of_ranks)
    return _one_kind(
        plan, tuple(Place(of_ranks[rank], plan.stages[s].shape) for rank, (s, _) in zip(plan.rank_of, plan.workers, strict=True))
    )


def place_on(devices: jax.Device | Sequence[jax.Device], mesh: FrozenMapping[int]) -> Place:
    """Return a place to compile for: a mesh on the first of these devices, or, given one device, on local devices of its kind."""
    size = math.prod(mesh.values())
    if not isinstance(devices, jax.Device):
        usable, like, change = list(devices), "", "pass as many devices as the largest mesh has"
    elif not mesh:
        return Place((devices,))
    else:
        usable, like = _local_devices_like(devices), f" like {devices}"
        change = f"on CPUs call jax.config.update('jax_num_cpu_devices', {size}) before JAX is used"
    _check_chips(usable[:1], size)
    if size > len(usable):
        raise InputError(where="costs", expected=f"{size} devices{like} for the mesh {dict(mesh)}", found=len(usable), change=change)
    return Place(tuple(usable[:size]), mesh)


def _check_chips(devices: Sequence[jax.Device], size: int) -> None:
    """Reject meshes of TPU chips if the size is not a power of two: libtpu ends the process when it compiles their collectives."""
    if size & (size - 1) and any(device.platform == "tpu" for device in devices):
        raise InputError(
            where="plan",
            expected="meshes of 2, 4, 8, … TPU chips",
            found=f"a mesh of {size}",
            change="use another size, because libtpu cannot compile collectives over this one",
        )


def _local_devices_like(device: jax.Device) -> list[jax.Device]:
    """Return this process's devices of the same kind, or only the device itself if JAX has no such platform here."""
    try:
        local = jax.local_devices(backend=device.platform)
    except RuntimeError:
        return [device]
    return [other for other in local if other.device_kind == device.device_kind]


def _place_ranks(plan: Plan, sizes: Sequence[int], devices: Sequence[jax.Device] | None) -> list[tuple[jax.Device, ...]]:
    """Return the devices of each rank; `sizes` has the number of devices that each rank needs."""
    if devices is not None:
        if len(devices) != sum(sizes):
            each = "stage" if len(sizes) == plan.depth == len(plan.workers) else "rank"
            per = f"one for each {each}" if max(sizes) == 1 else f"{shortened([str(size) for size in sizes])} for the meshes of the {each}s"
            raise InputError(where="devices", expected=f"{sum(sizes)}, {per}", found=len(devices))
        remaining = iter(devices)
        return [tuple(itertools.islice(remaining, size)) for size in sizes]
    everywhere = _everywhere()
    if plan.placement is not None:
        firsts = [number for ranks in plan.placement for number in ranks]
        last, first = max((first + size - 1, first) for first, size in zip(firsts, sizes, strict=True))
        if last >= len(everywhere):
            actual = f"there are only {len(everywhere)} (0 to {len(everywhere) - 1})"
            needs = f"it names device {last}" if last == first else f"the mesh that begins at device {first} needs devices up to {last}"
            change = "choose one of these" if last == first else "choose another first device"
            problem = Problem(f"{needs}, but {actual}", "plan", "placement", change=change)
            raise InputError(problem, *_both_grids(plan, everywhere))
        return [tuple(everywhere[first : first + size]) for first, size in zip(firsts, sizes, strict=True)]
    return _place_in_order(plan, sizes, everywhere)


def _place_in_order(plan: Plan, sizes: Sequence[int], everywhere: Sequence[jax.Device]) -> list[tuple[jax.Device, ...]]:
    """Return the devices of each rank in order, for a plan that names none. With too few devices, neighbouring ranks share them."""
    processes, needed = jax.process_count(), sum(sizes)
    if processes > 1 and needed < len(everywhere):
        meshes = max(sizes) > 1
        expected = f"a plan that uses all {len(everywhere)} devices" if meshes else "at least as many ranks as devices"
        change = "stages, replicas, meshes" if meshes else "stages, replicas"
        problem = Problem(
            where="plan",
            expected=f"{expected} in a run of {processes} processes",
            found=f"a plan for {needed}" if meshes else f"{len(sizes)} ranks for {len(everywhere)} devices",
            change=f"change {change} or the number of processes, or name the devices in placement",
        )
        raise InputError(problem, *_both_grids(plan, everywhere))
    if needed <= len(everywhere):
        starts = dict(zip(plan.placing_order, itertools.accumulate([0, *(sizes[rank] for rank in plan.placing_order)]), strict=False))
        return [tuple(everywhere[starts[rank] : starts[rank] + size]) for rank, size in enumerate(sizes)]
    size, count = max(sizes), len(sizes)
    groups = len(everywhere) // size
    if len(set(sizes)) > 1 or groups == 0:
        problem = Problem(
            where="plan",
            expected=f"{needed} devices for the meshes of its ranks, {shortened([str(size) for size in sizes])}",
            found=str(len(everywhere)),
            change="use smaller meshes or fewer stages: ranks share devices only if all meshes have the same size",
        )
        raise InputError(problem, *_both_grids(plan, everywhere))
    placed = {rank: n * min(groups, count) // count * size for n, rank in enumerate(plan.placing_order)}
    return [tuple(everywhere[placed[rank] : placed[rank] + size]) for rank in range(count)]


def _check_apart(plan: Plan, of_ranks: Sequence[tuple[jax.Device, ...]]) -> None:
    """Reject meshes over several processes, and ranks that share only some of their devices."""
    names = device_names([device for devices in of_ranks for device in devices])
    owner: dict[jax.Device, tuple[jax.Device, ...]] = {}
    for rank, devices in enumerate(of_ranks):
        processes = sorted({device.process_index for device in devices})
        if len(set(devices)) < len(devices):
            shown = ", ".join(names[device] for device in devices)
            raise InputError(f"devices: expected {len(devices)} different devices for the mesh of rank {rank}, found {shown}")
        if len(processes) > 1:
            shown = ", ".join(f"{names[device]} of process {device.process_index}" for device in devices)
            raise InputError(
                where="plan",
                expected=f"{len(devices)} different devices of one process for the mesh of rank {rank}",
                found=shown,
                change="use a mesh that divides the devices of a process, or another placement; otherwise the stage's collectives would "
                "cross the network in each layer",
            )
        for device in devices:
            if owner.setdefault(device, devices) != devices:
                raise InputError(
                    where="plan",
                    expected="ranks that have all their devices in common, or none",
                    found=f"{names[device]} in two meshes",
                    change="name the first device of each mesh in placement so that they do not overlap",
                )


def checked_devices(devices: Any) -> tuple[jax.Device, ...]:
    """Check that a caller has passed a list of devices, and return it."""
    if not isinstance(devices, Iterable) or isinstance(devices, str):
        raise InputError(where="devices", expected="a list of devices", found=type(devices).__name__, change="give some of jax.devices()")
    checked = tuple(devices)
    for device in checked:
        if not isinstance(device, jax.Device):
            raise InputError(f"devices: expected devices such as jax.devices()[0], found {short(device)}; give some of jax.devices()")
    return checked


def placement_grid(plan: Plan, places: Sequence[Place]) -> str:
    """Return the placement as text: rows are stages, columns are replicas, with the numbers of worker (`w`) and process (`p`).

    Devices are numbered as in `Plan.placement`, over all processes.

    Args:
        plan: the plan.
        places: for each worker where it computes (`Pipeline.places`).
    """
    several = len({place.process_index for place in places}) > 1
    prefixes = [f"p{place.process_index} " if several else "" for place in places]
    cells = [f"w{w} {prefix}{name}" for w, (prefix, name) in enumerate(zip(prefixes, place_names(places), strict=True))]
    rows = [[cells[w] for w in workers] for workers in plan.stage_workers]
    columns = max(len(row) for row in rows)
    table = [["", *(f"replica {r}" for r in range(columns))], *([f"stage {s}", *row] for s, row in enumerate(rows))]
    widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(columns + 1)]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip() for row in table)


def _everywhere() -> list[jax.Device]:
    """Return all devices of all processes, in the order in which `Plan.placement` numbers them."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def device_names(devices: Sequence[jax.Device]) -> dict[jax.Device, str]:
    """Return platform and number of each device. JAX's own numbers have gaps on CPUs: the second process's first device is 2048."""
    numbers = {device: number for number, device in enumerate(_everywhere())}
    return {device: f"{device.platform}:{numbers.get(device, device.id)}" for device in devices}


def place_names(places: Sequence[Place]) -> list[str]:
    """Return the name of each place, such as `cpu:3` or `cpu:0-3 (data 2, model 2)`."""
    names = device_names([device for place in places for device in place.devices])
    names_of_places = []
    for place in places:
        numbers = [names[device].partition(":")[2] for device in place.devices]
        follow = [int(number) - i for i, number in enumerate(numbers)]
        shown = f"{numbers[0]}-{numbers[-1]}" if len(set(follow)) == 1 else ",".join(numbers)
        mesh = ", ".join(f"{axis} {size}" for axis, size in place.mesh.items())
        names_of_places.append(f"{place.first.platform}:{shown} ({mesh})" if mesh else names[place.first])
    return names_of_places


def _one_kind(plan: Plan, places: tuple[Place, ...]) -> tuple[Place, ...]:
    devices = [device for place in places for device in place.devices]
    kinds = {device.device_kind: device for device in reversed(devices)}
    if len(kinds) > 1:
        actual = " and ".join(f"'{kind}' (process {device.process_index})" for kind, device in sorted(kinds.items()))
        raise InputError(where="devices", expected="devices of one kind", found=actual, change="run on one kind of device")
    idle = set(range(jax.process_count())) - {device.process_index for device in devices}
    if idle and jax.process_count() > 1:
        problem = Problem(
            where="plan",
            expected="a worker in every process",
            found=f"none in process {min(idle)}",
            change="place a worker there, or start fewer processes",
        )
        raise InputError(problem, *placement_grid(plan, places).splitlines())
    return places


def _both_grids(plan: Plan, devices: Sequence[jax.Device]) -> list[str]:
    """Return the workers and the devices, as lines of text."""
    workers = [f"  stage {s}: {' '.join(f'w{w}' for w in workers)}" for s, workers in enumerate(plan.stage_workers)]
    of: dict[int, list[str]] = {}
    for device, name in device_names(devices).items():
        of.setdefault(device.process_index, []).append(name)
    return ["workers:", *workers, "devices:", *(f"  process {p}: {' '.join(names)}" for p, names in of.items())]
