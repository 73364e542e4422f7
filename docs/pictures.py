"""Draw the pictures of docs/pictures/ (`make pictures`); the same timelines give the same files."""

import dataclasses
from pathlib import Path
from typing import Any

import jpipe
from docs import charts, imports
from jpipe_planner import draw_choice
from jpipe_train.config import config_file
from jpipe_train.console.progress import Reporter
from jpipe_train.plan.inputs import Request, read_topology
from jpipe_train.plan.profiling import Parts, profile_of
from jpipe_train.plan.search import search

FOLDER = Path(__file__).parent / "pictures"
CONFIGS = Path(__file__).parents[1] / "configs"
FLUSHING = {  # by name, the chunks of each rank
    "naive": 1,
    "gpipe": 1,
    "pipedream_flush": 1,
    "looped_bfs": 2,
    "interleaved_1f1b": 2,
    "zb_h1": 1,
    "zb_h2": 1,
    "interleaved_zero_bubble": 2,
    "zb_v": 2,
    "dualpipe_v": 2,
}
LARGE = ("depth=54", "width=1920", "heads=20", "seq_len=512", "compute_dtype=bfloat16")  # 2.4 billion parameters


def plan_and_costs(schedule: str, microbatches: int, chunks: int = 1, **options: Any) -> tuple[jpipe.Plan, list[jpipe.programs.StageCost]]:
    """Return a plan for four ranks that all take 1 for a forward, 2 for a backward, and 1 for each of its halves."""
    layers = [f"layer {number}" for number in range(4 * chunks)]
    plan = jpipe.Plan.even(layers, len(layers), schedule, microbatches, chunks_per_rank=chunks, **options)
    share = 1 / chunks
    cost = jpipe.programs.StageCost(forward=share, backward=2 * share, backward_input=share, backward_weight=share)
    return plan, [cost] * plan.depth


def timeline(schedule: str, batches: int, microbatches: int, chunks: int = 1, **options: Any) -> jpipe.programs.Timeline:
    """Simulate from an empty pipeline to an empty one."""
    plan, costs = plan_and_costs(schedule, microbatches, chunks, **options)
    return jpipe.simulate(jpipe.lower(plan, batches), costs).timeline


def batch_of(schedule: str, chunks: int) -> jpipe.programs.Window:
    """Return the window of a batch of eight microbatches in a long run, with times from 0."""
    plan, costs = plan_and_costs(schedule, 8, chunks)
    window = jpipe.programs.predict_window(plan, costs, first=2, batches=1)
    counted = tuple(tuple(span._replace(microbatch=span.microbatch % 8, version=0) for span in spans) for spans in window.timeline)
    return dataclasses.replace(window, timeline=counted)


def draw_flushing() -> None:
    """Draw a batch of each schedule that flushes."""
    windows = {schedule: batch_of(schedule, chunks) for schedule, chunks in FLUSHING.items()}
    longest = windows["gpipe"].seconds
    naive = windows.pop("naive")
    beginning = tuple(tuple(_cut(span, longest) for span in spans if span.start < longest) for spans in naive.timeline)
    timelines = {f"naive, the beginning of {naive.seconds:g} forwards": beginning}
    timelines |= {name + (", 2 chunks" if FLUSHING[name] > 1 else ""): window.timeline for name, window in windows.items()}
    lengths = [longest, *(window.seconds for window in windows.values())]
    title = "Schedules that flush: a batch of eight microbatches on four ranks, in a long run"
    seconds = dict(zip(timelines, lengths, strict=True))
    jpipe.draw_timeline(timelines, title=title, unit="forwards", seconds=seconds).savefig(FOLDER / "schedules.png")


def _cut(span: jpipe.programs.Span, end: float) -> jpipe.programs.Span:
    return span if span.end <= end else span._replace(end=end, updates=False)


def draw_asynchronous() -> None:
    """Draw two batches of each schedule without a flush; and the versions that they read, in three batches of half the size."""
    names: dict[str, dict[str, Any]] = {
        "pipedream": {},
        "pipedream with vertical_sync": {"vertical_sync": True},
        "pipedream_2bw": {},
        "pipedream_2bw with split_backward: early": {"split_backward": "early"},
        "pipedream_2bw, 2 chunks": {"chunks": 2},
    }
    timelines = {name: timeline(name.split()[0].strip(","), 2, 6, **options) for name, options in names.items()}
    title = "Schedules without a flush: two batches of six microbatches on four ranks, from an empty pipeline to an empty one"
    jpipe.draw_timeline(timelines, title=title, unit="forwards").savefig(FOLDER / "asynchronous.png")
    timelines = {name: timeline(name.split()[0], 3, 4, **names[name]) for name in list(names)[:3]}
    title = "Which weights a microbatch reads: three batches of four microbatches on four ranks, no flush"
    jpipe.draw_timeline(timelines, title=title, unit="forwards").savefig(FOLDER / "versions.png")


def draw_plans() -> None:
    """Draw all plans of a GPT too large for one device, on eight of them, as `jpipe plan --png` does."""
    reporter = Reporter(1, 1, "samples")
    topology = read_topology(str(CONFIGS / "topologies" / "v100-16gb-8.yaml"))
    config = config_file.load(str(CONFIGS / "gpt-bytes.yaml"), (*(f"model.{key}" for key in LARGE), "plan.file=auto"), allow_code=False)
    parts, batch = Parts.of(config, reporter), 64
    profile = profile_of(parts, topology, batch, topology.num_devices, reporter)
    result = search(profile, topology, batch, Request(up_to=True, schedules=("all",)), False, reporter)
    draw_choice(result.choice, result.candidates, result.choice.ranked[0], result.known).savefig(FOLDER / "plans.png")


def main() -> None:
    """Draw all pictures."""
    FOLDER.mkdir(exist_ok=True)
    charts.draw_all(FOLDER)
    draw_flushing()
    draw_asynchronous()
    draw_plans()
    imports.picture().savefig(FOLDER / "imports.png", dpi=80)


if __name__ == "__main__":
    main()
