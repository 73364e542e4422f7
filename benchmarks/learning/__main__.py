"""`python -m benchmarks.learning [gpt] [digits] [--quick] [--json FILE] [--pictures FOLDER]`: print tables, write JSON, draw pictures.

Trains a small GPT and an MLP plainly, and with weights that are some updates old as under each asynchronous schedule.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax

import jpipe
from benchmarks.learning import tasks
from benchmarks.learning.draw import draw_all
from benchmarks.learning.runs import VARIANTS, Setting, make_plan, predict_step, train
from benchmarks.machine import describe

SEEDS = 3
TASKS = {"gpt": tasks.make_gpt, "digits": tasks.make_digits}
SETTINGS = (  # the first learning rate of each task is the best of those tried with plain training
    Setting("gpt", 4, 3e-3, 150, 10),
    Setting("gpt", 4, 1e-2, 150, 10),
    Setting("digits", 4, 1e-2, 400, 20),
    Setting("digits", 4, 2e-2, 400, 20),
    Setting("digits", 4, 5e-3, 400, 20),
    Setting("digits", 8, 5e-3, 400, 20),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tasks that the command line names.

    Args:
        arguments: of the command line, by default those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which tasks, by default all: {', '.join(TASKS)}")
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates, instead of those of docs/learning.md; four stages")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="a few steps with one seed, to see that it runs")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("benchmarks/learning.json"), help="default: %(default)s")
    parser.add_argument("--pictures", type=pathlib.Path, help="a folder for pictures; by default none are drawn")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in TASKS]:
        parser.error(f"unknown task '{unknown[0]}'; known: {', '.join(TASKS)}")
    settings = [setting for setting in SETTINGS if setting.task in (options.names or TASKS)]
    if options.rates or options.quick:
        settings = list({setting.task: setting for setting in reversed(settings)}.values())  # the first of each task
    if options.rates:
        settings = [dataclasses.replace(setting, learning_rate=rate) for setting in settings for rate in options.rates]
    if options.quick:
        settings = [dataclasses.replace(setting, steps=4, every=2) for setting in settings]
    results: dict[str, Any] = {"machine": describe(), "settings": []}
    print(f"{results['machine']['device']}, {results['machine']['cores']} cores, jax {results['machine']['jax']}")
    for setting in settings:
        results["settings"].append(measure(setting, options.variants, range(1 if options.quick else SEEDS)))
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if options.pictures is not None:
        draw_all(results["settings"], options.pictures)
    print(f"written to {options.json}", file=sys.stderr)


def measure(setting: Setting, variants: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Train variants, and print a row of a table for each.

    Args:
        setting: what is trained.
        variants: which of `VARIANTS`.
        seeds: one run for each.
    """
    task, results = TASKS[setting.task](), {}
    print(f"\n{setting.name}, {setting.steps} steps; mean over {len(seeds)} seeds (range)\n")
    print(f"| {'':<26} | {'loss on held-out data':<24} | {'accuracy':<24} | predicted time of a step |\n|---|---|---|---|")
    for variant in variants:
        began = time.monotonic()
        curves = train(setting, task, variant, seeds)
        step_time = predict_step(make_plan(variant, task.stack.ids, setting.stages))
        results[variant] = {"step_time": step_time, "runs": [curve._asdict() for curve in curves]}
        loss, accuracy = (_mean_and_range([getattr(curve, name)[-1] for curve in curves]) for name in ("loss", "accuracy"))
        print(f"| {variant:<26} | {loss:<24} | {accuracy:<24} | {step_time:.2f} |", flush=True)
        print(f"… {setting.name}: {variant}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return dataclasses.asdict(setting) | {"variants": results}


def _mean_and_range(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    jpipe.keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as folder:  # stages that are equal are compiled once
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        main()
