"""What the planner says of the experiments of PipeDream-2BW (ICML 2021), section 5, beside the paper's words; no GPU is needed.

    python -m benchmarks.planner.paper_2bw

Two GPTs are profiled on paper for the V100 (a minute each), then all plans are swept. The paper tells depths and ratios, no seconds.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.planner.models import gpt, mixed_precision_adam
from planner.analyze import analyze
from planner.candidate import Candidate
from planner.parallel import sweep
from planner.profile import Profile
from planner.topology import Topology

MODELS = {"2.2B": (48, 1920, 20, "v100-16gb-8", (8, 64, 512)), "3.8B": (48, 2560, 20, "v100-16gb-64", (64, 512, 2048))}
"""Blocks, width, heads, topology, batches."""
SIZES = (1, 2, 4, 8, 16)
PAPER = (
    "The paper: depth 8 for 2.2B, depth 16 for 3.8B, both with recomputation. 2BW up to 3.2 times as fast as GPipe, 1.6 times as Flush "
    "at small batches and 1.15 times at large ones, up to 6.1 times as naive. GPipe runs out of memory at batch 64 for 2.2B, PipeDream "
    "does not fit. Almost 30B parameters on 64 GPUs."
)


def main() -> None:
    """Print three tables."""
    print(PAPER)
    for name, (blocks, width, heads, file, batches) in MODELS.items():
        topology = Topology.from_yaml((Path("configs/topologies") / f"{file}.yaml").read_text(encoding="utf-8"))
        profile = analyze(*gpt(blocks, width, heads), mixed_precision_adam(), SIZES, topology.device)
        print(f"\n{name} ({parameters(profile) / 1e9:.2f}B in all) on {topology.name}, the best plan of each schedule\n")
        table(("batch", "schedule", "d × w", "rows", "recompute", "memory", "samples/s", "2BW is"), best_plans(profile, topology, batches))
        print("\nThe same with one microbatch between updates, as PipeDream has it: ", end="")
        print(*(describe(c) for c in one_microbatch(profile, topology)[:1]))
    print("\nThe largest GPT of this width that 2BW trains on the 64 GPUs, by depth\n")
    table(("d", "blocks", "parameters"), largest_models(profile, topology))


def best_plans(profile: Profile, topology: Topology, batches: Sequence[int]) -> list[tuple[str, ...]]:
    """A row for each schedule and batch: the best plan, and how much faster that of 2BW is."""
    rows = []
    for batch in batches:
        fastest: dict[str, Candidate] = {}
        for candidate in sweep(profile, topology, batch, exact=True):
            if candidate.over is None:
                fastest.setdefault(candidate.schedule, candidate)
        for schedule, c in fastest.items():
            speed = fastest["pipedream_2bw"].samples_per_second / c.samples_per_second if "pipedream_2bw" in fastest else float("nan")
            memory = f"{max(c.memory) / 1e9:.1f} GB"
            shape = f"{c.depth} × {c.replicas[0]}"
            policies = ", ".join(sorted(set(c.policies)))
            rows.append((str(batch), schedule, shape, str(c.rows), policies, memory, f"{c.samples_per_second:.1f}", f"{speed:.2f} ×"))
    return rows


def one_microbatch(profile: Profile, topology: Topology) -> list[Candidate]:
    """PipeDream with an update after each microbatch of a straight pipeline, the one that lacks least first."""
    found = [c for rows in profile.sizes for c in sweep(profile, topology, rows, exact=True, schedules=("pipedream",))]
    return sorted((c for c in found if c.microbatches == 1), key=lambda c: c.rank)


def describe(candidate: Candidate) -> str:
    """Whether it fits."""
    where = f"{candidate.depth} stages, {candidate.rows} rows, {', '.join(sorted(set(candidate.policies)))}"
    if candidate.over is None:
        return f"{where}: {max(candidate.memory) / 1e9:.1f} GB"
    return f"{where}: stage {candidate.over[0]} lacks {candidate.over[1] / 1e9:.1f} GB"


def largest_models(profile: Profile, topology: Topology) -> list[tuple[str, ...]]:
    """For each depth the most blocks that fit, with one row a microbatch and the recomputation that it takes."""
    rows = []
    depth = 1
    while depth <= topology.num_workers:
        fits, fails = 0, 1024
        while fails - fits > 1:
            blocks = (fits + fails) // 2
            longer = with_blocks(profile, blocks)
            found = sweep(longer, topology, topology.num_workers, schedules=("pipedream_2bw",))
            enough = any(c.over is None and c.depth == depth for c in found)
            fits, fails = (blocks, fails) if enough else (fits, blocks)
        rows.append((str(depth), str(fits), f"{parameters(with_blocks(profile, fits)) / 1e9:.1f}B"))
        depth *= 2
    return rows


def with_blocks(profile: Profile, count: int) -> Profile:
    """A GPT with as many of the same blocks, at the smallest microbatch; equal layers need no profile of their own."""
    first, block, last = (layer.model_copy(update={"at": layer.at[:1]}) for layer in (profile.layers[n] for n in (0, 1, -1)))
    blocks = [block.model_copy(update={"id": f"block_{n}"}) for n in range(count)]
    smallest = {name: getattr(profile, name)[:1] for name in ("sizes", "inputs", "labels")}
    return Profile(**{**dict(profile), **smallest, "layers": (first, *blocks, last)})


def parameters(profile: Profile) -> float:
    """How many; each takes two bytes."""
    return sum(layer.weights for layer in profile.layers) / 2


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print as Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
