"""Draw the pictures of docs/pictures/ (`make pictures`); the same timelines give the same files.

`python -m docs.pictures run` trains configs/gpt-bytes.yaml, which takes two minutes, and draws what it predicts and measures.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jpipe
from benchmarks.hosts import accuracy_draw, links
from benchmarks.learning import agree
from benchmarks.learning import draw as learning_draw
from benchmarks.learning import links as time_to_loss
from benchmarks.papers import draw as papers_draw
from docs import charts, imports, microbatch, style
from jpipe_planner import draw_choice
from jpipe_train.config import config_file
from jpipe_train.console.progress import Reporter
from jpipe_train.plan.inputs import Request, read_topology
from jpipe_train.plan.profiling import Parts, profile_of
from jpipe_train.plan.search import search
from jpipe_train.run import loop

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
    return _counted(jpipe.programs.predict_window(plan, costs, first=2, batches=1), 8)


def _counted(window: jpipe.programs.Window, microbatches: int) -> jpipe.programs.Window:
    """Return a window in which the microbatches of each batch are counted from 0, so that their numbers fit into the boxes."""
    counted = tuple(
        tuple(span._replace(microbatch=span.microbatch % microbatches, version=0) for span in spans) for spans in window.timeline
    )
    return dataclasses.replace(window, timeline=counted)


def draw_flushing() -> None:
    """Draw a batch of each schedule that flushes, those with one stage on a rank and those with several in a picture each."""
    windows = {schedule: batch_of(schedule, chunks) for schedule, chunks in FLUSHING.items()}
    naive = windows["naive"]
    end = windows["gpipe"].seconds
    beginning = tuple(tuple(_cut(span, end) for span in spans if span.start < end) for spans in naive.timeline)
    windows["naive"] = dataclasses.replace(naive, timeline=beginning, seconds=end)
    for name, several in (("schedules", False), ("schedules-chunks", True)):
        shown = {_heading(key, naive): window for key, window in windows.items() if (FLUSHING[key] > 1) == several}
        seconds = {key: window.seconds for key, window in shown.items()}
        timelines = {key: window.timeline for key, window in shown.items()}
        style.write(jpipe.draw_timeline(timelines, unit="forwards", seconds=seconds, **style.SIZES), FOLDER / f"{name}.svg")


def _heading(schedule: str, naive: jpipe.programs.Window) -> str:
    return f"naive, start of {naive.seconds:g} forwards" if schedule == "naive" else schedule


def _cut(span: jpipe.programs.Span, end: float) -> jpipe.programs.Span:
    return span if span.end <= end else span._replace(end=end, updates=False)


def draw_asynchronous() -> None:
    """Draw two batches of each schedule without a flush, from an empty pipeline to an empty one."""
    names: dict[str, dict[str, Any]] = {
        "pipedream": {},
        "pipedream, vertical_sync": {"vertical_sync": True},
        "pipedream_2bw": {},
        "2BW, split_backward": {"split_backward": "early"},
        "2BW, 2 chunks": {"chunks": 2},
    }
    timelines = {name: timeline(name.split(",")[0].replace("2BW", "pipedream_2bw"), 2, 6, **options) for name, options in names.items()}
    style.write(jpipe.draw_timeline(timelines, unit="forwards", **style.SIZES), FOLDER / "asynchronous.svg")


VERSIONS = (style.LIGHT_GREY, style.LIGHT_BLUE, style.YELLOW)


@style.styled()
def draw_versions() -> None:
    """Draw which weights each microbatch reads in the schedules without a flush, in three batches of four microbatches."""
    options = {"pipedream": {}, "pipedream, vertical_sync": {"vertical_sync": True}, "pipedream_2bw": {}}
    timelines = {name: timeline(name.split(",")[0], 3, 4, **option) for name, option in options.items()}
    end = max(span.end for one in timelines.values() for spans in one for span in spans)
    figure = style.figure(5.9)
    panels = figure.subplots(len(timelines), 1, sharex=True)
    for axes, (name, ranks) in zip(panels, timelines.items(), strict=True):
        style.label_rows(axes, [f"rank {rank}" for rank in range(len(ranks))])
        for rank, spans in enumerate(ranks):
            _draw_versions(axes, rank, spans)
        axes.set(title=name, xlim=(0, end))
        axes.spines["left"].set_visible(False)
        axes.grid(False)
    panels[-1].set_xlabel("time (forwards)")
    shown = {f"reads the weights after update {version}": axes.bar(0, 0, color=VERSIONS[version]) for version in (1, 2)}
    shown = {"reads the first weights": axes.bar(0, 0, color=VERSIONS[0]), **shown, "update": axes.bar(0, 0, color=style.BLACK)}
    style.share_legend(figure, shown, 1)
    style.write(figure, FOLDER / "versions.svg")


def _draw_versions(axes: Any, rank: int, spans: Sequence[jpipe.programs.Span]) -> None:
    """Draw the computations of a rank: forwards, and paler backwards with the number of their microbatch."""
    boxes: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for span in spans:
        turn = {"F": span.end, "B": span.start, "FB": span.start + 1}[span.op]
        for start, end, opacity in ((span.start, turn, 1.0), (turn, span.end, 0.6)):
            boxes.setdefault((VERSIONS[span.version], opacity), []).append((start, end - start))
        if turn < span.end:
            axes.text((turn + span.end) / 2, rank, str(span.microbatch), ha="center", va="center_baseline")
    for (colour, opacity), places in boxes.items():
        shown = [place for place in places if place[1]]
        axes.broken_barh(shown, (rank - 0.42, 0.84), facecolor=colour, alpha=opacity, edgecolor="white", linewidth=0.5)
    updates = [(span.end - 0.3, 0.3) for span in spans if span.updates]
    axes.broken_barh(updates, (rank - 0.42, 0.84), facecolor=style.BLACK)


def draw_plans() -> None:
    """Draw all plans of a GPT too large for one device, on eight of them, as `jpipe plan --png` does, with panels below each other."""
    reporter = Reporter(1, 1, "samples")
    topology = read_topology(str(CONFIGS / "topologies" / "v100-16gb-8.yaml"))
    config = config_file.load(str(CONFIGS / "gpt-bytes.yaml"), (*(f"model.{key}" for key in LARGE), "plan.file=auto"), allow_code=False)
    parts, batch = Parts.of(config, reporter), 64
    profile = profile_of(parts, topology, batch, topology.num_devices, reporter)
    result = search(profile, topology, batch, Request(up_to=True, schedules=("all",)), False, reporter)
    with style.styled():
        figure = draw_choice(result.choice, result.tried.values(), result.choice.ranked[0])
        style.stack(figure, 9.5, (1.2, 1))
    style.write(figure, FOLDER / "plans.svg")


def draw_run() -> None:
    """Train, and draw three batches of the run, predicted and measured."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_file.load(str(CONFIGS / "gpt-bytes.yaml"), (f"run.dir={folder}/run",), allow_code=False)
        summary = loop.main(config)
    windows = {name: _counted(window, config.plan.microbatches) for name, window in
               (("predicted", summary.predicted), ("measured", summary.measured))}  # fmt: skip
    seconds = {name: window.seconds for name, window in windows.items()}
    timelines = {name: window.timeline for name, window in windows.items()}
    style.write(jpipe.draw_timeline(timelines, seconds=seconds, **style.SIZES), FOLDER / "run-timeline.svg")
    memories = {name: window.memory for name, window in windows.items()}
    style.write(jpipe.draw_memory(memories, seconds=seconds, **style.SIZES), FOLDER / "run-memory.svg")


def main(arguments: list[str]) -> None:
    """Draw all pictures except a run's, which are drawn alone if "run" is asked for."""
    if arguments == ["run"]:
        return draw_run()
    tables = {table.name: table for table in charts.tables_of_pages() if table.name}
    charts.draw_all(FOLDER)
    papers_draw.draw_all(tables, tables, FOLDER)
    style.write(accuracy_draw.draw(tables["time to accuracy"]), FOLDER / "time-to-accuracy.svg")
    style.write(links.draw(links.panels(links.read(links.RESULTS) if links.RESULTS.exists() else [])), FOLDER / links.PICTURE)
    time_to_loss.main(["--recipes", "--pictures", str(FOLDER)])
    learning_draw.draw_all(charts.results(), FOLDER)
    learning_draw.draw_agreements(charts.results(agree.RESULTS), FOLDER)
    style.write(microbatch.picture(tables[microbatch.NAME]), FOLDER / "how-it-works.svg")
    draw_flushing()
    draw_asynchronous()
    draw_versions()
    draw_plans()
    style.write(imports.picture(), FOLDER / "imports.svg")
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
