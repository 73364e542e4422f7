"""Describe the machine of a measurement: processor or GPU model and core count, without its host name."""

import os
import pathlib
import platform
from typing import Any

import jax


def describe() -> dict[str, Any]:
    """Return the model of the device that computes, the number of usable cores, and versions."""
    device = jax.devices()[0]
    name = _cpu_model() if device.platform == "cpu" else device.device_kind
    return {
        "device": name,
        "platform": device.platform,
        "cores": len(os.sched_getaffinity(0)),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def make_cpu_devices() -> None:
    """Create four CPU devices if CPUs are the devices."""
    jax.config.update("jax_num_cpu_devices", 4)


def _cpu_model() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown CPU"
