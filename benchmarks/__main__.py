"""`python -m benchmarks [dispatch] [lowering] … [--json FILE]`: run the named benchmarks or all, print a table, write JSON."""

import argparse
import json
import multiprocessing
import pathlib
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks import cross_entropy, dispatch, lowering, recipes, scaling, single_stage, split
from benchmarks.machine import describe, make_cpu_devices

BENCHMARKS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "cross-entropy": cross_entropy.measure,
    "dispatch": dispatch.measure,
    "lowering": lowering.measure,
    "recipes": recipes.measure,
    "scaling": scaling.measure,
    "single-stage": single_stage.measure,
    "split": split.measure,
}


def in_a_process(measure: Callable[[], Any]) -> Any:
    """Run `measure` in a fresh process with four CPU devices, with settings and memory of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=make_cpu_devices) as pool:
        return pool.submit(measure).result()


def main() -> None:
    """Run the benchmarks that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run, by default all: {', '.join(BENCHMARKS)}")
    parser.add_argument(
        "--json", type=pathlib.Path, default=pathlib.Path("benchmarks/results.json"), help="where the figures go (default: %(default)s)"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"unknown benchmark '{unknown[0]}'; known: {', '.join(BENCHMARKS)}")
    results = {"machine": in_a_process(describe)}
    print(f"{results['machine']['device']}, {results['machine']['cores']} cores, jax {results['machine']['jax']}")
    print(f"{'figure':<100} {'measured':>12} {'goal':>14}")
    for name in options.names or BENCHMARKS:
        print(f"… {name}", file=sys.stderr)
        rows = in_a_process(BENCHMARKS[name])
        results[name] = rows
        for row in rows:
            print(f"{row['figure']:<100} {row['measured']:>12.4g} {row.get('goal', ''):>14}")
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
