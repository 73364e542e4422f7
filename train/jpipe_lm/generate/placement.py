"""Place the layers of a model on devices in order, using no more devices than necessary."""

import itertools
from collections.abc import Mapping, Sequence

import jax

from jpipe import InputError
from jpipe_planner.search.balance import balance

_USED = 0.9  # fraction of a device's memory; the remainder is for activations


def place(sizes: Mapping[str, int], devices: Sequence[jax.Device], number: int | None, scratch: int = 0) -> dict[str, jax.Device]:
    """Return the device of each layer, minimizing the largest number of bytes on one device.

    Args:
        sizes: bytes of each layer, by id, in order.
        devices: the existing devices.
        number: the number of devices to use; None for as few as have the memory.
        scratch: bytes that each device needs beside its layers.

    Raises:
        InputError: there are fewer devices, or too little memory on all of them.
    """
    most = min(len(devices), len(sizes))
    if number is not None and not 1 <= number <= most:
        why = f"for there are {len(devices)}" if most == len(devices) else f"for the model has {len(sizes)} layers"
        raise InputError(where="--devices", expected=f"from 1 to {most}, {why}", found=number, change="change it, or leave it out")
    for count in range(1, most + 1) if number is None else (number,):
        placement = _on(sizes, devices[:count])
        if all(
            _holds(device, scratch + sum(sizes[layer_id] for layer_id in sizes if placement[layer_id] == device))
            for device in devices[:count]
        ):
            return placement
    needed = sum(sizes.values()) + scratch * len(devices[:number])
    raise InputError(
        f"generate: expected a model that fits in the memory of {len(devices[:number])} of the {len(devices)} devices, found one that "
        f"needs {needed / 1e9:,.1f} GB; use fewer prompts or --tokens, --dtype bfloat16, or more devices"
    )


def _on(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> dict[str, jax.Device]:
    ids = list(sizes)
    starts = balance([size / 1e9 for size in sizes.values()], len(devices))
    parts = itertools.pairwise((*starts, len(ids)))
    return {layer_id: device for device, (first, end) in zip(devices, parts, strict=True) for layer_id in ids[first:end]}


def _holds(device: jax.Device, size: int) -> bool:
    """Return whether a device has memory for `size` bytes, as far as known."""
    here = device if device.process_index == jax.process_index() else jax.local_devices()[0]  # of one kind
    limit = None if device.platform == "cpu" else (here.memory_stats() or {}).get("bytes_limit")
    return limit is None or size <= _USED * limit
