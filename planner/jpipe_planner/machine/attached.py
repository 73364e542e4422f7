"""The GPU or TPU of this machine as a target, for machines without one."""

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jpipe import InputError
from jpipe_planner.machine.plain_yaml import dump
from jpipe_planner.machine.targets import FORMAT, Host, known_targets, local_devices

__all__ = ["Attached", "attached_target"]

# Numbers of CUdevice_attribute in the CUDA driver API, by the names of XLA's GpuDeviceInfoProto.
_ATTRIBUTES: Mapping[str, int] = {
    "threads_per_block_limit": 1,
    "block_dim_limit_x": 5,  # limits of the blocks in a grid
    "block_dim_limit_y": 6,
    "block_dim_limit_z": 7,
    "shared_memory_per_block": 8,
    "threads_per_warp": 10,
    "registers_per_block_limit": 12,
    "core_count": 16,
    "l2_cache_size": 38,
    "threads_per_core_limit": 39,
    "shared_memory_per_core": 81,
    "registers_per_core_limit": 82,
    "shared_memory_per_block_optin": 97,
}
_CLOCK_RATE, _MEMORY_CLOCK_RATE, _BUS_WIDTH, _MAJOR, _MINOR = 13, 36, 37, 75, 76
_HALF_OF_THE_FPUS = (6, 0), (7, 0), (7, 2), (7, 5), (8, 0)  # capabilities with 64 results of float32 per clock cycle; the others have 128
_UNCOUNTED = 947e6  # bytes for CUDA's context and libraries, NCCL's buffers and autotuning, as in targets.yaml for PCIe cards


@dataclass(frozen=True)
class Attached:
    """The device of this machine as a target.

    Attributes:
        text: YAML, as `read_targets` reads it.
        name: the name of the target in it.
        kind: the kind of the device.
        table: the name of the table's target that gives the rates and reserved bytes; "": the user has to add the rates.
        differing: the properties that differ from the table, as text.
    """

    text: str
    name: str
    kind: str
    table: str
    differing: tuple[str, ...] = ()


def attached_target() -> Attached:
    """Read the properties of the first GPU or TPU of this machine, from JAX and the driver. Raise InputError if that is not possible."""
    device = local_devices()[0]
    kind, platform = device.device_kind, device.platform
    table = next((name for name, target in known_targets().items() if target.name == kind), "")
    if platform == "gpu" and "cuda" in device.client.platform_version.lower():
        return _attached("cuda", kind, table, _of_driver(device.local_hardware_id or 0))
    if platform != "tpu":
        raise InputError(
            f"target --here: expected an NVIDIA GPU or a TPU, found {kind}; run it where JAX has one, with jpipe-train[cuda13] or "
            "jpipe-train[tpu] installed"
        )
    if not table:
        kinds = ", ".join(target.name for target in known_targets().values() if target.platform == "tpu")
        raise InputError(f"target --here: expected a TPU of a kind in the table, {kinds}, found {kind}; write a file by hand")
    return _attached("tpu", kind, table, {})


def _attached(platform: str, kind: str, table: str, measured: Mapping[str, Any]) -> Attached:
    """Return the target of a device of a `platform`; figures that are not `measured` are from the target `table`."""
    name = table or re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
    target = known_targets().get(table)
    published = {} if target is None else {"memory_bandwidth": target.memory_bandwidth, **target.compiler}
    properties = {**published, **measured}
    memory = properties["device_memory_size"] if target is None else target.memory
    reserved = {"what no compiled program counts": _UNCOUNTED, "allocator": 0.01 * memory} if target is None else target.reserved
    fields = {
        "platform": platform,
        "name": kind,
        "memory": f"{memory / 1e9:.15g} GB",
        "reserved": {what: f"{size / 1e6:.15g} MB" for what, size in reserved.items()},
        "flops": {} if target is None else {dtype: f"{rate / 1e12:.15g} TFLOP/s" for dtype, rate in target.flops.items()},
        "efficiency": 0.45 if target is None else target.efficiency,
        "memory_bandwidth": f"{properties.pop('memory_bandwidth') / 1e9:.15g} GB/s",
        "host": {"bandwidth": f"{(Host() if target is None else target.host).bandwidth / 1e9:.15g} GB/s"},
        "compiler": properties,
        "sources": [*(() if target is None else target.sources), "read from the device by jpipe target --here"],
    }
    comment = f"# {' '.join(kind.split())}, read on a machine that has it.\n"
    if target is None:
        comment += "# reserved is an estimate. In place of flops: {} write its peak rates without sparsity, such as\n"
        comment += "# flops: {float32: 67 TFLOP/s, bfloat16: 989 TFLOP/s}\n"
    differing = tuple(
        f"{key} {measured[key]:,} (table: {value:,})"
        for key, value in published.items()
        if key in measured and key != "compute_capability" and measured[key] != value
    )
    return Attached(comment + dump({"format": FORMAT, "targets": {name: fields}}), name, kind, table, differing)


def _of_driver(number: int) -> dict[str, Any]:
    """Return the properties of a GPU that this process sees from the CUDA driver, including the memory bandwidth."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise InputError(f"target --here: cannot load the CUDA driver: {error}; install it") from None
    device, value, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    _check("cuInit", driver.cuInit(0))
    _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), number))

    def attribute(code: int) -> int:
        _check("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(ctypes.byref(value), code, device))
        return value.value

    _check("cuDeviceTotalMem", driver.cuDeviceTotalMem_v2(ctypes.byref(size), device))
    capability = attribute(_MAJOR), attribute(_MINOR)
    return {
        "compute_capability": f"{capability[0]}.{capability[1]}",
        **{name: attribute(code) for name, code in _ATTRIBUTES.items()},
        "fpus_per_core": 64 if capability in _HALF_OF_THE_FPUS else 128,
        "clock_rate_ghz": attribute(_CLOCK_RATE) / 1e6,
        "device_memory_size": size.value,
        "memory_bandwidth": 2 * attribute(_MEMORY_CLOCK_RATE) * 1000 * attribute(_BUS_WIDTH) / 8,  # both edges of each clock cycle
    }


def _check(function: str, code: int) -> None:
    if code != 0:
        raise InputError(f"target --here: the CUDA driver answers {function} with error {code}; see CUresult in its documentation")
