"""PipeDream-2BW (ICML 2021): its planner's choice, figures 6 to 9 and appendix B, from GPTs of the paper's sizes.

An analytic profile has the same time per row for every number of rows. GPUs are faster with more rows, which is why the paper recomputes:
to fit larger microbatches. It does not say how much faster, so there are two choices: one without this effect, and one with `HALF_ROWS`,
where b rows take as long as b + `HALF_ROWS` would at the full rate.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.papers.document import Table
from benchmarks.papers.models import topology, transformer_profile, two_blocks, with_blocks
from jpipe.plan import repeats_forward
from jpipe_planner import Profile, Ranked, Topology
from jpipe_planner.cost.simulated import Simulated, simulate_plan
from jpipe_planner.ranking.choose import choose
from jpipe_planner.search.balance import balance
from jpipe_planner.search.candidates import find_candidates

SCHEDULES = ("naive", "gpipe", "pipedream_flush", "pipedream_2bw")
POLICIES = ("none", "full")
"""Recomputation; those of the paper."""
SIZES = (1, 4, 8)
"""Rows of a microbatch."""
MORE_SIZES = (1, 2, 4, 8, 16, 32)
"""Those that the planner chooses from."""
HALF_ROWS = 0.5
PAPER = {
    "GPT, 2.2B": ("v100-16gb-8", 8, (64, 512)),
    "GPT, 3.8B": ("v100-16gb-64", 16, (512, 2048)),
}
"""The topology, the paper's depth, and a small and a large batch: one and several rounds of microbatches."""
RATIOS = (
    ("pipedream_2bw", "pipedream_flush", "2BW ÷ Flush", "up to 1.6, 1.15"),
    ("pipedream_2bw", "gpipe", "2BW ÷ GPipe", "up to 3.2"),
    ("pipedream_2bw", "naive", "2BW ÷ naive", "up to 6.1 (GPT, 2.2B)"),
)
"""Two schedules, and the paper's ratio of their throughputs, for a small and a large batch, from the text of section 5.2."""


def choice() -> list[Table]:
    """Plan 2BW for the GPTs."""
    head = ("model", "batch", "few rows", "paper", "d × w", "microbatch size × m", "stages that recompute", "memory", "samples/s")
    rows = []
    for name, (cluster, depth, batches) in PAPER.items():
        profile = transformer_profile(name, MORE_SIZES, POLICIES)
        for half, label in ((0.0, "as fast"), (HALF_ROWS, "slower")):
            for batch, chosen in best_plans(with_half_rows(profile, half), topology(cluster), batches):
                best = chosen.candidate
                full = sum(policy == "full" for policy in best.policies)
                cells = (
                    f"{best.depth} × {best.replicas[0]}",
                    f"{best.rows} × {best.microbatches // best.replicas[0]}",
                    f"{full} of {best.depth}",
                )
                cells += (_gigabytes(max(best.memory)), f"{best.samples_per_second:.1f}")
                rows.append((name, batch, label, f"d = {depth}, recompute", *cells))
    return [Table("2bw choice", head, rows)]


def best_plans(profile: Profile, where: Topology, batches: Sequence[int]) -> Iterator[tuple[int, Ranked]]:
    """Yield the fastest plan of 2BW that fits for each batch, as (rows between two updates, plan)."""
    for batch in batches:
        yield batch, choose(profile, where, find_candidates(profile, where, batch, schedules=("pipedream_2bw",))).ranked[0]


def with_half_rows(profile: Profile, half: float) -> Profile:
    """Return the profile if b rows took as long as b + half.

    Args:
        profile: with times that are proportional to the rows.
        half: the number of rows that reach half of the rate.
    """

    def slower(layer: Any) -> Any:
        factors = [1 + half / rows for rows in profile.sizes]
        times = [{"forward": at.forward * by, "backward": at.backward * by} for at, by in zip(layer.at, factors, strict=True)]
        return layer.model_copy(update={"at": tuple(at.model_copy(update=new) for at, new in zip(layer.at, times, strict=True))})

    return profile.model_copy(update={"layers": tuple(slower(layer) for layer in profile.layers)})


def figure_6() -> list[Table]:
    """Divide the throughputs of schedules at the paper's depth: all stages recompute, and microbatches are the largest that fit."""
    rows = []
    for name, (cluster, depth, batches) in PAPER.items():
        for batch, size, rates in throughputs(transformer_profile(name, SIZES, POLICIES), topology(cluster), depth, batches):
            ratios = (f"{rates[one] / rates[other]:.2f}" for one, other, *_ in RATIOS)
            rows.append((name, batch, f"{depth} deep, {size} rows", f"{rates['pipedream_2bw']:.1f}", *ratios))
    rows.append(("the paper", "", "", "", *(paper for *_, paper in RATIOS)))
    head = ("model", "batch", "plan", "2BW: samples/s", *(name for _, _, name, _ in RATIOS))
    return [Table("figure 6", head, rows)]


def throughputs(profile: Profile, where: Topology, depth: int, batches: Sequence[int]) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Simulate each schedule under the conditions of figure 6.

    All stages recompute in full, and microbatches are the largest with which 2BW fits and has as many of them as stages.

    Yields:
        (batch, rows of a microbatch, samples per second by schedule)
    """
    for batch in batches:
        width = where.num_devices // depth
        for rows in reversed([rows for rows in profile.sizes if rows * width * depth <= batch]):
            predictions = {name: same_policy(profile, where, name, depth, rows, batch) for name in SCHEDULES}
            if max(predictions["pipedream_2bw"].peak_bytes) <= (where.device.memory or float("inf")):
                yield batch, rows, {name: batch / one.batch_seconds for name, one in predictions.items()}
                break


def same_policy(profile: Profile, where: Topology, schedule: str, depth: int, rows: int, batch: int, policy: str = "full") -> Simulated:
    """Simulate the plan with `depth` stages and one recomputation policy for all of them, even if it does not fit.

    Args:
        profile: of the model.
        where: the topology, all of whose devices are used.
        schedule: a name of `jpipe.schedules.SCHEDULES`.
        depth: the stages.
        rows: of a microbatch.
        batch: rows between two updates.
        policy: of all stages.
    """
    plans = find_candidates(profile, where, batch, schedules=(schedule,))
    wanted = depth, rows, 0, "replicas"
    alike = (c for c in plans if (c.depth, c.rows, c.options.extra_in_flight, c.keep_together) == wanted)
    plan = next(c for c in alike if c.devices == where.num_devices)
    seconds = [(1 + repeats_forward(policy)) * cost.forward + cost.backward for cost in profile.costs(rows).values()]
    plan = dataclasses.replace(plan, policies=(policy,) * depth, starts=balance(seconds, depth))
    result = simulate_plan(plan.plan(profile.ids), profile.stage_costs(plan.plan(profile.ids), rows), where)
    assert result is not None, "too long to simulate"
    return result


FIGURE_7 = (("none", 64, 1), ("none", 64, 4), ("none", 64, 8), ("full", 64, 1), ("full", 64, 4), ("full", 64, 8), ("full", 256, 4))
"""Recomputation, batch and rows of a microbatch."""


def figure_7() -> list[Table]:
    """Simulate the peak memory of a GPU with the GPT of 2.2B in 8 stages."""
    where, profile = topology("v100-16gb-8"), transformer_profile("GPT, 2.2B", SIZES, POLICIES)
    limit = where.device.memory or float("inf")
    rows = []
    for policy, batch, size in FIGURE_7:
        peak_bytes = peaks(profile, where, 8, size, batch, policy).values()
        cells = (f"{_gigabytes(peak)}{'' if peak <= limit else ', too much'}" for peak in peak_bytes)
        rows.append((policy, batch, size, *cells))
    return [Table("figure 7", ("recompute", "batch", "rows of a microbatch", *SCHEDULES, "pipedream"), rows)]


APPENDIX_B = ("GPT, 1.3B", "GPT, 2.2B")
"""Models whose recomputation is compared, in eight stages on eight GPUs."""

APPENDIX_B_ROWS = 1, 2, 16
"""Sizes of their microbatches."""


def appendix_b() -> list[Table]:
    """Simulate 2BW with and without recomputation by the rows of a microbatch."""
    where, rows = topology("v100-16gb-8"), []
    limit = where.device.memory or float("inf")
    for name in APPENDIX_B:
        even = transformer_profile(name, MORE_SIZES, POLICIES)
        for size in APPENDIX_B_ROWS:
            cells = list[str]()
            for policy in POLICIES:
                run = same_policy(even, where, "pipedream_2bw", 8, size, 8 * size, policy)
                peak = max(run.peak_bytes)
                cells += [f"{8 * size / run.batch_seconds:.1f}", f"{_gigabytes(peak)}{'' if peak <= limit else ', too much'}"]
            rows.append((name, size, *cells))
    each = ("samples/s", "memory")
    return [Table("appendix B", ("model", "rows", *(f"{policy}: {name}" for policy in POLICIES for name in each)), rows)]


def peaks(profile: Profile, where: Topology, depth: int, rows: int, batch: int, policy: str) -> dict[str, float]:
    """Return the peak bytes of the fullest device by schedule; PipeDream updates after each microbatch."""
    batches = {**dict.fromkeys(SCHEDULES, batch), "pipedream": rows}
    return {name: max(same_policy(profile, where, name, depth, rows, size, policy).peak_bytes) for name, size in batches.items()}


FIGURE_8 = ((4, 1), (4, 8), (8, 8), (8, 32))
"""Depth and rows of a microbatch."""


def figure_8() -> list[Table]:
    """Simulate 2BW for the GPT of 1.3B on 64 GPUs by depth, microbatch and batch; stages recompute."""
    where, profile = topology("v100-16gb-64"), transformer_profile("GPT, 1.3B", (1, 8, 32), POLICIES)
    limit = where.device.memory or float("inf")
    rows = []
    for depth, size in FIGURE_8:
        cells, peak = list[str](), 0.0
        for batch in (512, 1024, 2048):
            if batch < size * where.num_devices:  # fewer microbatches than stages
                cells.append("")
                continue
            result = same_policy(profile, where, "pipedream_2bw", depth, size, batch)
            peak = max(peak, *result.peak_bytes)
            cells.append(f"{batch / result.batch_seconds:.0f}")
        rows.append((depth, size, *cells, f"{_gigabytes(peak)}{'' if peak <= limit else ', too much'}"))
    return [Table("figure 8", ("d", "b", "batch 512", "batch 1,024", "batch 2,048", "memory"), rows)]


FIGURE_9 = (1, 8)
"""Rows of a microbatch: the paper does not say how many, so one and those of figure 6."""


def figure_9() -> list[Table]:
    """Find the largest GPT of the width of 3.8B that 2BW trains on 64 GPUs, by depth."""
    where = topology("v100-16gb-64")
    largest = {rows: largest_models(two_blocks("GPT, 3.8B", FIGURE_9, POLICIES), where, rows) for rows in FIGURE_9}
    head = ("d", *(f"microbatches of {rows} row{'s' if rows > 1 else ''}" for rows in FIGURE_9))
    cells = [(depth, *(f"{largest[rows][depth] / 1e9:.1f}B" for rows in FIGURE_9)) for depth in largest[FIGURE_9[0]]]
    return [Table("figure 9", head, cells)]


def largest_models(profile: Profile, where: Topology, rows: int) -> dict[int, float]:
    """Find the most parameters with which 2BW fits, by depth, with as many microbatches as stages and recomputation as needed.

    Args:
        profile: with two blocks, repeated as often as they fit.
        where: the topology.
        rows: of a microbatch.
    """
    batch, models = rows * where.num_devices, dict[int, float]()

    @functools.cache
    def fitting_depths(blocks: int) -> frozenset[int]:
        plans = find_candidates(with_blocks(profile, blocks, (rows,)), where, batch, schedules=("pipedream_2bw",))
        return frozenset(c.depth for c in plans if c.over is None)

    depth = 1
    while depth <= where.num_devices:
        fits, fails = 0, depth  # as many blocks can be cut into as many stages
        while depth in fitting_depths(fails):
            fits, fails = fails, 2 * fails
        while fails - fits > 1:
            blocks = (fits + fails) // 2
            fits, fails = (blocks, fails) if depth in fitting_depths(blocks) else (fits, blocks)
        models[depth] = parameters(with_blocks(profile, fits, (rows,))) if fits else 0.0
        depth *= 2
    return models


def parameters(profile: Profile) -> float:
    """Count the parameters; each takes two bytes."""
    return sum(layer.weights for layer in profile.layers) / 2


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
