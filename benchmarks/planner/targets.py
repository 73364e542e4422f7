"""Compare the memory of stages as compiled for a CPU, a GPU and a TPU that are not here, and the planner's estimates of it."""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import tokenizers
from rich.console import Console
from rich.filesize import decimal

import jpipe
from benchmarks.planner.markdown import print_table
from jpipe.context import tracing_for
from jpipe_planner import Device, Profile, Topology, analyze
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.machine.compiling import compiling_for
from jpipe_train.config import config_file
from jpipe_train.config.config import AUTO
from jpipe_train.console.progress import Reporter
from jpipe_train.plan.profiling import Parts

MODELS = {"gpt2-124m": 1024, "bert-110m": 512, "llama-3-8b": 2048}  # positions in a row
ROWS = (1, 4)
POLICIES = ("none", "full")
CPU = "cpu"  # of this machine
TARGETS = (CPU, "h100-80gb", "v5e")
STAGES, MICROBATCHES = 4, 8
ROOT = Path(__file__).parents[2]
KINDS = ("first", "inner", "inner", "last")


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure, print and return the figures.

    Args:
        options: `models`, names of `MODELS`; None: all. `targets`, names of `jpipe target`; None: `TARGETS`. `rows` of a microbatch;
            None: `ROWS`.
    """
    models = [name for name in options.models or MODELS if name in MODELS]
    targets, sizes = options.targets or TARGETS, options.rows or ROWS
    rows = [row for model in models for target in targets for row in _measured(model, target, sizes)]
    head = ("model", "rows", "recompute", "device", "temporaries of each stage", "peak of each rank", "estimated", "seconds")
    print_table(head, map(_cells, rows))
    errors = [
        (row["device"], row["recompute"], kind, abs(estimate / peak - 1), estimate / peak - 1)
        for row in rows
        if "too_large" not in row
        for kind, estimate, peak in zip(KINDS, row["estimated_peak"], row["peak"], strict=True)
    ]
    by_kind = sorted({error[:3] for error in errors})
    grouped = {key: [error[3:] for error in errors if error[:3] == key] for key in by_kind}
    print_table(
        ("device", "recompute", "stage", "error at the median", "lowest estimate", "highest"),
        [
            (
                *key,
                f"{statistics.median(size for size, _ in some):.0%}",
                *(f"{pick(signed for _, signed in some):+.0%}" for pick in (min, max)),
            )
            for key, some in grouped.items()
        ],
    )
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a plan in the table."""
    named = tuple(str(row[name]) for name in ("model", "rows", "recompute", "device"))
    if "too_large" in row:
        return (*named, row["too_large"], "–", "–", "–")
    temporary, peak = (", ".join(map(decimal, row[name])) for name in ("temporary", "peak"))
    errors = ", ".join(f"{estimate / peak - 1:+.0%}" for estimate, peak in zip(row["estimated_peak"], row["peak"], strict=True))
    return (*named, temporary, peak, errors, f"{row['seconds']:.0f}")


def _measured(model: str, target: str, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a row for each microbatch size and recomputation policy."""
    device = Device(name="CPU", flops=dict.fromkeys(("bfloat16", "float16", "float32"), 1e12)) if target == CPU else Device(target=target)
    parts = _parts(model, max(sizes))
    begin = time.perf_counter()
    profile = analyze(
        parts.stack, parts.rows, parts.loss, parts.rule, sizes, device, policies=POLICIES, precision=parts.precision, ema_decay=None
    )
    profiled = time.perf_counter() - begin
    programs: dict[Any, Any] = {}
    for rows in sizes:
        for policy in POLICIES:
            yield {
                "model": model,
                "rows": rows,
                "recompute": policy,
                "profile_seconds": profiled,
                **_stages(parts, profile, device, rows, policy, programs),
            }


def _stages(parts: Parts, profile: Profile, device: Device, rows: int, policy: str, programs: dict[Any, Any]) -> dict[str, Any]:
    """Return the compiled and the estimated bytes of one plan, or which program the compiler rejects because of its memory.

    Args:
        parts, profile, device, rows, policy: of the plan.
        programs: those compiled for earlier plans, which are not compiled again, such as updates.
    """
    ids, batch = parts.stack.ids, parts.rows(rows * MICROBATCHES)
    ends = [len(ids) * s // STAGES for s in range(STAGES + 1)]
    stages = [{"layers": ids[a:b], "recompute": policy} for a, b in itertools.pairwise(ends)]
    plan = jpipe.Plan(schedule="pipedream_flush", microbatches=MICROBATCHES, stages=stages)
    compiling, topology = compiling_for(device, 1), Topology(levels=({"count": STAGES, "bandwidth": 1e11},), device=device)
    begin = time.perf_counter()
    try:
        with tracing_for(compiling.devices[0].platform):
            costs = parts.pipeline(plan).costs(batch, compiled_for=compiling.devices, programs=programs)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"device": compiling.kind, "too_large": f"not compiled: {str(error).splitlines()[0]}"}
    seconds = time.perf_counter() - begin
    estimates = profile.stage_costs(plan, rows)
    exact, estimated = (simulate_plan(plan, each, topology) for each in (costs, estimates))
    assert exact is not None
    assert estimated is not None
    return {
        "device": compiling.kind,
        "missing": compiling.missing,
        "seconds": seconds,
        "temporary": [cost.temporary for cost in costs],
        "estimated_temporary": [cost.temporary for cost in estimates],
        "peak": list(exact.peak_bytes),
        "estimated_peak": list(estimated.peak_bytes),
    }


def _parts(model: str, rows: int) -> Parts:
    path = ROOT / "configs" / ("papers/bert-355m.yaml" if model.startswith("bert") else "llama-3-70b.yaml")
    changes = {
        "model.preset": model,
        "model.seq_len": MODELS[model],
        "model.compute_dtype": "bfloat16",
        "precision.params": "bfloat16",
        "train.batch_size": rows * MICROBATCHES,
        "plan.file": AUTO,
    }
    with tempfile.TemporaryDirectory() as folder:
        if model.startswith("bert"):
            changes |= _masked_text(Path(folder))
        config = config_file.load(path, [f"{key}={value}" for key, value in changes.items()])
        return Parts.of(config, Reporter(1, 1, "samples", Console(quiet=True)))


def _masked_text(folder: Path) -> dict[str, Any]:
    """Write a text and a tokenizer with a mask, of which only the shapes of the batches are used."""
    tokenizer, text = folder / "tokenizer.json", folder / "text.txt"
    special = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(special)}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tokenizer))
    text.write_text("word " * 200_000, encoding="utf-8")
    return {"data.tokenizer": tokenizer, "data.path": text}
