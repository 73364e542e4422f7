"""`python -m benchmarks.hosts`: compare data parallelism and pipelines over two and four hosts, at rates that limit data parallelism.

A host is a network namespace with a process pinned to one core. First data parallelism runs without a limit: its time is taken as its
compute time C, and its bytes give the rates at which it should communicate for 50, 80 and 90% of its time. One run at such a rate shows
how much longer the bytes take than expected, and the rates are corrected by that. The share is measured again at each rate, as
1 - C / (time of a step), and every plan runs at the same rates. `--rates` gives other rates; those of the GPT are 100 Mbit/s and 1 Gbit/s,
and it has other plans: pipelines, compressed messages and replicas that agree rarely. `--plans` measures some of them, with data
parallelism.

For data parallelism the table also has the time of a step divided by the longer one of its computation and its communication: 1 is a sum
that is hidden completely.
"""

import argparse
import json
import math
import os
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.hosts.models import KINDS, MICROBATCHES, WORKLOADS, kinds, sizes
from benchmarks.hosts.network import Network, NoNetwork
from benchmarks.machine import describe
from benchmarks.programs import Program, ProgramFailed, python_module, steps_per_second

EPOCH = 5_000  # samples
SHARES = (0.5, 0.8, 0.9)
TIMED_SECONDS = 5.0  # of one measurement, unless two steps take longer
SPEED_UP, BYTES_LESS = 5.0, 0.85  # the goals at the last share
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}


def main() -> int:
    """Measure, print a table for each workload and number of hosts, write JSON."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed, too
    results: dict[str, Any] = {"machine": describe(), "epoch_samples": EPOCH, "runs": _earlier_runs(options) if options.keep else []}
    machine = results["machine"]
    try:
        for hosts in options.hosts:
            with Network(hosts) as network:
                for name in options.workloads:
                    print(f"\n{name}, {hosts} hosts on {machine['cores']} cores ({machine['device']}), jax {machine['jax']}")
                    if hosts > machine["cores"]:
                        print("More hosts than cores: they take turns, and waiting for a core counts as waiting too.")
                    shape = _shape(name, hosts)
                    passed = ", ".join(f"{size / 1e3:.1f} kB before {layer}" for layer, size in shape["cuts"].items())
                    print(f"{shape['weights'] / 1e6:.1f} MB of weights; activations of a sample at the cuts, one stage to a host: {passed}")
                    rows = _measure(network, name, options.plans, [1e6 * rate for rate in options.rates or WORKLOADS[name].rates])
                    _print(rows, goals=not WORKLOADS[name].rates)
                    run = add_run(results["runs"], {"workload": name, "hosts": hosts, **shape, "rows": rows})
                    options.json.write_text(json.dumps(results, indent=2) + "\n")
                    if WORKLOADS[name].rates and hosts == 2 and "profile" not in run:  # each host has a core
                        run["profile"] = _profile(name)
                        options.json.write_text(json.dumps(results, indent=2) + "\n")
    except NoNetwork as missing:
        print(f"bench-hosts: {missing}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the hosts are removed", file=sys.stderr)
        return 130
    print(f"written to {options.json}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], choices=(2, 4), help="default: 2 4")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), help="default: all")
    parser.add_argument("--plans", nargs="+", default=list(KINDS), choices=list(KINDS), metavar="PLAN", help="default: all")
    parser.add_argument("--rates", type=float, nargs="+", metavar="MBIT", help="Mbit/s of the links; default: found for data parallelism")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("benchmarks/hosts.json"), help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="keep what that file has of other workloads, numbers of hosts and plans")
    return parser.parse_args()


def _earlier_runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the runs of an earlier measurement.

    Raises:
        SystemExit: the file cannot be read, or is none of this benchmark.
    """
    try:
        return list(json.loads(options.json.read_text(encoding="utf-8"))["runs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"bench-hosts: --keep: cannot read '{options.json}': {error!r}; measure without --keep")


def add_run(runs: list[dict[str, Any]], run: dict[str, Any]) -> dict[str, Any]:
    """Add a run, or replace the rows of its plans in the one of the same workload and hosts.

    Args:
        runs: those so far.
        run: the new one.

    Returns:
        The one of `runs` that has the new rows.
    """
    for same in runs:
        if (same["workload"], same["hosts"]) == (run["workload"], run["hosts"]):
            plans = {row["plan"] for row in run["rows"]}
            rows = [*run["rows"], *(row for row in same["rows"] if row["plan"] not in plans)]
            order = kinds(WORKLOADS[run["workload"]], run["hosts"])
            same.update(run, rows=[row for kind in order for row in rows if row["plan"] == kind])
            return same
    runs.append(run)
    return run


def _shape(name: str, hosts: int) -> dict[str, Any]:
    """Return the bytes of all weights, and those of a sample's activations at the cuts of the straight pipeline."""
    layers = sizes(WORKLOADS[name])
    ids = list(layers)
    cuts = {ids[cut]: layers[ids[cut - 1]][1] for cut in WORKLOADS[name].cuts[hosts]}
    return {"weights": sum(weights for weights, _ in layers.values()), "cuts": cuts}


def _profile(name: str) -> str:
    """Profile a workload on one idle core; the profile as JSON."""
    command, core = python_module("benchmarks.hosts.profile_program", name), min(os.sched_getaffinity(0))
    with Program(name, [command], [core], ENVIRONMENT) as program:
        return str(program.facts()[0]["profile"])


def _measure(network: Network, name: str, plans: Sequence[str], rates: list[float]) -> list[dict[str, Any]]:
    """Measure a row for data parallelism and each of the plans at each rate; without rates, find some."""
    rows: list[dict[str, Any]] = []
    base, *others = kinds(WORKLOADS[name], len(network.hosts))
    for kind in (base, *(kind for kind in others if kind in plans)):
        print(f"… {kind}", file=sys.stderr, flush=True)
        try:
            network.limit(None)
            with _start(network, name, kind) as program:
                program.facts()
                if not rows:
                    rows.append({"plan": kind, "rate": None, **_run(program, name, kind)})
                    rates = rates or _rates(network, program, name, kind, rows[0])
                for rate in rates:
                    network.limit(rate)
                    rows.append({"plan": kind, "rate": rate, **_run(program, name, kind)})
                    print(f"… {kind}, {rate / 1e6:.1f} Mbit/s: {rows[-1]['step_seconds']:.3f} s", file=sys.stderr, flush=True)
        except ProgramFailed as failure:
            print(f"… {kind}: {failure}", file=sys.stderr, flush=True)
            rows.append({"plan": kind, "failed": str(failure)})
            if len(rows) == 1:
                break
    return rows


def _rates(network: Network, program: Program, name: str, kind: str, free: dict[str, Any]) -> list[float]:
    """Find the rates at which data parallelism communicates for `SHARES` of its time, from one run with and one without a limit."""
    compute, share = free["step_seconds"], SHARES[len(SHARES) // 2]
    network.limit(rate_for(share, compute, free["most_sent"]))
    communicates = _run(program, name, kind)["step_seconds"] - compute
    slower = communicates / (compute * share / (1 - share))
    return [slower * rate_for(share, compute, free["most_sent"]) for share in SHARES]


def _start(network: Network, name: str, kind: str) -> Program:
    hosts, cores = len(network.hosts), sorted(os.sched_getaffinity(0))
    arguments = [(name, kind, hosts, host, f"{network.address(0)}:29500") for host in network.hosts]
    commands = [
        network.command(host, python_module("benchmarks.hosts.host_program", *arguments[host])) for host in network.hosts
    ]  # the port is free: nothing else runs in the host
    return Program(kind, commands, [cores[host % len(cores)] for host in network.hosts], ENVIRONMENT)


def _run(program: Program, name: str, kind: str) -> dict[str, Any]:
    """Measure once, after a short run that determines how many steps fill the time; each agreement counts with all its updates."""
    answers, every = program.run(KINDS[kind].trial), KINDS[kind].every
    seconds = _step_seconds(answers)
    if 2 * seconds < TIMED_SECONDS or every > 1:
        answers = program.run(1 + every * math.ceil(TIMED_SECONDS / seconds / every))
        seconds = _step_seconds(answers)
    labels = WORKLOADS[name].batch()[1]
    sent = [answer["sent_bytes"] for answer in answers]
    return {
        "step_seconds": seconds,
        "epoch_seconds": seconds * EPOCH / len(labels),
        "labels_per_second": labels.size / seconds,
        "bytes_per_sample": sum(sent) / len(labels),
        "bytes_per_update": sum(sent),
        "most_sent": max(sent),
        "waiting": sum(answer["waiting"] for answer in answers) / len(answers),
    }


def _step_seconds(answers: list[dict[str, Any]]) -> float:
    return len(answers) / steps_per_second([answer["ends"] for answer in answers])


def rate_for(share: float, compute_seconds: float, sent_bytes: float) -> float:
    """Return the bits per second at which sending takes a share of a step, if sending and computing do not overlap.

    Args:
        share: share of the time of a step, between 0 and 1.
        compute_seconds: seconds of computation per step.
        sent_bytes: bytes per step of the host that sends most.
    """
    return 8 * sent_bytes * (1 - share) / (share * compute_seconds)


def _print(rows: list[dict[str, Any]], goals: bool) -> None:
    for row in rows:
        if "failed" in row:
            print(f"{row['plan']:<37} not measured: {row['failed']}")
    with_base = {
        row["rate"] for row in rows if row["plan"] == rows[0]["plan"] and "failed" not in row
    }  # rates at which data parallelism was measured
    measured = [row for row in rows if "failed" not in row and row["rate"] in with_base]
    if not measured:
        return
    compute = measured[0]["step_seconds"]
    print(f"batches of {MICROBATCHES} microbatches; an epoch is {EPOCH} samples; data parallel without limit: {compute:.3f} s per step")
    print(f"{'plan':<37} {'Mbit/s':>8} {'s per epoch':>11} {'labels/s':>9} {'speed-up':>9} {'kB/sample':>12} {'less':>7} {'waiting':>8}")
    for rate in dict.fromkeys(row["rate"] for row in measured):
        same = [row for row in measured if row["rate"] == rate]
        base = same[0]  # data parallelism
        for row in same:
            speed_up, less = base["step_seconds"] / row["step_seconds"], 1 - row["bytes_per_sample"] / base["bytes_per_sample"]
            at = "no limit" if rate is None else f"{rate / 1e6:.1f}"
            note = f"  communicates {1 - compute / row['step_seconds']:.0%} of the time" if row is base and rate is not None else ""
            if rate is not None and row["plan"].startswith("data parallel"):
                longest = max(compute, 8 * row["most_sent"] / rate)
                note += f"  {row['step_seconds'] / longest:.2f} of max(compute, communication)"
            elif goals and row is not base and rate == measured[-1]["rate"]:
                met = ("missed", "met")
                note = f"  at least {SPEED_UP:.0f}: {met[speed_up >= SPEED_UP]}; {BYTES_LESS:.0%} less: {met[less >= BYTES_LESS]}"
            print(
                f"{row['plan']:<37} {at:>8} {row['epoch_seconds']:>11.1f} {row['labels_per_second']:>9.0f} {speed_up:>9.2f} "
                f"{row['bytes_per_sample'] / 1e3:>12.1f} {less:>7.1%} {row['waiting']:>8.0%}{note}"
            )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
