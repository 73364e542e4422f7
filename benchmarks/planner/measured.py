"""Run ten plans of different kinds of a small GPT on this machine: predicted and measured seconds of a batch, and peak memory.

`main` runs them on CPU devices of this process, and on one of each of two processes that `jpipe launch` starts. All of it is measured as
`jpipe plan` measures it: the layers on one device, how devices slow each other down, and the links. Nothing is fitted. The speed of a
shared machine varies by a third within minutes. So all of it is measured before the first round and after each round, each plan runs once
in each round, and a run is compared with the mean of the predictions before and after it; the median of the rounds counts.

    python -m benchmarks.planner measured
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

import jpipe
from benchmarks.planner.markdown import print_table
from jpipe_planner import Topology, local_topology
from jpipe_planner.cost.simulated import Simulated, simulate_plan
from jpipe_planner.ranking import table
from jpipe_train.assemble.build import force_cpu_devices
from jpipe_train.config import config_file
from jpipe_train.console.options import Process
from jpipe_train.console.progress import Reporter
from jpipe_train.data import data
from jpipe_train.launch import distributed
from jpipe_train.launch.local import launch
from jpipe_train.launch.local.launch_request import Request
from jpipe_train.launch.team import Team, joined
from jpipe_train.plan.profiling import Parts, cores_of, profile_together
from jpipe_train.plan.trial import Running
from jpipe_train.report.performance.comparison import temporary_of_ranks

CONFIG, BATCH = "configs/gpt-bytes.yaml", 16
SMALLER = (f"train.batch_size={BATCH}", "model.width=256", "model.seq_len=64", "plan.file=auto")
DEVICES = 4  # of one process
ROUNDS = 5
_CONNECT, _WAIT = 300.0, 600.0  # seconds
_TIMES = ("forward", "backward", "backward_input", "backward_weight", "update")


class Row(NamedTuple):
    """The measurement of a plan.

    Attributes:
        name: of the plan.
        plan: the plan.
        costs: of its compiled stages, with exact bytes.
        predictions: of the planner, before the first round and after each round.
        rounds: seconds of a batch in each round, those of the slowest process.
        peaks: bytes of each rank.
    """

    name: str
    plan: jpipe.Plan
    costs: Sequence[jpipe.programs.StageCost]
    predictions: list[Simulated]
    rounds: list[float]
    peaks: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """The measured seconds divided by the predicted ones, the median of the rounds."""
        return statistics.median(self.ratios)

    @property
    def ratios(self) -> list[float]:
        """For each round the measured seconds divided by the mean of the predictions before and after it."""
        seconds = [each.batch_seconds for each in self.predictions]
        around = zip(self.rounds, seconds[:-1], seconds[1:], strict=True)
        return [measured / ((before + after) / 2) for measured, before, after in around]

    @property
    def seconds(self) -> tuple[float, float]:
        """The predicted and the measured seconds, each the median over the rounds."""
        return statistics.median(each.batch_seconds for each in self.predictions), statistics.median(self.rounds)

    @property
    def memory_ratio(self) -> float:
        """The measured bytes divided by the predicted ones, on the rank where they differ most."""
        ratios = [measured / predicted for measured, predicted in zip(self.peaks, self.predictions[0].peak_bytes, strict=True)]
        return max(ratios, key=lambda ratio: abs(ratio - 1))


def plans(ids: Sequence[str], processes: int) -> dict[str, jpipe.Plan]:
    """Return ten plans of different kinds by name. With these numbers of microbatches their predicted times differ evenly.

    Args:
        ids: the layers.
        processes: with several, each has one device, and all work.
    """

    def even(stages: int, schedule: str, microbatches: int, **fields: Any) -> jpipe.Plan:
        return jpipe.Plan.even(ids, stages, schedule, microbatches, **fields)

    found = {
        "pipedream_2bw": even(2, "pipedream_2bw", 2),
        "pipedream_flush": even(2, "pipedream_flush", 8),
        "data parallel": even(1, "pipedream_flush", BATCH, replicas=2),
        "naive": even(2, "naive", 2),
        "gpipe, recompute": even(2, "gpipe", BATCH, recompute="full"),
        "pipedream, an update for each microbatch": even(2, "pipedream", BATCH, update_every="replicas"),
        "interleaved_1f1b": even(4, "interleaved_1f1b", BATCH, chunks_per_rank=2),
        "data parallel, an update for each microbatch": even(1, "pipedream", BATCH, replicas=2, update_every="replicas"),
    }
    if processes == 1:
        return found | {"one device": even(1, "pipedream_flush", 4), "2 stages of 2 replicas": even(2, "pipedream_flush", 4, replicas=2)}
    return found | {"zb_h1": even(2, "zb_h1", 4), "data parallel, one update late": even(1, "pipedream_2bw", 8, replicas=2)}


class _Traced(Running):
    """A plan that runs, and whose memory can be measured."""

    def peaks(self, costs: Sequence[jpipe.programs.StageCost]) -> tuple[int, ...]:
        """Return the peak bytes of each rank in all processes: of its arrays, and of what its programs need while they run."""
        plan, tracer = self._pipe.plan, jpipe.Tracer(self._pipe.plan)
        for _ in range(2):
            self._state, _ = self._pipe.step(self._state, self._batch, observe=tracer)
        memory, unseen = tracer.finish().memory, temporary_of_ranks(plan, costs)
        held = [max((sample.total for sample in samples), default=0) for samples in memory]
        alone = [held[rank] + unseen[place] if held[rank] else 0 for rank, (place, _) in enumerate(plan.rank_positions)]
        return tuple(int(self._team.largest("the peak of a rank", float(size))) for size in alone)


def main(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print and return the figures for one process and for two."""
    jpipe.keep_freed_memory()
    figures = {"one process": _measured(Team(None), options.rounds)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        program = sys.executable, "-m", "benchmarks.planner.measured", str(options.rounds), str(file)
        if code := launch.main(Request((), 2, pin=True), program=program):
            sys.exit(code)
        figures["two processes"] = json.loads(file.read_text(encoding="utf-8"))
    return figures


def _measured(team: Team, rounds: int) -> dict[str, Any]:
    """Measure in all processes, and print and return the figures in the first one."""
    reporter, load = Reporter(1, 1, "samples", Console(highlight=False, quiet=not team.is_first)), os.getloadavg()[0]
    parts = Parts.of(config_file.load(CONFIG, SMALLER), reporter)
    batch, programs, running = data.load(parts.config).train[0], dict[Any, Any](), list[tuple[Row, _Traced]]()
    for name, plan in plans(parts.stack.ids, 1 if team.processes is None else team.processes.count).items():
        with reporter.phase(f"starting {name}"):
            pipe = parts.pipeline(plan)
            costs = pipe.costs(batch, compiled_for=jax.local_devices()[0], programs=programs)
            one = _Traced(pipe, batch, team)
            running.append((Row(name, plan, costs, [], [], one.peaks(costs)), one))
    _predict([row for row, _ in running], parts, reporter, team)
    with reporter.counting(f"measuring {len(running)} plans, {rounds} rounds") as progress:
        for n in range(rounds):
            for row, one in running:
                row.rounds.append(one.round())
            _predict([row for row, _ in running], parts, reporter, team)
            progress(n + 1, rounds)
    rows = [row for row, _ in running]
    figures = summary(rows) | {"load before": load, "load after": os.getloadavg()[0]}
    if team.is_first:
        _print(rows, figures)
    fields = "name", "rounds", "peaks"
    return figures | {
        "plans": [{n: getattr(row, n) for n in fields} | {"predictions": [*map(dataclasses.asdict, row.predictions)]} for row in rows]
    }


def _predict(rows: Sequence[Row], parts: Parts, reporter: Reporter, team: Team) -> None:
    """Measure the layers, the links and how devices slow each other down; add a prediction to each row."""
    profile, topologies = profile_together(parts, BATCH, DEVICES, reporter, team), dict[int, Topology]()
    for count in (2, DEVICES) if team.processes is None else (2,):
        topologies[count] = local_topology(count, cores=cores_of(parts, profile, count, team))
        reporter.say(f"{count} devices: {table.links(topologies[count])}")
    for row in rows:
        times = profile.stage_costs(row.plan, BATCH // row.plan.microbatches)
        costs = [_with_times(size, time) for size, time in zip(row.costs, times, strict=True)]
        predicted = simulate_plan(row.plan, costs, topologies[max(len(row.plan.rank_workers), 2)])
        assert predicted is not None
        row.predictions.append(predicted)


def _with_times(exact: jpipe.programs.StageCost, estimate: jpipe.programs.StageCost) -> jpipe.programs.StageCost:
    return dataclasses.replace(exact, **{name: getattr(estimate, name) for name in _TIMES})


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how far the predictions are off."""
    predicted, measured = zip(*(row.seconds for row in rows), strict=True)
    ratios = [row.ratio for row in rows]
    return {
        "longest ÷ shortest prediction": max(predicted) / min(predicted),
        "rank correlation": rank_correlation(predicted, measured),
        "median ratio": statistics.median(ratios),
        "worst ratio": max(ratios, key=lambda ratio: abs(np.log(ratio))),
        "worst memory": max((row.memory_ratio for row in rows), key=lambda ratio: abs(ratio - 1)),
    }


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share the mean of their ranks."""
    ranks = [[np.mean(np.flatnonzero(np.sort(values) == value)) for value in values] for values in (np.array(first), np.array(second))]
    return float(np.corrcoef(*ranks)[0, 1])


def _print(rows: Sequence[Row], figures: dict[str, Any]) -> None:
    head = "plan", "predicted", "measured", "measured ÷ predicted", "rounds", "peak memory ÷ predicted"
    lines = []
    for row in sorted(rows, key=lambda row: row.seconds):
        predicted, measured = (f"{1e3 * seconds:.0f} ms" for seconds in row.seconds)
        spread = f"{min(row.ratios):.2f} to {max(row.ratios):.2f}"
        lines.append((row.name, predicted, measured, f"{row.ratio:.2f}", spread, f"{row.memory_ratio:.3f}"))
    print_table(head, lines)
    for name, figure in figures.items():
        print(f"  {name}: {figure:.3g}", flush=True)


def _one_of_several(rounds: int, file: str, coordinator: str, num_processes: int, process_id: int) -> None:
    """Measure as one of the processes that `jpipe launch` starts; the first one writes the figures into a file."""
    jpipe.keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    with joined(distributed.start(Process(coordinator, num_processes, process_id)), _CONNECT, _WAIT) as team:
        force_cpu_devices(1)
        team.start_devices(_CONNECT)
        figures = _measured(team, rounds)
        if team.is_first:
            Path(file).write_text(json.dumps(figures), encoding="utf-8")
    distributed.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int)
    parser.add_argument("file")
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    _one_of_several(**vars(parser.parse_args()))
