"""Which devices the stages of a plan are compiled for: the topology's target, or this machine's in their place."""

import re
from dataclasses import dataclass

import jax

from jpipe_planner.machine.device import Device
from jpipe_planner.machine.targets import TargetUnavailable, target_devices

__all__ = ["Compiling", "compiling_for"]

_ANY_BYTES = 10**14
_UNITS = {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30}


@dataclass(frozen=True)
class Compiling:
    """The devices that stages are compiled for.

    Attributes:
        devices: those for a mesh; the first one for a stage on one device.
        kind: the kind of these devices, to show.
        missing: why it is not the kind that the topology has, or "".
    """

    devices: tuple[jax.Device, ...]
    kind: str
    missing: str = ""


def compiling_for(device: Device, count: int = 1, *, unlimited: bool = False) -> Compiling:
    """Return the devices to compile for.

    Args:
        device: the device of the topology.
        count: the number of devices of the largest mesh.
        unlimited: compile for a GPU as if it had any amount of memory. XLA otherwise computes again some of what does not fit.

    Returns:
        The devices of its target, or of this machine where the device has no target or XLA cannot compile for it here.
    """
    target = device.compiles_for
    missing = "the topology's device names no target; add one of those that `jpipe target` lists"
    if target is not None:
        try:
            return Compiling(target_devices(target.with_memory(_ANY_BYTES) if unlimited else target, count), target.name)
        except TargetUnavailable as error:
            missing = str(error.at(""))
    here = jax.local_devices()
    return Compiling(tuple(here), here[0].device_kind, missing)


def bytes_beyond_memory(error: BaseException) -> tuple[float, float] | None:
    """Return (bytes that a program needs, bytes that there are) if XLA did not compile it because of its memory, or None.

    XLA says so of TPUs: "used 17.2G of 15.75G hbm", "temporaries (16.00G) exceeds available HBM (15.75G)".
    """
    message = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in message:
        return None
    sizes = [float(number) * _UNITS[unit] for number, unit in re.findall(r"([0-9]+(?:\.[0-9]+)?)([KMG])\b", message)]
    return (sizes[0], sizes[1]) if len(sizes) > 1 and sizes[0] > sizes[1] else (1.0, 0.0)
