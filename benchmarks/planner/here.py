"""Run plans of the default GPT over two and four processes of this machine: predicted, measured, and the planner's choice.

All plans that use every process with a batch of 32: each cut, schedule and number of pipelines, microbatches of 4, 8 and 16 rows, and for
PipeDream any replicas; without recomputation or additional microbatches in flight, which would make thousands of plans. Each process has
a core; with four processes, two share one. Process 0 profiles the layers on its core; nothing else is fitted to the machine. The speed of
a shared machine varies by a fifth from minute to minute. So each measurement is corrected for the speed of the cores right before and
after it, relative to their speed during profiling; both are printed.
"""

import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import jpipe
from benchmarks.peers.__main__ import ENVIRONMENT
from benchmarks.planner.plan_runner import BATCH, MODEL, SIZES
from benchmarks.programs import Program, ProgramFailed, free_port, python_module
from jpipe_lm.models import layers
from jpipe_planner import Profile, Topology
from jpipe_planner.cost.shape import is_planned
from jpipe_planner.cost.simulated import Simulated, simulate_plan
from jpipe_planner.ranking.choose import choose
from jpipe_planner.search.candidates import find_candidates

COUNTS = (2, 4)
SECONDS = 2.5  # that a plan is measured for, at least eight steps
UNEVEN = ("pipedream",)  # schedules whose stages may have different replicas here; each is legal with all, which would take hours


class Row(NamedTuple):
    """The measurement of one plan.

    Attributes:
        plan: what was run.
        rows: of a microbatch.
        predicted: from the profile.
        measured: seconds per step.
        slower: how many times as long as at the time of the profile the cores needed, meanwhile, for one and the same computation.
        peaks: bytes, by rank.
    """

    plan: jpipe.Plan
    rows: int
    predicted: Simulated
    measured: float
    slower: float
    peaks: dict[int, int]

    @property
    def seconds(self) -> float:
        """The measured seconds, corrected to cores as fast as they were for the profile."""
        return self.measured / self.slower

    @property
    def time_ratio(self) -> float:
        """The measured seconds divided by the predicted ones."""
        return self.seconds / self.predicted.batch_seconds

    @property
    def memory_ratio(self) -> float:
        """The measured bytes divided by the predicted ones, on the rank where they differ most."""
        return max((self.peaks[rank] / self.predicted.peak_bytes[rank] for rank in self.peaks), key=lambda ratio: abs(ratio - 1))


def name_of(plan: jpipe.Plan, rows: int) -> str:
    """Format schedule, replicas, microbatches, and the first layer of each stage: `pipedream 2·1·1, 8 × 4 rows, 0 1 2`."""
    starts = [0, *itertools.accumulate(len(stage.layers) for stage in plan.stages)][:-1]
    return f"{plan.schedule} {'·'.join(map(str, plan.replicas))}, {plan.microbatches} × {rows} rows, {' '.join(map(str, starts))}"


def main(names: tuple[str, ...] = (), counts: tuple[int, ...] = COUNTS, every: Sequence[int] = (1, 4)) -> list[dict[str, Any]]:
    """Measure, print and return the figures.

    Args:
        names: only plans whose names contain one of them.
        counts: of processes.
        every: for each count, of how many plans one is measured: of four processes there are hundreds.
    """
    return [_measure(count, names, one_of) for count, one_of in zip(counts, every, strict=False)]


def legal_plans(workers: int) -> Iterator[tuple[jpipe.Plan, int]]:
    """Yield all plans of the default GPT on a number of workers with the default batch, each with the rows of a microbatch."""
    ids = layers.layers(MODEL).ids
    for depth in range(1, min(workers, len(ids)) + 1):
        splits = [split for split in itertools.product(range(1, workers + 1), repeat=depth) if sum(split) == workers]
        cuts = list(itertools.combinations(range(1, len(ids)), depth - 1))
        for rows, replicas, cut, schedule in itertools.product(SIZES, splits, cuts, filter(is_planned, jpipe.schedules.SCHEDULES)):
            if (depth == 1 and schedule != "pipedream_flush") or (len(set(replicas)) > 1 and schedule not in UNEVEN):
                continue
            starts = (0, *cut, len(ids))
            stages = [{"layers": ids[a:b], "replicas": r} for a, b, r in zip(starts, starts[1:], replicas, strict=False)]
            try:
                yield jpipe.Plan(schedule=schedule, microbatches=BATCH // rows, stages=stages), rows
            except jpipe.InputError:  # a number of replicas that does not divide the microbatches, too few microbatches for 2BW
                continue


def _measure(count: int, names: tuple[str, ...], one_of: int) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    port = free_port()
    commands = [python_module("benchmarks.planner.plan_runner", index, count, port) for index in range(count)]
    measurements: list[Row] = []
    with Program("plans", commands, [cores[index % len(cores)] for index in range(count)], ENVIRONMENT) as program:
        facts_of_all = program.facts()
        facts = facts_of_all[0]
        profile = Profile(**facts["profile"])
        topology = Topology(**(facts["topology"] | {"cores": len(cores)}))
        print(f"{count} processes on {len(cores)} cores: {profile.dispatch * 1e6:.0f} µs a dispatch, links {topology.levels[0]}")
        plans = list(legal_plans(count))
        for plan, rows in plans[::one_of]:
            if names and not any(name in name_of(plan, rows) for name in names):
                continue
            roughly = simulate_plan(plan, profile.stage_costs(plan, rows), topology)
            steps = 8 if roughly is None else max(8, round(SECONDS / roughly.batch_seconds))
            try:
                answers = program.ask(json.dumps({"plan": plan.model_dump(mode="json"), "steps": steps}))
            except ProgramFailed as error:
                sys.exit(f"bench-planner: {name_of(plan, rows)}, after {len(measurements)} plans: {error}")
            predicted = simulate_plan(plan, _costs(profile, plan, rows, answers), topology)
            assert predicted is not None
            slower = statistics.fmean(answer["pace"] / profiled["pace"] for answer, profiled in zip(answers, facts_of_all, strict=True))
            seconds = statistics.fmean(statistics.median(np.diff(answer["ends"]).tolist()) for answer in answers)
            peaks = {int(rank): size for answer in answers for rank, size in answer["peaks"].items()}
            measurements.append(Row(plan, rows, predicted, seconds, slower, peaks))
            _print(measurements[-1])
    return {"legal plans": len(plans), **_summary(count, measurements, profile, topology)}


def _costs(profile: Profile, plan: jpipe.Plan, rows: int, answers: list[dict[str, Any]]) -> list[jpipe.programs.StageCost]:
    """Combine times from the profile with sizes from the compiled stages, as `jpipe plan` does in the end."""
    times = profile.stage_costs(plan, rows)
    costs = []
    for s, (size, time) in enumerate(zip(answers[0]["costs"], times, strict=True)):
        temporary = max(answer["costs"][s]["temporary"] for answer in answers)
        fields = {"temporary": temporary, "forward": time.forward, "backward": time.backward, "update": time.update}
        costs.append(jpipe.programs.StageCost(**{**size, **fields}))
    return costs


def _print(row: Row) -> None:
    print(
        f"{name_of(row.plan, row.rows):<52} predicted {row.predicted.batch_seconds * 1e3:7.1f} ms  measured {row.measured * 1e3:7.1f} ms  "
        f"cores {row.slower:.2f}  {row.time_ratio:.2f}  memory {row.memory_ratio:.2f}",
        flush=True,
    )


def _summary(count: int, rows: list[Row], profile: Profile, topology: Topology) -> dict[str, Any]:
    predicted = [BATCH / row.predicted.batch_seconds for row in rows]
    measured, raw = [BATCH / row.seconds for row in rows], [BATCH / row.measured for row in rows]
    ratios = [row.time_ratio for row in rows]
    memory_ratios = [row.memory_ratio for row in rows]
    worst = max(rows, key=lambda row: abs(row.time_ratio - 1))
    memory = max(rows, key=lambda row: abs(row.memory_ratio - 1))
    best = min(rows, key=lambda row: row.seconds)
    choice = choose(profile, topology, find_candidates(profile, topology, BATCH))
    first = choice.plan(choice.ranked[0])
    chosen = next((row for row in rows if _same(first, row.plan)), None)  # None: the planner's choice is not among those measured
    figures: dict[str, Any] = {
        "processes": count,
        "plans": len(rows),
        "correlation": float(np.corrcoef(predicted, measured)[0, 1]),
        "correlation as measured": float(np.corrcoef(predicted, raw)[0, 1]),
        "median ratio": statistics.median(ratios),
        "median ratio as measured": statistics.median(row.measured / row.predicted.batch_seconds for row in rows),
        "within 15%": sum(abs(ratio - 1) <= 0.15 for ratio in ratios) / len(ratios),
        "memory within 5%": sum(abs(ratio - 1) <= 0.05 for ratio in memory_ratios) / len(rows),
        "worst": [name_of(worst.plan, worst.rows), worst.time_ratio],
        "worst memory": [name_of(memory.plan, memory.rows), memory.memory_ratio],
        "best measured": [name_of(best.plan, best.rows), best.seconds],
        "chosen": None if chosen is None else [name_of(chosen.plan, chosen.rows), chosen.seconds, chosen.seconds / best.seconds],
    }
    for name, figure in figures.items():
        print(f"  {name}: {figure}")
    return figures


def _same(plan: jpipe.Plan, other: jpipe.Plan) -> bool:
    return plan.model_copy(update={"predicted": None}) == other
