"""`jpipe simulate`: show the timeline, bubble, weight versions and memory of a plan or a config, without a device."""

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal

import jpipe
from jpipe import files
from jpipe.context import tracing_for
from jpipe.files import expanded, write_atomically
from jpipe.plan import repeats_forward
from jpipe_planner import Device
from jpipe_planner.machine.compiling import compiling_for
from jpipe_train.assemble.build import build, devices_of, errors_name_config_keys
from jpipe_train.assemble.delay import delay_words
from jpipe_train.assemble.meshes import has_meshes, mesh_words
from jpipe_train.assemble.slices import slices_words
from jpipe_train.config import config_file
from jpipe_train.config.config import MOST_PLAN_BYTES, Config
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import align, count
from jpipe_train.data import data
from jpipe_train.plan.compiling import compiled_words, compiler_errors, of_this_machine, read_device

if TYPE_CHECKING:
    import matplotlib.figure

MOST_FORWARDS = 500_000  # this many take about half a minute
MOST_TICKS = 50_000_000  # this many need about a gigabyte


def main(
    source: str,
    overrides: Sequence[str] = (),
    batches: int | None = None,
    png: str | None = None,
    *,
    allow_code: bool = False,
    compile: bool = True,
    target: str | None = None,
) -> str:
    """Simulate the plan or config in the file `source`, write the pictures, and return the text to print.

    The text has the grid, a line for each stage of each rank, the bubble and the pictures. By default three batches are shown, or more if
    the steady state begins later. The picture of the memory of a config has `-memory` in its name. Without `compile` the temporaries of a
    config's programs are unknown; `target` is the device to compile for, as in `read_device`. Raise jpipe.InputError, before anything is
    written, if a file or value is wrong.
    """
    if batches is not None and batches < 1:
        raise jpipe.InputError(where="--batches", expected="1 or more", found=batches)
    if png is not None and Path(png).suffix.lower() != ".png":
        raise jpipe.InputError(where="--png", expected="a name that ends in .png", found=f"'{png}'")
    if target is not None and not compile:
        raise jpipe.InputError("--target: stages are compiled for it; leave out --no-compile")
    subject = read(source, overrides, allow_code, compile, None if target is None else read_device(target))
    plan, costs = subject.plan, subject.costs
    warm_up = jpipe.programs.batches_until_full(plan)
    shown, steady_from = batches or max(3, warm_up + 1), 2 * warm_up  # batches until the steady state
    check_effort(plan, max(shown, steady_from + 3))
    uses = jpipe.programs.uses_by_costs(costs or ())
    with errors_name_config_keys(source if costs is None else None):  # a custom order may deadlock
        prediction = jpipe.simulate(jpipe.lower(plan, shown, **uses), costs)
    long = jpipe.simulate(jpipe.lower(plan, steady_from + 3, **uses), costs)
    steady = jpipe.programs.extract_window(long.timeline, long.memory, plan.counted.microbatches, steady_from, 2)
    long, moved = with_agreements(plan, costs, long, steady_from + 3)
    pictures = [] if png is None else draw(expanded(png, "--png"), plan, prediction, sized=costs is not None)
    ranks = [count(len(plan.rank_workers), "rank")] if len(plan.rank_workers) != plan.depth else []
    meshes = [f"{mesh_words(plan)}, {count(devices_of(plan), 'device')}"] if has_meshes(plan) else []
    microbatches = f"{count(plan.microbatches, 'microbatch', 'es')} per batch"
    halves = any(jpipe.ops.OPS[span.op].reads == "stash" for spans in prediction.timeline for span in spans)
    recomputes = any(repeats_forward(stage.recompute) for stage in plan.stages)
    recomputing = ("; one that recomputes 3" + (", its first half 2" if halves else "")) if recomputes else ""
    of_halves = ", each of its halves 1" if halves else ""
    of_slices = "; the forward is of the mean slice, and slices are numbered like microbatches" if plan.counted.row_slices > 1 else ""
    return "\n".join(
        [
            f"{plan.schedule}: " + ", ".join([count(plan.depth, "stage"), *ranks, *meshes, microbatches, count(shown, "batch", "es")]),
            f"times in units of one forward, assumed equal at all stages; a backward takes 2{of_halves}{recomputing}{of_slices}",
            *([subject.slices] if subject.slices else []),
            "",
            cut_grid(prediction.grid(1.0), shutil.get_terminal_size((1000, 24)).columns),
            "",
            *align(table(plan, long, moved, sized=costs is not None, compiled=bool(subject.compiled))),
            "",
            *([words] if (words := delay_words(plan)) else []),
            f"bubble: {prediction.bubble:.1%} as shown, {steady.bubble:.1%} in steady state, with a batch in {steady.step_seconds:g} units",
            *_memory_words(subject, long, steady_from + 3),
            *pictures,
        ]
    )


def with_agreements(
    plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost] | None, prediction: jpipe.programs.Prediction, batches: int
) -> tuple[jpipe.programs.Prediction, list[float]]:
    """Return a prediction that includes agreements if pipelines agree, and the mean bytes that each rank sends per batch.

    The plan itself may have no agreement in the simulated batches, but its memory must be enough for one. So in the simulation all stages
    agree after each batch. With a delay they agree after every second batch and apply the result one batch later, so that they always hold
    changes. If pipelines do not agree, `prediction` is returned.
    """
    if plan.agree is None or costs is None:
        return prediction, [of_rank / batches for of_rank in prediction.moved_bytes]
    every = 2 if plan.agree.delay else 1
    agreements = [{"every": updates, "delay": every - 1, "fragments": None} for updates in (every, 10**9)]
    agreeing, alone = (
        jpipe.simulate(jpipe.lower(plan.model_copy(update={"agree": plan.agree.model_copy(update=fields)}), batches), costs)
        for fields in agreements
    )
    simulated, expected = batches // every, batches / plan.agree.every  # agreements of each stage
    share = expected / simulated
    pairs = zip(agreeing.moved_bytes, alone.moved_bytes, strict=True)
    return agreeing, [(without + share * (with_sums - without)) / batches for with_sums, without in pairs]


@dataclass(frozen=True)
class Subject:
    """The plan to simulate, with its costs."""

    plan: jpipe.Plan  # the plan
    # the exact costs of the stages; None for a plan without a config, because then the model is unknown
    costs: tuple[jpipe.programs.StageCost, ...] | None = None
    compiled: str = ""  # words about the devices for which the stages are compiled, or ""
    unknown: str = ""  # why the temporaries are unknown if the stages are not compiled
    device: Device | None = None  # the device that the user named to compile for; None without one
    slices: str = ""  # words about the slices into which the rows are cut, or ""


def _memory_words(subject: Subject, prediction: jpipe.programs.Prediction, batches: int) -> list[str]:
    """Explain the columns of memory, and whether the ranks fit into the named device."""
    if subject.costs is None:
        return ["sizes and memory need a config: a plan alone does not know the model"]
    held = "what a rank holds between its computations"
    moves = [] if subject.plan.offload is None else [host_words(prediction, batches, subject.device)]
    if subject.unknown:
        return [f"held: {held}; the temporaries of its programs, and so the peak memory, {subject.unknown}", *moves]
    lines = [*moves, f"peak memory: {held}, and the temporaries of its largest program, {subject.compiled}"]
    device = subject.device
    if device is not None and device.memory is not None and device.limit is not None:
        rank = max(range(len(prediction.peak_bytes)), key=prediction.peak_bytes.__getitem__)
        lacking = prediction.peak_bytes[rank] - device.limit
        fits = "every rank fits" if lacking <= 0 else f"rank {rank} needs {decimal(int(lacking))} more"
        lines.append(f"a plan may use {decimal(int(device.limit))} of the {decimal(int(device.memory))} of {device.name}: {fits}")
    return lines


def host_words(prediction: jpipe.programs.Prediction, batches: int, device: Device | None) -> str:
    """Describe how many bytes a rank moves to host memory and back, and how long this occupies the link of the named device."""
    rank = max(range(len(prediction.host_moved_bytes)), key=prediction.host_moved_bytes.__getitem__)
    moved = prediction.host_moved_bytes[rank] / batches
    words = f"moves to host memory and back: rank {rank} moves most, {decimal(int(moved))} a batch"
    if device is None:
        return f"{words}; --target tells how long that takes"
    seconds, bandwidth = moved / 2 / device.host.bandwidth, decimal(int(device.host.bandwidth))
    return f"{words}, {1e3 * seconds:,.3g} ms in each direction at the {bandwidth}/s assumed for {device.name}"


def read(source: str, overrides: Sequence[str], allow_code: bool, compile: bool = True, device: Device | None = None) -> Subject:
    """Read a plan, or a config with the costs of its stages; see `plan_and_costs`."""
    path = expanded(source, "simulate")
    is_plan = path.suffix == ".json"
    if not is_plan and path.is_file():  # a named pipe can be read only once
        text = read_text(path).lstrip()
        is_plan = text.startswith("{") and '"format"' in text  # configs do not have this key
    if not is_plan:
        return plan_and_costs(config_file.load(source, overrides, allow_code=allow_code), compile, device)
    if overrides:
        raise jpipe.InputError(f"--set {overrides[0]}: expected a config, found the plan '{source}'; edit the plan, or give a config")
    if device is not None:
        raise jpipe.InputError(
            f"--target: a plan alone does not know the model: expected a config, found the plan '{source}'; give a config"
        )
    return Subject(jpipe.Plan.from_json(read_text(path), where=source))


def read_text(path: Path) -> str:
    """Read a plan or a config as text."""
    other = f"{path}: expected text in UTF-8, found other bytes; is this a plan or a config?"
    return files.read_text(path, MOST_PLAN_BYTES, f"{path}: cannot read it", "give a plan's JSON file or a config's YAML file", other)


def plan_and_costs(config: Config, compile: bool = True, device: Device | None = None) -> Subject:
    """Return the plan of a config and the exact costs of its stages; temporaries are known if stages are compiled, for `device` or here."""
    compiling = of_this_machine() if device is None else compiling_for(device)
    silent = Reporter(config.train.length, *data.portion(config), Console(quiet=True))
    with tracing_for(compiling.devices[0].platform):
        pipe, batches = build(config, silent, load=data.unread)
        words = slices_words(pipe, batches.like)
        if not compile:
            return Subject(pipe.plan, pipe.costs(batches.like), unknown="need compiled stages: leave out --no-compile", slices=words)
        needed = max(stage.devices_each for stage in pipe.plan.stages)
        if device is not None and needed > 1:
            compiling = compiling_for(device, needed)
        if needed > len(compiling.devices):
            why = f"; stages would be compiled for this machine, because {compiling.missing}" if compiling.missing else ""
            unknown = f"need {count(needed, 'device')} to compile for, as in the largest mesh{why}; XLA_FLAGS can make CPU devices"
            return Subject(pipe.plan, pipe.costs(batches.like), unknown=unknown, slices=words)
        if sys.stderr.isatty():
            stages = count(pipe.plan.depth, "stage")
            print(f"compiling {stages} to find the peak memory; --no-compile skips this …", file=sys.stderr)
        with compiler_errors(compiling.kind):
            costs = pipe.costs(batches.like, compiled_for=compiling.devices)
    compiled = "as compiled for this machine" if device is None else compiled_words(compiling)
    return Subject(pipe.plan, costs, compiled=compiled, device=device, slices=words)


def check_effort(plan: jpipe.Plan, batches: int) -> None:
    """Check that the simulation takes seconds, not minutes."""
    plan = plan.counted
    forwards = plan.depth * plan.microbatches * batches
    if forwards > MOST_FORWARDS:
        raise jpipe.InputError(
            f"simulate: expected at most {MOST_FORWARDS:,} forwards, found {plan.depth} stages × {plan.microbatches} microbatches × "
            f"{batches} batches; lower one of them"
        )
    in_flight = jpipe.schedules.SCHEDULES[plan.schedule].in_flight(plan, 0) * plan.replicas[0]
    ranks = len(plan.pipeline_ranks)
    full = in_flight >= min(ranks, plan.microbatches)  # all ranks compute at the same time
    passes = plan.depth + -(-plan.depth // ranks) * plan.microbatches if full else -(-plan.depth * plan.microbatches // in_flight)
    ticks = 4 * batches * passes * len(plan.rank_workers)  # an upper bound
    if ticks > MOST_TICKS:
        raise jpipe.InputError(
            f"simulate: expected a picture of at most {MOST_TICKS:,} ticks of all ranks, found up to {ticks:,}, for "
            f"{len(plan.rank_workers)} ranks, {plan.depth} stages, {plan.microbatches} microbatches and {batches} batches; lower some"
        )


def table(
    plan: jpipe.Plan, prediction: jpipe.programs.Prediction, moved: Sequence[float], *, sized: bool, compiled: bool = False
) -> list[list[str]]:
    """Return a table with a row for each stage of each rank.

    It has sizes only if they are known (`sized`), and temporaries and peak memory only if the stages are compiled. `moved` has for each
    rank the bytes that it sends per batch.
    """
    replicated, shares = len(plan.workers) > plan.depth, plan.depth > len(plan.pipeline_ranks)
    stage_head = ["stage·replica"] if replicated else ["stage"] if shares else []
    delayed = ["delay"] if any(plan.delays) else []
    head = ["rank", *stage_head, "layers", "recompute", "in flight", "versions", *delayed]
    each = ", each device" if has_meshes(plan) else ""
    waiting = ["in host memory"] if plan.offload is not None else []
    memory = [f"held{each}", *(["temporary", "peak memory"] if compiled else []), *waiting]
    rows = [[*head, "sends a batch", *memory] if sized else head]
    for rank, workers in enumerate(plan.rank_workers):
        known = [prediction.held_bytes, *([prediction.temporary_bytes, prediction.peak_bytes] if compiled else [])]
        known += [prediction.host_bytes] if waiting else []
        sizes = [decimal(int(moved[rank])), *(decimal(kind[rank]) for kind in known)]
        for w in workers:
            s, replica = plan.workers[w]
            stage, first = plan.stages[s], w == workers[0]
            layers = stage.layers if len(stage.layers) < 4 else (stage.layers[0], "…", stage.layers[-1], f"({len(stage.layers)})")
            in_flight = jpipe.schedules.SCHEDULES[plan.schedule].in_flight(plan.counted, s)
            row = [str(rank) if first else "", *([f"{s}·{replica}"] if replicated else [str(s)] if shares else [])]
            row += [" ".join(layers), stage.recompute, str(in_flight), str(prediction.versions_alive[w])]
            row += [f"{plan.delays[s]:.3g}"] if delayed else []
            rows.append([*row, *(sizes if first else [""] * len(sizes))] if sized else row)
    return rows


def cut_grid(grid: str, width: int) -> str:
    """Return the part of a grid that fits into `width` columns. If it leaves out ticks, it ends with the number of ticks."""
    lines = grid.splitlines()
    ends = [match.end() for match in re.finditer(r"\d+", lines[0])]
    fitting = [end for end in ends if end <= width]
    if len(fitting) == len(ends):
        return grid
    shown_ends = fitting or ends[:1]
    cut = f"… the first {len(shown_ends)} of {len(ends)} ticks; --png draws them all"
    return "\n".join([*(line[: shown_ends[-1]] for line in lines), cut])


def draw(path: Path, plan: jpipe.Plan, prediction: jpipe.programs.Prediction, *, sized: bool) -> list[str]:
    """Draw the timeline and, if sizes are known, the memory. Return a line with the paths of the pictures."""
    numbered = f" in {plan.counted.row_slices} slices, numbered like microbatches" if plan.counted.row_slices > 1 else ""
    title = f"{plan.schedule}, {plan.microbatches} microbatches per batch{numbered} (a unit is one forward)"
    shown = {"predicted": [transfer for transfer in prediction.transfers if transfer.end > transfer.start]}
    save(jpipe.draw_timeline({"predicted": prediction.timeline}, shown, title=title, unit="units", plan=plan), path)
    if not sized:
        return [f"picture: {path}"]
    memory_path = path.with_stem(f"{path.stem}-memory")
    memory = {"predicted": prediction.memory}
    save(jpipe.draw_memory(memory, seconds=prediction.seconds, title=title, unit="units", plan=plan), memory_path)
    return [f"pictures: {path} and {memory_path}"]


def save(figure: "matplotlib.figure.Figure", path: Path) -> None:
    """Write a picture, completely or not at all."""
    if path.is_dir():
        raise jpipe.InputError(where="--png", expected="a file to write", found=f"the folder '{path}'", change="choose another name")
    image = BytesIO()
    figure.savefig(image, format="png")
    with files.writing("--png", path):
        write_atomically(path, image.getvalue())
