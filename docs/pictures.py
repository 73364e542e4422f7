"""Draws the pictures of docs/pictures/ (`make pictures`); the same timelines give the same files."""

from pathlib import Path

import jpipe

FOLDER = Path(__file__).parent / "pictures"
BATCHES = 3


def timeline(schedule: str, **options: bool) -> jpipe.Timeline:
    """Three batches of four microbatches through four stages; a forward takes 1, a backward 2."""
    plan = jpipe.Plan.even(["a", "b", "c", "d"], num_stages=4, schedule=schedule, microbatches=4, **options)
    return jpipe.simulate(jpipe.lower(plan, BATCHES)).timeline


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


if __name__ == "__main__":
    main()
