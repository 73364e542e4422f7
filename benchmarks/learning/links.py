"""`python -m benchmarks.learning.links`: the time of an update of the GPT under each schedule, over two hosts with a link of 1 Gbit/s.

A host is a network namespace with a process pinned to one core, which has two of the four stages. It needs root.
"""

import contextlib
import os
import signal
import statistics
import sys
from typing import Any

import jax
import optax

import jpipe
from benchmarks.hosts.network import Network, NoNetwork
from benchmarks.learning.grid import stages_of
from benchmarks.learning.tasks import make_gpt
from benchmarks.pipelines import Runner
from benchmarks.programs import Program, python_module, steps_per_second
from benchmarks.serve import serve

D, M, HOSTS, BITS_PER_SECOND = 4, 4, 2, 1e9
ROUNDS, UPDATES = 15, 12
SCHEDULES = {"flush": "pipedream_flush", "2BW": "pipedream_2bw", "PipeDream m = d": "pipedream"}
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}


def main() -> int:
    """Measure all schedules in turn, and print a table."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed, too
    cores, seconds = sorted(os.sched_getaffinity(0)), dict[str, list[float]]()
    try:
        with Network(HOSTS) as network, contextlib.ExitStack() as stack:
            network.limit(BITS_PER_SECOND)
            programs = {}
            for number, schedule in enumerate(SCHEDULES):
                address = f"{network.address(0)}:{29500 + number}"
                commands = [network.command(h, python_module("benchmarks.learning.links", schedule, h, address)) for h in range(HOSTS)]
                pinned = [cores[h % len(cores)] for h in range(HOSTS)]
                programs[schedule] = stack.enter_context(Program(schedule, commands, pinned, ENVIRONMENT))
                programs[schedule].facts()
            for _ in range(ROUNDS):
                for schedule, program in programs.items():
                    answers = program.run(UPDATES)
                    seconds.setdefault(schedule, []).append(len(answers) / steps_per_second([answer["ends"] for answer in answers]))
                    print(f"… {schedule}: {seconds[schedule][-1]:.3f} s", file=sys.stderr, flush=True)
    except NoNetwork as missing:
        print(f"bench-learning: {missing}", file=sys.stderr)
        return 2
    print("| schedule | seconds per update, median (range) | flush over it, median of the rounds |\n|---|---|---|")
    for schedule, values in seconds.items():
        ratio = statistics.median(flush / value for flush, value in zip(seconds["flush"], values, strict=True))
        print(f"| {schedule} | {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}) | {ratio:.2f} |")
    return 0


def run_host(schedule: str, process: int, coordinator: str) -> None:
    """Run updates when standard input asks for them.

    Args:
        schedule: a key of `SCHEDULES`.
        process: number of this host.
        coordinator: address of the first one.
    """
    jax.config.update("jax_num_cpu_devices", D // HOSTS)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, HOSTS, process)
    task = make_gpt(D)
    stages = tuple(jpipe.Stage(layers=layers) for layers in stages_of(task, D))
    plan = jpipe.Plan(schedule=SCHEDULES[schedule], microbatches=M, stages=stages)
    clip: dict[str, Any] = {"clip_stage_norm" if plan.schedule == "pipedream" else "clip_global_norm": 1.0}
    pipe = jpipe.Pipeline(task.stack, plan, task.loss, optax.nadamw(1e-3), **clip)
    runner = Runner(pipe, next(task.batches(0)))
    runner(2)
    serve(runner)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_host(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main())
