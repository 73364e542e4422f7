"""The planner's results for the experiments of PipeDream-2BW (ICML 2021), section 5, beside those of the paper.

Two GPTs get analytic profiles for the V100, then all plans are swept. The paper gives depths and ratios, but no seconds.

An analytic profile has the same time per row for every number of rows. Real GPUs are faster with more rows, which is why the paper
recomputes: to fit larger microbatches. It does not say how much faster, so there are two tables: one without this effect, and one with
`HALF_ROWS`, where b rows take as long as b + `HALF_ROWS` would at the full rate.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planner.markdown import print_table
from benchmarks.planner.models import gpt, mixed_precision_adam
from planner.cost.simulated import Simulated, simulated
from planner.machine.topology import Topology
from planner.profile.analyze import analyze
from planner.profile.profile import LayerProfile, Profile
from planner.search.candidate import Candidate
from planner.search.parallel import sweep

SIZES = (1, 2, 4, 8, 16, 32)
POLICIES = ("none", "full")  # those of the paper
HALF_ROWS = 0.5
LARGEST_ROWS = (1, 8)  # of a microbatch: the fewest, and what the planner takes where it recomputes
SCHEDULES = ("naive", "gpipe", "pipedream_flush", "pipedream_2bw")
MODELS: dict[str, dict[str, Any]] = {
    "2.2B": {"blocks": 48, "width": 1920, "topology": "v100-16gb-8", "depth": 8, "batches": (64, 512)},
    "3.8B": {"blocks": 48, "width": 2560, "topology": "v100-16gb-64", "depth": 16, "batches": (512, 2048)},
}
"""The paper's models, its depths, and a small and a large batch: one and several rounds of d microbatches."""
FIGURE_6 = (
    ("pipedream_2bw", "pipedream_flush", "up to 1.6", "1.15"),
    ("pipedream_2bw", "gpipe", "up to 3.2", ""),
    ("pipedream_2bw", "naive", "up to 6.1 (2.2B)", "up to 6.1 (2.2B)"),
    ("pipedream_flush", "gpipe", "2.1", "3"),
    ("pipedream_flush", "naive", "4.1 (2.2B)", "5.3 (2.2B)"),
)
"""Throughput of one schedule divided by that of another, for a small and a large batch, from the text of section 5.2."""
Row = dict[str, Any]


def main() -> dict[str, list[Row]]:
    """Print the tables and give their figures."""
    figures: dict[str, list[Row]] = {"chosen": [], "speed_ups": [], "memory": []}
    for name, model in MODELS.items():
        topology = Topology.from_yaml((Path("configs/topologies") / f"{model['topology']}.yaml").read_text(encoding="utf-8"))
        device = topology.device
        two = analyze(*gpt(2, model["width"], 20), mixed_precision_adam(), SIZES, device, policies=POLICIES)
        profile = with_blocks(two, model["blocks"])
        for half in (0.0, HALF_ROWS):
            seen = with_half_rows(profile, half)
            figures["chosen"] += [{"model": name, "half_rows": half, **row} for row in chosen(seen, topology, model["batches"])]
        figures["speed_ups"] += [{"model": name, **row} for row in speed_ups(profile, topology, model["depth"], model["batches"])]
        if name == "2.2B":
            figures["memory"] = list(memory(profile, topology, model["depth"], batch=64))
    figures["largest"] = [row for rows in LARGEST_ROWS for row in largest_models(profile, topology, rows)]
    _print(figures)
    return figures


def with_half_rows(profile: Profile, half: float) -> Profile:
    """The same profile if b rows take as long as b + half.

    Args:
        profile: with times that are proportional to the rows.
        half: so many rows reach half of the rate.
    """

    def slower(layer: Any) -> Any:
        factors = [1 + half / rows for rows in profile.sizes]
        times = [{"forward": at.forward * by, "backward": at.backward * by} for at, by in zip(layer.at, factors, strict=True)]
        return layer.model_copy(update={"at": tuple(at.model_copy(update=new) for at, new in zip(layer.at, times, strict=True))})

    return profile.model_copy(update={"layers": tuple(slower(layer) for layer in profile.layers)})


def chosen(profile: Profile, topology: Topology, batches: Sequence[int]) -> Iterator[Row]:
    """The best plan of 2BW for each batch, the best with another depth, and how much slower that one is."""
    for batch in batches:
        fitting = [c for c in sweep(profile, topology, batch, exact=True, schedules=("pipedream_2bw",)) if c.over is None]
        first = fitting[0]
        other = next((c for c in fitting if c.depth != first.depth), None)
        row: Row = {"batch": batch, **_shape(first), "memory": max(first.memory), "samples_per_second": first.samples_per_second}
        if other:
            row["next"] = {**_shape(other), "slower": 1 - other.samples_per_second / first.samples_per_second}
        yield row


def speed_ups(profile: Profile, topology: Topology, depth: int, batches: Sequence[int]) -> Iterator[Row]:
    """Samples per second of each schedule under the conditions of figure 6, simulated.

    All stages recompute in full, and microbatches are the largest with which 2BW fits and has as many of them as stages.
    """
    for batch in batches:
        width = topology.num_devices // depth
        for rows in reversed([rows for rows in profile.sizes if rows * width * depth <= batch]):
            found = {name: recomputing(profile, topology, name, depth, rows, batch) for name in SCHEDULES}
            if max(found["pipedream_2bw"].peak_bytes) <= (topology.device.memory or float("inf")):
                rates = {name: batch / one.batch_seconds for name, one in found.items()}
                yield {"batch": batch, "depth": depth, "rows": rows, "samples_per_second": rates}
                break


def recomputing(profile: Profile, topology: Topology, schedule: str, depth: int, rows: int, batch: int, policy: str = "full") -> Simulated:
    """The plan with `depth` stages and one recomputation policy for all of them, even if it does not fit.

    Args:
        profile: of the model.
        topology: all of whose devices are used.
        schedule: a name of `jpipe.schedules.SCHEDULES`.
        depth: the stages.
        rows: of a microbatch.
        batch: rows between two updates.
        policy: of all stages.
    """
    plans = sweep(profile, topology, batch, exact=True, schedules=(schedule,))
    plan = next(c for c in plans if (c.depth, c.rows, c.extra_in_flight) == (depth, rows, 0) and c.devices == topology.num_devices)
    plan = dataclasses.replace(plan, policies=(policy,) * depth)
    found = simulated(plan.plan(profile.ids), profile.stage_costs(plan.plan(profile.ids), rows), topology)
    assert found is not None, "too long to simulate"
    return found


def memory(profile: Profile, topology: Topology, depth: int, batch: int) -> Iterator[Row]:
    """Peak memory of a device for each schedule, microbatch size and recomputation; PipeDream updates after each microbatch."""
    for policy in POLICIES:
        for rows in profile.sizes:
            if rows * depth > batch:
                break
            row: Row = {"recompute": policy, "rows": rows, "batch": batch}
            for name in SCHEDULES:
                row[name] = max(recomputing(profile, topology, name, depth, rows, batch, policy).peak_bytes)
            row["pipedream"] = max(recomputing(profile, topology, "pipedream", depth, rows, rows, policy).peak_bytes)
            yield row


def largest_models(profile: Profile, topology: Topology, rows: int) -> Iterator[Row]:
    """For each depth the largest number of blocks with which 2BW fits, with as many microbatches as stages and recomputation as needed."""
    depth, batch = 1, rows * topology.num_devices
    while depth <= topology.num_devices:
        fits, fails = 0, 1024
        while fails - fits > 1:
            blocks = (fits + fails) // 2
            found = sweep(with_blocks(profile, blocks, (rows,)), topology, batch, exact=True, schedules=("pipedream_2bw",))
            enough = any(c.over is None and c.depth == depth for c in found)
            fits, fails = (blocks, fails) if enough else (fits, blocks)
        yield {"depth": depth, "rows": rows, "blocks": fits, "parameters": parameters(with_blocks(profile, fits, (rows,)))}
        depth *= 2


def with_blocks(profile: Profile, count: int, sizes: Sequence[int] = ()) -> Profile:
    """A GPT with as many of the same blocks; equal layers need no profile of their own.

    Args:
        profile: of a GPT with at least two blocks.
        count: the blocks.
        sizes: the microbatch sizes to keep, by default all.
    """
    kept = [n for n, rows in enumerate(profile.sizes) if rows in (sizes or profile.sizes)]

    def layer(n: int, name: str) -> LayerProfile:
        one = profile.layers[n]
        return one.model_copy(update={"id": name, "at": tuple(one.at[k] for k in kept)})

    before_head = count - 1  # the block whose output the head takes
    blocks = [layer(-2 if n == before_head else 1, f"block_{n}") for n in range(count)]
    parts = {name: tuple(getattr(profile, name)[k] for k in kept) for name in ("sizes", "inputs", "labels")}
    layers = (layer(0, profile.ids[0]), *blocks, layer(-1, profile.ids[-1]))
    return Profile(source=profile.source, device=profile.device, layers=layers, **parts)


def parameters(profile: Profile) -> float:
    """How many; each takes two bytes."""
    return sum(layer.weights for layer in profile.layers) / 2


def _shape(candidate: Candidate) -> Row:
    full = sum(policy == "full" for policy in candidate.policies)
    m = candidate.microbatches // candidate.replicas[0]
    return {"depth": candidate.depth, "width": candidate.replicas[0], "rows": candidate.rows, "m": m, "recomputing_stages": full}


def _print(figures: dict[str, list[Row]]) -> None:
    for half in (0.0, HALF_ROWS):
        print(f"\nThe planner's choice for 2BW, {half:g} rows for half of the rate (the paper: 2.2B 8 deep, 3.8B 16 deep, recomputing)\n")
        rows = [_chosen_row(row) for row in figures["chosen"] if row["half_rows"] == half]
        print_table(("model", "batch", "d × w", "rows × m", "recomputing", "memory", "samples/s", "next depth", "slower"), rows)
    sizes = {row["rows"] for row in figures["speed_ups"]}
    print(f"\nFigure 6, recomputing, the largest microbatches that fit: {', '.join(map(str, sorted(sizes)))} rows\n")
    cells = []
    for one, other, small, large in FIGURE_6:
        found = [f"{row['samples_per_second'][one] / row['samples_per_second'][other]:.2f}" for row in figures["speed_ups"]]
        cells.append((f"{one} ÷ {other}", small, found[0], found[2], large, found[1], found[3]))
    heads = [f"{row['model']}, batch {row['batch']}" for row in figures["speed_ups"]]
    print_table(("throughput", "paper, small", heads[0], heads[2], "paper, large", heads[1], heads[3]), cells)
    print("\nMemory of 2.2B, 8 deep, batch 64, of 16 GB (the paper: GPipe and PipeDream do not fit)\n")
    columns = (*SCHEDULES, "pipedream")
    cells = [(row["recompute"], row["rows"], *(f"{row[name] / 1e9:.1f} GB" for name in columns)) for row in figures["memory"]]
    print_table(("recompute", "rows", *columns), cells)
    print("\nThe largest GPT of this width that 2BW trains on 64 GPUs (the paper, figure 9: almost 30B)\n")
    of = {(row["depth"], row["rows"]): row for row in figures["largest"]}
    cells = [(depth, *(f"{of[depth, rows]['parameters'] / 1e9:.1f}B" for rows in LARGEST_ROWS)) for depth, rows in of if rows == 1]
    print_table(("d", *(f"rows: {rows}" for rows in LARGEST_ROWS)), cells)


def _chosen_row(row: Row) -> tuple[object, ...]:
    following = row.get("next", {})
    return (
        row["model"],
        row["batch"],
        f"{row['depth']} × {row['width']}",
        f"{row['rows']} × {row['m']}",
        f"{row['recomputing_stages']} of {row['depth']}",
        f"{row['memory'] / 1e9:.1f} GB",
        f"{row['samples_per_second']:.1f}",
        following.get("depth", ""),
        f"{following['slower']:.1%}" if following else "",
    )
