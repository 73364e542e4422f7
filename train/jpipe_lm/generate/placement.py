"""Place the layers of a model on devices in order, with no more devices than necessary."""

import itertools
from collections.abc import Mapping, Sequence

import jax

from jpipe import InputError
from jpipe_planner.search.balance import balance

_USED = 0.9  # the fraction of a device's memory that layers may use; the rest is for activations


def place(sizes: Mapping[str, int], devices: Sequence[jax.Device], number: int | None, scratch: int = 0) -> dict[str, jax.Device]:
    """Return the device of each layer, so that the largest number of bytes on one device is smallest.

    `sizes` has the bytes of the layers, in order; each device also needs `scratch` bytes. Without a `number` of devices, as few are used as
    have enough memory. Raise InputError if there are fewer, or they have too little memory.
    """
    most = min(len(devices), len(sizes))
    if number is not None and not 1 <= number <= most:
        why = f"because there are {len(devices)}" if most == len(devices) else f"because the model has {len(sizes)} layers"
        raise InputError(where="--devices", expected=f"from 1 to {most}, {why}", found=number, change="change or remove the option")
    for count in range(1, most + 1) if number is None else (number,):
        placement = _on(sizes, devices[:count])
        if all(
            _holds(device, scratch + sum(sizes[layer_id] for layer_id in sizes if placement[layer_id] == device))
            for device in devices[:count]
        ):
            return placement
    needed = sum(sizes.values()) + scratch * len(devices[:number])
    raise InputError(
        f"generate: expected a model that fits into the memory of {len(devices[:number])} of the {len(devices)} devices, found a model "
        f"that needs {needed / 1e9:,.1f} GB; use fewer prompts or --tokens, --dtype bfloat16, or more devices"
    )


def _on(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> dict[str, jax.Device]:
    ids = list(sizes)
    starts = balance([size / 1e9 for size in sizes.values()], len(devices))
    parts = itertools.pairwise((*starts, len(ids)))
    return {layer_id: device for device, (first, end) in zip(devices, parts, strict=True) for layer_id in ids[first:end]}


def _holds(device: jax.Device, size: int) -> bool:
    """Return whether a device has memory for `size` bytes; True if its memory is unknown."""
    here = device if device.process_index == jax.process_index() else jax.local_devices()[0]  # all devices are of one kind
    limit = None if device.platform == "cpu" else (here.memory_stats() or {}).get("bytes_limit")
    return limit is None or size <= _USED * limit
