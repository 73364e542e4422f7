"""`python -m benchmarks.hosts.profile_program TASK SAMPLES`: profile a task on the core of this process, and print the profile."""

import json
import sys
from pathlib import Path

import jax

from benchmarks.hosts.tasks import TASKS, load, profile


def main() -> None:
    """Profile, and print it."""
    task, samples = sys.argv[1:3]
    jax.config.update("jax_num_cpu_devices", 1)
    print(json.dumps({"profile": profile(load(TASKS[task], Path(samples))).to_json()}), flush=True)


if __name__ == "__main__":
    main()
