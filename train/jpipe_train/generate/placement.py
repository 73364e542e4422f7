"""Which device each layer of a model is on: the layers in order, on no more devices than they need."""

import itertools
from collections.abc import Mapping, Sequence

import jax
from jpipe_planner import balance

from jpipe import InputError

_USED = 0.9  # of a device's memory; the rest is for activations


def place(sizes: Mapping[str, int], devices: Sequence[jax.Device], wanted: int | None) -> dict[str, jax.Device]:
    """The device of each layer: the largest sum of bytes on one of them is as small as it can be.

    Args:
        sizes: bytes of each layer, by id, in order.
        devices: those that there are.
        wanted: on how many of them; None: on as few as have the memory.

    Raises:
        InputError: there are not as many, or there is too little memory on all of them.
    """
    most = min(len(devices), len(sizes))
    if wanted is not None and not 1 <= wanted <= most:
        why = f"for there are {len(devices)}" if most == len(devices) else f"for the model has {len(sizes)} layers"
        raise InputError(f"--devices: expected from 1 to {most}, {why}, found {wanted}; change it, or leave it out")
    for count in range(1, most + 1) if wanted is None else (wanted,):
        found = _on(sizes, devices[:count])
        if all(_holds(device, sum(sizes[layer_id] for layer_id in sizes if found[layer_id] == device)) for device in devices[:count]):
            return found
    raise InputError(
        f"generate: expected a model that fits in the memory of {len(devices[:wanted])} of the {len(devices)} devices, found one that "
        f"needs {sum(sizes.values()) / 1e9:,.1f} GB; use fewer prompts or --tokens, --dtype bfloat16, or more devices"
    )


def _on(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> dict[str, jax.Device]:
    ids = list(sizes)
    starts = balance([size / 1e9 for size in sizes.values()], len(devices))
    parts = itertools.pairwise((*starts, len(ids)))
    return {layer_id: device for device, (first, end) in zip(devices, parts, strict=True) for layer_id in ids[first:end]}


def _holds(device: jax.Device, size: int) -> bool:
    """Whether the device has the memory for so many bytes, as far as that is known."""
    limit = None if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")
    return limit is None or size <= _USED * limit
