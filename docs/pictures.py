"""Draws the pictures of docs/pictures/ (`make pictures`); the same timelines give the same files."""

from pathlib import Path

import jpipe
from docs import imports
from planner.ranking.draw import draw_choice
from train.config import config_file
from train.console.progress import Reporter
from train.plan.planning import Parts, Request, profile_of, read_topology, search

FOLDER = Path(__file__).parent / "pictures"
CONFIGS = Path(__file__).parents[1] / "configs"
BATCHES = 3
LARGE = ("depth=54", "width=1920", "heads=20", "seq_len=512", "compute_dtype=bfloat16")  # 2.4 billion parameters


def timeline(schedule: str, **options: bool) -> jpipe.programs.Timeline:
    """Three batches of four microbatches through four stages; a forward takes 1, a backward 2."""
    plan = jpipe.Plan.even(["a", "b", "c", "d"], num_stages=4, schedule=schedule, microbatches=4, **options)
    return jpipe.simulate(jpipe.lower(plan, BATCHES)).timeline


def draw_plans() -> None:
    """All plans of a GPT too large for one device, on eight of them, as `jpipe plan --png` draws them."""
    reporter = Reporter(1, 1, "samples")
    topology = read_topology(str(CONFIGS / "topologies" / "v100-16gb-8.yaml"))
    config = config_file.load(str(CONFIGS / "gpt-bytes.yaml"), (*(f"model.{key}" for key in LARGE), "plan.file=auto"), allow_code=False)
    parts, batch = Parts.of(config, reporter), 64
    profile = profile_of(parts, topology, batch, topology.num_workers, reporter)
    found = search(profile, topology, batch, Request(up_to=True), False, reporter)
    draw_choice(found.choice, found.candidates, found.choice.ranked[0], found.known).savefig(FOLDER / "plans.png")


def main() -> None:
    """Draw them all."""
    FOLDER.mkdir(exist_ok=True)
    asynchronous = {
        "pipedream": timeline("pipedream"),
        "pipedream with vertical_sync": timeline("pipedream", vertical_sync=True),
        "pipedream_2bw": timeline("pipedream_2bw"),
    }
    schedules = {name: timeline(name) for name in ("naive", "gpipe", "pipedream_flush")} | asynchronous
    what = "three batches of four microbatches on four workers"
    figure = jpipe.draw_timeline(schedules, title=f"The schedules: {what}", unit="forwards")
    figure.savefig(FOLDER / "schedules.png")
    figure = jpipe.draw_timeline(asynchronous, title=f"Which weights a microbatch reads: {what}, no flush", unit="forwards")
    figure.savefig(FOLDER / "versions.png")
    draw_plans()
    imports.picture().savefig(FOLDER / "imports.png", dpi=80)


if __name__ == "__main__":
    main()
