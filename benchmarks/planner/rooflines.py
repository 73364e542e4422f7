"""Predict the least time of two stages and of a jitted step on a GPU and a TPU that are not here, by schedule and recomputation."""

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.filesize import decimal

import jpipe
from benchmarks import gpt
from benchmarks.planner.markdown import print_table
from benchmarks.sizes import GPU
from jpipe.context import tracing_for
from jpipe_planner import Device
from jpipe_planner.cost.rooflines import ProgramRoofline, find_programs, find_whole
from jpipe_planner.machine.compiling import Compiling, compiling_for
from jpipe_train.config import config_file
from jpipe_train.config.config import AUTO
from jpipe_train.console.progress import Reporter
from jpipe_train.plan.profiling import Parts

TARGETS = ("h100-80gb", "v5e")
SCHEDULES = ("pipedream_flush", "pipedream_2bw")
POLICIES = ("none", "auto")
STAGES, MICROBATCHES = 2, 16
LAYERS = {"gpt": 4, "llama-3-8b": 2, "experts": 2}
"""Blocks of each model: few, because a program of more takes longer to compile, and the blocks are equal."""
CONFIG = Path(__file__).parents[2] / "configs" / "llama-3-70b.yaml"
CHANGES = {
    "llama-3-8b": {"model.preset": "llama-3-8b", "model.seq_len": 2048, "model.vocab_size": 16_384, "train.batch_size": MICROBATCHES},
    "experts": {
        "model.preset": "null",
        "model.width": 1024,
        "model.heads": 16,
        "model.kv_heads": 4,
        "model.seq_len": 1024,
        "model.vocab_size": 16_384,
        "model.experts": "{count: 8, per_token: 2, mlp_width: 2048}",
        "train.batch_size": 4 * MICROBATCHES,
    },
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model: `(plan) -> pipeline`, its layers, and the shapes of a batch."""

    pipeline: Callable[[jpipe.Plan], jpipe.Pipeline]
    ids: tuple[str, ...]
    batch: Any


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compile, print and return the figures.

    Args:
        options: `models`, names of `LAYERS`, `targets`, names of `jpipe target`; None: all. `layers`, blocks of each model; None: `LAYERS`.
            `attention` of the GPT.
    """
    rows = []
    for name in [name for name in options.models or LAYERS if name in LAYERS]:
        for target in options.targets or TARGETS:
            rows += _measured(name, target, options.layers or LAYERS[name], options.attention)
    head = (
        "model",
        "blocks",
        "device",
        "schedule",
        "recompute",
        "kept for a microbatch",
        "ms of the stages",
        "of one jitted step",
        "bytes",
        "of one jitted step",
        "its throughput",
    )
    print_table(head, [_cells(row) for row in rows])
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a plan in the table."""
    whole = row["whole"]
    seconds, moved = ("–", "–") if whole is None else (f"{1e3 * whole['seconds']:.1f}", decimal(int(whole["bytes"])))
    share = row["missing"] if whole is None else f"{whole['seconds'] / row['seconds']:.3f}"
    named = *(str(row[name]) for name in ("model", "blocks", "device", "schedule", "recompute")), decimal(row["kept"])
    return *named, f"{1e3 * row['seconds']:.1f}", seconds, decimal(int(row["bytes"])), moved, share


def _measured(name: str, target: str, blocks: int, attention: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each schedule and recomputation policy."""
    device = Device(target=target)
    compiling = compiling_for(device, 1, unlimited=True)
    if compiling.missing:
        print(f"{target}: {compiling.missing}")
        return
    with tracing_for(compiling.devices[0].platform):
        model = _gpt(blocks, attention) if name == "gpt" else _built_in(name, blocks)
        whole, missing = _whole(model, device, compiling)
        programs: dict[Any, Any] = {}
        for schedule, policy in itertools.product(SCHEDULES, POLICIES):
            plan = jpipe.Plan.even(model.ids, STAGES, schedule, MICROBATCHES, recompute=policy)
            pipe = model.pipeline(plan)
            found = find_programs(pipe, model.batch, device, compiling, programs)
            kept = pipe.stage_functions(model.batch)[0].between_specs[:2]
            shown = f"{pipe.plan.stages[0].recompute} (default)" if policy == "auto" else policy
            row = {"model": name, "blocks": blocks, "device": target, "schedule": schedule, "recompute": shown}
            row |= {"missing": missing, "whole": whole, **_totals(found)}
            row["kept"] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))  # residuals of the first stage
            print(f"… {name}, {target}, {schedule}, {shown}: {1e3 * row['seconds']:.1f} ms", flush=True)
            yield row | {"programs": [{"stage": one.stage, "op": one.op, **_totals([one])} for one in found]}


def _whole(model: Model, device: Device, compiling: Compiling) -> tuple[dict[str, float] | None, str]:
    """Return the figures of the jitted step, or why there are none."""
    plan = jpipe.Plan(schedule="gpipe", microbatches=MICROBATCHES, stages=[{"layers": model.ids}])
    try:
        return _totals([find_whole(model.pipeline(plan), model.batch, device, compiling)]), ""
    except jpipe.InputError as error:
        return None, str(error)


def _totals(programs: list[ProgramRoofline] | tuple[ProgramRoofline, ...]) -> dict[str, float]:
    return {figure: sum(program.total(figure) for program in programs) for figure in ("bytes", "flops", "seconds")}


def _gpt(blocks: int, attention: str) -> Model:
    """Return the GPT of `benchmarks.gpu` with fewer blocks."""
    sizes = dataclasses.replace(GPU, layers=blocks, attention=attention)
    stack = gpt.stack(sizes)
    tokens = jax.ShapeDtypeStruct((sizes.rows * MICROBATCHES, sizes.sequence), jnp.int32)
    return Model(lambda plan: jpipe.Pipeline(stack, plan, gpt.summed_loss, gpt.optimizer()), stack.ids, (tokens, tokens))


def _built_in(name: str, blocks: int) -> Model:
    """Return a built-in model in bfloat16 with float32 masters."""
    changes = {"model.depth": blocks, "model.compute_dtype": "bfloat16", "precision.params": "bfloat16", "plan.file": AUTO}
    changes |= {"optimizer.clip_global_norm": "null", **CHANGES[name]}
    config = config_file.load(CONFIG, [f"{key}={value}" for key, value in changes.items()])
    parts = Parts.of(config, Reporter(1, 1, "samples", Console(quiet=True)))
    return Model(parts.pipeline, parts.stack.ids, parts.rows(config.train.batch_size))
