"""`jpipe target NAME --roofline CONFIG`: estimate the least time of a plan's programs on a target, kernel by kernel, without the device."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any, Literal

from rich.console import Console
from rich.filesize import decimal

import jpipe
from jpipe import InputError
from jpipe.context import tracing_for
from jpipe_planner import Device
from jpipe_planner.cost.rooflines import ProgramRoofline, Rooflines, find_programs, find_whole, most_expensive
from jpipe_planner.machine.compiling import compiling_for
from jpipe_planner.machine.roofline import Kernel, Rates
from jpipe_train.assemble.build import build
from jpipe_train.config import config_file
from jpipe_train.config.config import AUTO, Config
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import align, count
from jpipe_train.data import data
from jpipe_train.plan.compiling import compiler_errors, read_device

SHOWN = 10  # the most kernels in the table
FIGURES: tuple[Literal["bytes", "flops", "seconds"], ...] = ("bytes", "flops", "seconds")


def main(target: str, source: str, overrides: Sequence[str] = (), *, allow_code: bool = False, as_json: bool = False) -> list[str]:
    """Return lines with the rooflines of a config's stages, compiled for a target (as in `read_device`), or with JSON."""
    device = read_device(target, "target")
    config = config_file.load(source, overrides, allow_code=allow_code)
    if config.plan.file == AUTO:
        raise InputError("plan.file: a roofline is of one plan, found auto; name a plan's file, or null for the keys of 'plan'")
    rooflines = of_config(config, device)
    return json.dumps(facts(rooflines, device), indent=2).splitlines() if as_json else lines(rooflines, device)


def of_config(config: Config, device: Device) -> Rooflines:
    """Return the rooflines of a config's plan on a device that has a target."""
    silent = Reporter(config.train.length, *data.portion(config), Console(quiet=True))
    target = device.compiles_for
    if target is None:
        raise InputError("target: the topology's device has no target; add one that `jpipe target` lists")
    with tracing_for("gpu" if target.platform == "cuda" else target.platform):
        pipe, batches = build(config, silent, load=data.unread)
        compiling = compiling_for(device, max(stage.devices_each for stage in pipe.plan.stages), unlimited=True)
        if compiling.missing:
            raise InputError(f"target: {compiling.missing}")
        plan = jpipe.Plan(schedule="gpipe", microbatches=pipe.plan.microbatches, stages=[{"layers": pipe.stack.ids}])
        with compiler_errors(compiling.kind):
            programs = find_programs(pipe, batches.like, device, compiling)
            try:
                one_stage, _ = build(config, silent, plan, data.unread)
                return Rooflines(programs, find_whole(one_stage, batches.like, device, compiling))
            except InputError as error:
                return Rooflines(programs, None, str(error))


def lines(rooflines: Rooflines, device: Device) -> list[str]:
    """Return a table of the programs, the throughput relative to the jitted step, and the most expensive kernels."""
    head = ["stage", "op", "calls", "kernels", "bytes", "TFLOP", "ms"]
    whole = [] if rooflines.whole is None else [rooflines.whole]
    rows = [
        ["" if program.stage is None else str(program.stage), program.op, str(program.calls), _runs(program), *_cells([program])]
        for program in (*rooflines.programs, *whole)
    ]
    rows.insert(len(rooflines.programs), ["all", "", "", "", *_cells(rooflines.programs)])
    share = f"no jitted step: {rooflines.missing}" if rooflines.share is None else f"of the jitted step's throughput: {rooflines.share:.3f}"
    return [
        *align([head, *rows]),
        "",
        share,
        f"predicted, not measured: {_assumed(device)}; train_step: the same step jitted as one program",
        "calls per batch, with their total bytes, TFLOP and ms; kernels per call",
        *_expensive("the stages", rooflines.programs),
        *(_expensive("the jitted step", whole) if whole else []),
    ]


def _runs(program: ProgramRoofline) -> str:
    return str(sum(kernel.runs for kernel in program.kernels))


def _cells(programs: Iterable[ProgramRoofline]) -> list[str]:
    moved, flops, seconds = (sum(program.total(figure) for program in programs) for figure in FIGURES)
    return [decimal(int(moved)), f"{flops / 1e12:.3f}", f"{1e3 * seconds:.3f}"]


def _assumed(device: Device) -> str:
    rates = Rates.of(device)
    fixed = f", and {1e6 * rates.kernel_seconds:g} µs for each kernel" if rates.kernel_seconds else ""
    return f"{device.name}, {decimal(int(rates.bandwidth))}/s, {device.efficiency:g} of the peak FLOP/s in products{fixed}"


def _expensive(what: str, programs: Iterable[ProgramRoofline]) -> list[str]:
    found = most_expensive(programs, SHOWN)
    head = ["op", "kernel", "runs", "bytes", "TFLOP", "ms", "line", "name in JAX"]
    rows = [[op, kernel.kind, *_kernel_cells(kernel), "/".join(PurePath(kernel.source).parts[-2:]), kernel.op_name] for op, kernel in found]
    return ["", f"the {count(len(found), 'most expensive kernel')} of {what}, with equal kernels combined:", *align([head, *rows])]


def _kernel_cells(kernel: Kernel) -> list[str]:
    return [str(kernel.runs), *_cells([ProgramRoofline(None, "", 1, (kernel,))])]


def facts(rooflines: Rooflines, device: Device) -> dict[str, Any]:
    """Return the rooflines with all kernels as data for JSON."""
    return {"device": device.name, "assumed": _assumed(device), "share": rooflines.share, **dataclasses.asdict(rooflines)}
