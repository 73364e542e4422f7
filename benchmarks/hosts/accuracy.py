"""`python -m benchmarks.hosts.accuracy`: train by data parallelism and by the planned pipeline to one validation loss on slow links.

Small VGG-16, GNMT-8 and AWD-LM learn generated samples over two and four hosts, network namespaces with a process each, whose
links have a fixed rate. The planner chooses the pipeline from a profile of one core of this machine, for that rate. Both runs have the same
first weights, batches, optimizer and learning rate. The time of validation is not counted.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jpipe
from benchmarks.hosts import accuracy_draw
from benchmarks.hosts.__main__ import ENVIRONMENT
from benchmarks.hosts.network import Network, NoNetwork
from benchmarks.hosts.tasks import TASKS, load, plans
from benchmarks.machine import describe
from benchmarks.papers.document import Table, write
from benchmarks.programs import Program, ProgramFailed, python_module
from docs import style
from examples.papers.samples import make
from jpipe_planner import Profile, Ranked

PLACE = "time to accuracy"  # in the document
RESULTS = Path(__file__).parent / "accuracy.json"  # what the table of the page is made from, where it exists
PICTURE = "time-to-accuracy.svg"
_COMPILING, _TRAINING = 600.0, 300.0  # seconds that a program may take to be ready, and for the steps between two validations


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the results.

    Args:
        arguments: of the command line, by default those of this process.
    """
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed, too
    results: dict[str, Any] = {"machine": describe(), "runs": _earlier_runs(options) if options.keep else []}
    try:
        with tempfile.TemporaryDirectory() as folder:
            _measure(options, Path(folder), results)
    except (NoNetwork, ProgramFailed, jpipe.InputError) as error:
        print(f"bench-accuracy: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the hosts are removed", file=sys.stderr)
        return 130
    results["runs"].sort(key=lambda run: (list(TASKS).index(run["task"]), run["hosts"]))  # stable: data parallelism stays first
    runs_table = table(results["runs"])
    print(f"\n{runs_table.text}")
    if options.document:
        write(options.document, {runs_table.name: runs_table.text})
    if options.pictures:
        style.write(accuracy_draw.draw(runs_table), options.pictures / PICTURE)
    print(f"written to {options.json}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts.accuracy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], choices=(2, 4), help="default: 2 4")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), help="default: all")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/accuracy.json"), help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="keep what that file has of other tasks and numbers of hosts")
    parser.add_argument("--document", type=Path, metavar="FILE", help="put the table into this document, in place of its own")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help=f"write {PICTURE} there; by default nothing is drawn")
    return parser.parse_args(arguments)


def _earlier_runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the runs of an earlier measurement that this one does not repeat.

    Raises:
        SystemExit: the file cannot be read, or is none of this benchmark.
    """
    try:
        runs = json.loads(options.json.read_text(encoding="utf-8"))["runs"]
        return [run for run in runs if run["task"] not in options.tasks or run["hosts"] not in options.hosts]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"bench-accuracy: --keep: cannot read '{options.json}': {error!r}; measure everything")


def _measure(options: argparse.Namespace, folder: Path, results: dict[str, Any]) -> None:
    """Run both plans for each task and number of hosts, and write the results after each run.

    Raises:
        NoNetwork, ProgramFailed, jpipe.InputError: it cannot continue.
    """
    for name in options.tasks:
        make.make(TASKS[name].sample, str(folder / TASKS[name].sample), 0, lambda _: None)
    profiles = {name: _profile(name, folder) for name in options.tasks}
    for hosts in options.hosts:
        with Network(hosts) as network:
            for name in options.tasks:
                for kind, ranked, chosen in _chosen(name, folder, profiles[name], hosts):
                    results["runs"].append(_train(network, name, folder, kind, ranked, profiles[name].ids) | {"chosen": chosen})
                    options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _profile(name: str, folder: Path) -> Profile:
    """Profile a task on one idle core."""
    begin, core = time.monotonic(), min(os.sched_getaffinity(0))
    with Program(name, [python_module("benchmarks.hosts.profile_program", name, folder)], [core], ENVIRONMENT) as program:
        profile = Profile.from_json(program.facts(_COMPILING)[0]["profile"])
    print(f"… {name}: profiled in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return profile


def _chosen(name: str, folder: Path, profile: Profile, hosts: int) -> list[tuple[str, Ranked, bool]]:
    """Return data parallelism and the best pipeline, each with whether it is the planner's choice."""
    task = TASKS[name]
    ranked = plans(load(task, folder), profile, hosts, task.rate, len(os.sched_getaffinity(0)))
    best = [next(one for one in ranked if (one.candidate.depth == 1) == alone) for alone in (True, False)]
    return [(kind, one, one is ranked[0]) for kind, one in zip(("data parallelism", "pipeline"), best, strict=True)]


def _train(network: Network, name: str, folder: Path, kind: str, ranked: Ranked, ids: tuple[str, ...]) -> dict[str, Any]:
    """Run once, until the target or the greatest number of steps."""
    task, hosts, cores = TASKS[name], len(network.hosts), sorted(os.sched_getaffinity(0))
    batch = ranked.candidate.batch
    plan = ranked.candidate.plan(ids)
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    shared = (name, folder, folder / "plan.json", hosts)
    commands = [
        network.command(host, python_module("benchmarks.hosts.accuracy_program", *shared, host, f"{network.address(0)}:29500"))
        for host in network.hosts
    ]
    environment = {**ENVIRONMENT, "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    begin, curve, sent = time.monotonic(), list[dict[str, float]](), [0] * hosts
    network.limit(None)
    with Program(f"{name}, {kind}", commands, [cores[host % len(cores)] for host in network.hosts], environment) as program:
        program.facts(_COMPILING)
        ready = time.monotonic() - begin
        network.limit(task.rate)
        for steps in range(0, task.most + 1, task.every):
            answers = program.ask(str(task.every if steps else 0), _TRAINING)
            duration = max(answer["seconds"] for answer in answers) if steps else 0.0
            seconds = curve[-1]["seconds"] + duration if curve else 0.0
            sent = [total + answer["sent_bytes"] * (steps > 0) for total, answer in zip(sent, answers, strict=True)]
            curve.append({"samples": steps * batch, "seconds": seconds, "loss": answers[0]["val_loss"]})
            if curve[-1]["loss"] <= task.target:
                break
    print(f"… {name}, {hosts} hosts, {kind}: {ready:.0f} s until ready, {seconds:.0f} s of steps", file=sys.stderr, flush=True)
    last = curve[-1]
    return {
        **{"task": name, "hosts": hosts, "kind": kind, "plan": shown(plan), "rate": task.rate, "target": task.target, "curve": curve},
        "reached": last["loss"] <= task.target,
        "samples_per_second": last["samples"] / last["seconds"],
        "predicted_samples_per_second": ranked.samples_per_second,
        "bytes_per_sample": sum(sent) / last["samples"],
        "link_busy": 8 * max(sent) / task.rate / last["seconds"],
    }


def shown(plan: jpipe.Plan) -> str:
    """Format schedule, replicas and cuts: "2BW 1-1, cut before fc6".

    Args:
        plan: one of data parallelism or of a pipeline.
    """
    names = {"pipedream": "PipeDream", "pipedream_2bw": "2BW", "pipedream_flush": "Flush"}
    if plan.depth == 1:
        return f"{plan.replicas[0]} replicas, {plan.microbatches} microbatches"
    cuts = ", ".join(stage.layers[0] for stage in plan.stages[1:])
    replicas = "-".join(map(str, plan.replicas))
    return f"{names[plan.schedule]} {replicas}, cut before {cuts}; {plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''}"


def table(runs: Sequence[dict[str, Any]]) -> Table:
    """Return a row for each run, data parallelism before the pipeline that is compared with it.

    Args:
        runs: of `main`'s JSON.
    """
    head = ("model", "hosts", "rate", "plan", "samples", "seconds", "speed-up", "predicted")
    base: dict[tuple[str, int], dict[str, Any]] = {}
    rows = []
    for run in runs:
        key = run["task"], run["hosts"]
        last, first = run["curve"][-1], base.setdefault(key, run)
        is_base = first is run
        compared = [f"{first['curve'][-1]['seconds'] / last['seconds']:.2f}"] if run["reached"] and first["reached"] else ["not reached"]
        compared += [f"{run['predicted_samples_per_second'] / first['predicted_samples_per_second']:.2f}"]
        rows.append(
            (
                *(
                    run["task"],
                    run["hosts"],
                    f"{run['rate'] / 1e6:g} Mbit/s",
                    run["plan"] + ("" if is_base or run["chosen"] else " (not chosen)"),
                ),
                *(f"{last['samples']:,}", f"{last['seconds']:.1f}"),
                *(("", "") if is_base else compared),
            )
        )
    return Table(PLACE, head, rows)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
