"""`python -m benchmarks.hosts.profile_program TASK [SAMPLES]`: profile a model on the core of this process, and print the profile.

With a folder of samples it is a task of `TASKS`, otherwise a workload of `WORKLOADS`.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax

from benchmarks.hosts.models import MICROBATCHES, WORKLOADS, loss
from benchmarks.hosts.tasks import TASKS, load, profile
from jpipe_planner import Profile, measure


def main() -> None:
    """Profile, and print it."""
    name, *samples = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 1)
    profiled = profile(load(TASKS[name], Path(samples[0]))) if samples else _of_workload(name)
    print(json.dumps({"profile": profiled.to_json()}), flush=True)


def _of_workload(name: str) -> Profile:
    batch, sizes = WORKLOADS[name].batch(), (len(WORKLOADS[name].batch()[1]) // MICROBATCHES,)

    def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
        return batch[0][:count], batch[1][:count]

    return measure(WORKLOADS[name].stack(), rows, loss, optax.sgd(1e-3, momentum=0.9), sizes, policies=("none",), seconds=10.0)


if __name__ == "__main__":
    main()
