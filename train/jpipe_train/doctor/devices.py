"""Start JAX alone and print its devices as JSON: `python -m jpipe_train.doctor.devices`.

`find` runs this in a separate process. If a driver aborts or hangs, only that process ends. The processes of a job also need not wait for
each other.
"""

import json
import os
import subprocess
import sys
from typing import Any

LIMIT = 180.0  # seconds: a large machine needs a minute to start its devices


def find(limit: float = LIMIT) -> dict[str, Any]:
    """Return the devices that JAX starts on this host: `platform`, `kinds`, `count`, and `memory`, the bytes of the smallest.

    Raise RuntimeError if JAX starts none within `limit` seconds, or ends by a signal.
    """
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several processes of a host may check the same GPU
    command = [sys.executable, "-P", "-m", "jpipe_train.doctor.devices"]
    try:
        done = subprocess.run(  # noqa: S603 - jpipe itself
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"JAX did not start its devices within {limit:g} s") from None
    if done.returncode:
        last = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "without a message")
        by_signal = f"JAX was ended by signal {-done.returncode} while it started its devices: " if done.returncode < 0 else ""
        raise RuntimeError(by_signal + last)
    devices: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return devices


def _print_devices() -> None:
    import jax
    import jax.numpy as jnp

    devices = jax.local_devices()
    computed = float(jnp.arange(4.0, device=devices[0]).sum())
    assert computed == 6.0, f"{devices[0]} adds 0, 1, 2 and 3 to {computed}"
    limits = [limit for device in devices if (limit := (device.memory_stats() or {}).get("bytes_limit"))]
    kinds = sorted({device.device_kind for device in devices})
    print(json.dumps({"platform": devices[0].platform, "kinds": kinds, "count": len(devices), "memory": min(limits, default=None)}))


if __name__ == "__main__":
    _print_devices()
