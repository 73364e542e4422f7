"""`python -m benchmarks [dispatch] [single-stage] [lowering] [--json FILE]`: run, print a table, write JSON."""

import argparse
import json
import pathlib
import sys

import jax

from benchmarks import dispatch, lowering, single_stage
from benchmarks.machine import describe
from jpipe import keep_freed_memory

BENCHMARKS = {"dispatch": dispatch.measure, "single-stage": single_stage.measure, "lowering": lowering.measure}


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
    jax.config.update("jax_num_cpu_devices", 4)
    keep_freed_memory()  # as `jpipe train` does; also for what it is compared with
    results = {"machine": describe()}
    print(f"{results['machine']['device']}, {results['machine']['cores']} cores, jax {results['machine']['jax']}")
    print(f"{'figure':<62} {'measured':>12} {'goal':>14}")
    for name in options.names or BENCHMARKS:
        print(f"… {name}", file=sys.stderr)
        rows = BENCHMARKS[name]()
        results[name] = rows
        for row in rows:
            print(f"{row['figure']:<62} {row['measured']:>12.4g} {row.get('goal', ''):>14}")
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
