"""Recorded facts of a process on a host without problems, to change in tests."""

import copy
from typing import Any

GB = 10**9
FACTS: dict[str, dict[str, Any]] = {
    "process": {"host": "node07", "index": 0, "count": 1, "coordinator": None},
    "versions": {
        **{"python": "3.13.1", "jpipe": "0.3.0", "jax": "0.12.1", "jaxlib": "0.12.1", "flax": "0.13.0", "optax": "0.3.0"},
        **{"orbax-checkpoint": "0.12.0", "numpy": "2.4.0"},
    },
    "code": {"code of jpipe": "0.3.0 abc", "version of jax": "0.12.1", "jax_enable_x64": "False"},
    "devices": {"platform": "gpu", "kinds": ["NVIDIA H100"], "count": 4, "memory": 64 * GB},
    "gpus": {"count": 4},
    "memory": {"total": 540 * GB, "available": 480 * GB},
    "shared memory": {"available": 270 * GB},
    "folder": {"path": "/shared/runs", "existing": "/shared/runs", "available": 900 * GB, "bytes_per_second": 400e6},
    "environment": {},
}


def recorded(**changes: dict[str, Any]) -> dict[str, Any]:
    """Return the facts with some of a section replaced: `recorded(memory={"available": 0})`; `_` in a section's name is a space."""
    facts = copy.deepcopy(FACTS)
    for name, values in changes.items():
        section = name.replace("_", " ")
        facts[section] = values if "error" in values else facts.get(section, {}) | values
    return facts


def several(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of several connected processes, each with its changes, on hosts of their own."""
    everyone = []
    for index, change in enumerate(changes):
        process = {"host": f"node0{index}", "index": index, "count": len(changes), "coordinator": "10.0.0.1"}
        everyone.append(recorded(**({"process": process} | change)))
    return everyone
