"""Which devices the stages of a plan are compiled for: those of the topology's target, or those of this machine in their place."""

from dataclasses import dataclass

import jax

from jpipe_planner.machine.targets import TargetUnavailable, target_devices
from jpipe_planner.machine.topology import Device

_ANY_BYTES = 10**14


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
        device: of the topology.
        count: the number of devices of the largest mesh.
        unlimited: compile for a GPU as if it had any amount of memory. XLA otherwise computes again some of what does not fit.

    Returns:
        The devices of its target, or those of this machine where the device has no target or XLA cannot compile for it here.
    """
    target = device.compiles_for
    missing = "the topology's device names no target; add one of those that `jpipe target` lists"
    if target is not None:
        try:
            return Compiling(target_devices(target.with_memory(_ANY_BYTES) if unlimited else target, count), target.name)
        except TargetUnavailable as error:
            missing = str(error).removeprefix("target: ")
    here = jax.local_devices()
    return Compiling(tuple(here), here[0].device_kind, missing)
