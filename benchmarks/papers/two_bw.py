"""PipeDream-2BW (ICML 2021): figures 6, 7 and 8, from the GPTs and BERTs of the paper's sizes."""

from typing import Any

from benchmarks.papers.document import Table
from benchmarks.papers.models import topology, transformer_profile
from benchmarks.planner.paper_2bw import SCHEDULES, recomputing, speed_ups
from planner.profile.profile import Profile

SIZES = (1, 4, 8)
"""Rows of a microbatch."""
POLICIES = ("none", "full")
FIGURE_6 = {
    "GPT, 2.2B": ("v100-16gb-8", 8, (64, 512)),
    "GPT, 3.8B": ("v100-16gb-64", 16, (512, 2048)),
    "BERT, 2.2B": ("v100-16gb-8", 8, (64, 512)),
    "BERT, 3.8B": ("v100-16gb-64", 16, (512, 2048)),
}
"""The topology, the paper's depth, and a small and a large batch."""
RATIOS = (("pipedream_flush", "up to 1.6, 1.15"), ("gpipe", "up to 3.2"), ("naive", "up to 6.1 (GPT, 2.2B)"))
"""By what 2BW is divided, and the paper's ratio."""


def _profile(name: str, sizes: tuple[int, ...] = SIZES) -> Profile:
    return transformer_profile(name, sizes, POLICIES)


def figure_6() -> list[Table]:
    """2BW beside the other schedules at the paper's depth: all stages recompute, and microbatches are the largest that fit."""
    rows = []
    for name, (cluster, depth, batches) in FIGURE_6.items():
        for found in speed_ups(_profile(name), topology(cluster), depth, batches):
            rates: dict[str, Any] = found["samples_per_second"]
            ratios = (f"{rates['pipedream_2bw'] / rates[other]:.2f}" for other, _ in RATIOS)
            rows.append((name, found["batch"], f"{depth} deep, {found['rows']} rows", f"{rates['pipedream_2bw']:.1f}", *ratios))
    rows.append(("the paper", "", "", "", *(paper for _, paper in RATIOS)))
    head = ("model", "batch", "plan", "2BW: samples/s", "2BW ÷ Flush", "2BW ÷ GPipe", "2BW ÷ naive")
    return [Table("figure 6", head, rows)]


def figure_7() -> list[Table]:
    """Peak memory of a GPU with the GPT of 2.2B in 8 stages, which recompute."""
    where, profile = topology("v100-16gb-8"), _profile("GPT, 2.2B")
    columns = (*SCHEDULES, "pipedream")
    rows = []
    for batch, size in ((64, 1), (64, 4), (64, 8), (256, 4)):
        batches = [batch] * len(SCHEDULES) + [size]  # PipeDream updates after each microbatch
        found = (recomputing(profile, where, name, 8, size, own) for name, own in zip(columns, batches, strict=True))
        rows.append((batch, size, *(f"{max(one.peak_bytes) / 1e9:.1f} GB" for one in found)))
    return [Table("figure 7", ("batch", "rows of a microbatch", *columns), rows)]


FIGURE_8 = ((4, 1), (4, 8), (8, 8), (8, 32))
"""Depth and rows of a microbatch."""


def figure_8() -> list[Table]:
    """The GPT of 1.3B on 64 GPUs: throughput of 2BW by depth, microbatch and batch; stages recompute."""
    where, profile = topology("v100-16gb-64"), _profile("GPT, 1.3B", (1, 8, 32))
    limit = where.device.memory or float("inf")
    rows = []
    for depth, size in FIGURE_8:
        cells, peak = list[str](), 0.0
        for batch in (512, 1024, 2048):
            if batch < size * where.num_devices:  # fewer microbatches than stages
                cells.append("")
                continue
            found = recomputing(profile, where, "pipedream_2bw", depth, size, batch)
            peak = max(peak, *found.peak_bytes)
            cells.append(f"{batch / found.batch_seconds:.0f}")
        rows.append((depth, size, *cells, f"{peak / 1e9:.1f} GB{'' if peak <= limit else ', too much'}"))
    return [Table("figure 8", ("d", "b", "batch 512", "batch 1,024", "batch 2,048", "memory"), rows)]
