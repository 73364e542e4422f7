"""Run the processes of a jpipe command as actors of a Ray cluster, and start them again if they fail.

From a machine that the cluster accepts drivers from; the run folder is on storage that all nodes share:

    python ray_train.py --processes 4 --gpus 1 --cpus 8 --max-restarts 3 -- train /shared/gpt.yaml --set run.dir=/shared/runs/gpt
    python ray_train.py --processes 4 --gpus 1 -- doctor

Each actor reserves CPUs and GPUs, and starts `jpipe` as a process of its own on its node, so that an actor outlives whatever ends training,
and can report it. It runs in the driver's folder if the node has one of that name. Process 0 is the coordinator of all. jpipe and Ray are
installed on all nodes.
"""

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes after which another start would fail again, or is not wanted
LOST = 1  # the exit code of a process whose node or actor died
GRACE = 300.0  # seconds for processes to save and end after SIGTERM


@ray.remote(max_concurrency=2)  # `end` comes while `run` waits
class Process:
    """One process of the job, on the node where Ray places it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Return this node's address with a port that is free now."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"

    def run(self, arguments: Sequence[str], secret: str, folder: str) -> int:
        """Run `jpipe` with these arguments in a folder, or Ray's own if this node has none of that name, and return its exit code.

        Its output goes where Ray shows that of the actor.
        """
        command = [sys.executable, "-P", "-m", "jpipe_train.cli", *arguments]
        where, environment = folder if os.path.isdir(folder) else None, os.environ | {"JPIPE_SECRET": secret}
        self._process = process = subprocess.Popen(command, cwd=where, env=environment)  # noqa: S603 - jpipe itself
        code = process.wait()
        self._process = None
        return code if code >= 0 else 128 - code

    def end(self, number: int) -> None:
        """Send a signal to the process: SIGTERM asks it to save and end."""
        if (process := self._process) is not None:
            process.send_signal(number)


def main(processes: int, gpus: float, cpus: float, max_restarts: int, command: Sequence[str], wait: float = 600.0) -> int:
    """Run a command until it succeeds, cannot succeed, or has failed too often, and return its exit code.

    Args:
        processes: the number of processes.
        gpus: GPUs that each of them reserves.
        cpus: CPU cores that each of them reserves.
        max_restarts: how often all are started again.
        command: the words after `jpipe`.
        wait: seconds in which the cluster has to have these resources free.
    """
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    signal.signal(signal.SIGINT, lambda number, frame: stopped.append(number))
    for restart in range(max_restarts + 1):
        group = placement_group([{"CPU": cpus} | ({"GPU": gpus} if gpus else {})] * processes, strategy="SPREAD")
        try:
            ray.get(group.ready(), timeout=wait)
            codes = attempt(group, processes, gpus, cpus, command, stopped)
        except ray.exceptions.GetTimeoutError:
            print(f"the cluster has not had {processes} × {cpus:g} CPUs and {gpus:g} GPUs free within {wait:g} s", file=sys.stderr)
            return LOST
        finally:
            remove_placement_group(group)
        code = worst(codes)
        if code in (0, BAD_INPUT, INTERRUPTED) or stopped or restart == max_restarts:
            return code
        print(f"exit codes {codes}; starting all again ({restart + 1} of {max_restarts})", file=sys.stderr)
    return code


def attempt(group: PlacementGroup, processes: int, gpus: float, cpus: float, command: Sequence[str], stopped: Sequence[int]) -> list[int]:
    """Start all processes once, wait for all, and return their exit codes."""
    # An actor that is started on a new node by itself would find nobody: the driver starts all again.
    options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0}
    actors = [
        Process.options(**options, scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n)).remote()
        for n in range(processes)
    ]
    secret = secrets.token_hex(32)
    try:
        coordinator = ray.get(actors[0].address.remote())
        flags = ["--coordinator", coordinator, "--num-processes", str(processes), "--process-id"]
        runs = [actor.run.remote([*command, *flags, str(n)], secret, os.getcwd()) for n, actor in enumerate(actors)]
        return _exit_codes(runs, actors, stopped)
    except ray.exceptions.RayActorError:  # the node of process 0 died before all started
        return [LOST]
    finally:
        ends = [actor.end.remote(signal.SIGKILL) for actor in actors]  # a process would outlive the actor that started it
        ray.wait(ends, num_returns=len(ends), timeout=10)
        for actor in actors:
            ray.kill(actor)


def _exit_codes(runs: list["ray.ObjectRef[int]"], actors: Sequence["ray.actor.ActorHandle"], stopped: Sequence[int]) -> list[int]:
    """Return the exit codes when all have ended; when one fails or this driver is stopped, ask the others to end, and wait some minutes."""
    end: float | None = None
    pending = runs
    while pending and (end is None or time.monotonic() < end):
        done, pending = ray.wait(pending, num_returns=1, timeout=0.5)
        if end is None and (stopped or any(exit_code(run) for run in done)):
            end = time.monotonic() + GRACE
            for actor in actors:
                actor.end.remote(signal.SIGTERM)
    return [LOST if run in pending else exit_code(run) for run in runs]


def exit_code(run: "ray.ObjectRef[int]") -> int:
    """Return the exit code of a run that has ended."""
    try:
        return int(ray.get(run))
    except ray.exceptions.RayError:
        return LOST


def worst(codes: Sequence[int]) -> int:
    """Return the exit code of a job: bad input first, because no restart helps, then any other failure."""
    return next((code for code in (BAD_INPUT, INTERRUPTED) if code in codes), next((code for code in codes if code), 0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, required=True, help="the number of processes")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each process")
    parser.add_argument("--cpus", type=float, default=1, help="CPU cores of each process")
    parser.add_argument("--max-restarts", type=int, default=0, help="how often all are started again when one fails")
    parser.add_argument("command", nargs="+", help="-- and a command of jpipe")
    given = parser.parse_args()
    ray.init()
    sys.exit(main(given.processes, given.gpus, given.cpus, given.max_restarts, given.command))
