"""The devices that the stages of a plan are compiled for: the topology's target, or else the devices of this machine."""

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
        devices: the devices for a mesh; a stage on one device is compiled for the first of them.
        kind: the kind of these devices, to show.
        missing: why the topology's devices are of another kind, or "".
    """

    devices: tuple[jax.Device, ...]
    kind: str
    missing: str = ""


def compiling_for(device: Device, count: int = 1, *, unlimited: bool = False) -> Compiling:
    """Return the devices to compile for: devices of the device's target, or of this machine without one or without XLA's compiler for it.

    `count` is the size of the largest mesh. With `unlimited` XLA compiles for a GPU as if its memory were unlimited; otherwise it computes
    some arrays again if memory is short.
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
    """Return (needed bytes, available bytes) if XLA did not compile a program because it needs too much memory; None for other errors.

    Examples of XLA's messages for TPUs: "used 17.2G of 15.75G hbm", "temporaries (16.00G) exceeds available HBM (15.75G)".
    """
    message = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in message:
        return None
    sizes = [float(number) * _UNITS[unit] for number, unit in re.findall(r"([0-9]+(?:\.[0-9]+)?)([KMG])\b", message)]
    return (sizes[0], sizes[1]) if len(sizes) > 1 and sizes[0] > sizes[1] else (1.0, 0.0)
