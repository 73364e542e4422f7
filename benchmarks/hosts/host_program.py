"""`python -m benchmarks.hosts.host_program WORKLOAD PLAN HOSTS PROCESS COORDINATOR`: the program of one host."""

import sys
import time
from typing import Any

import jax

from benchmarks.hosts.models import KINDS, build
from benchmarks.hosts.network import sent_bytes
from benchmarks.pipelines import Runner
from benchmarks.serve import now, serve


def main() -> None:
    """Compile, warm up, then run the steps that standard input asks for."""
    workload, kind, hosts, process, coordinator = sys.argv[1:6]
    jax.config.update("jax_num_cpu_devices", KINDS[kind].devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, int(hosts), int(process))
    runner = Runner(*build(workload, kind, int(hosts)))
    runner(KINDS[kind].warm_up)

    def run(steps: int) -> dict[str, Any]:
        before = sent_bytes(), time.process_time(), now()
        answer = runner(steps)
        sent, busy, seconds = (b - a for a, b in zip(before, (sent_bytes(), time.process_time(), now()), strict=True))
        return {**answer, "sent_bytes": sent / steps, "waiting": 1 - min(busy / seconds, 1.0)}

    serve(run)


if __name__ == "__main__":
    main()
