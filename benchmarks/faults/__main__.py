"""`python -m benchmarks.faults [kills] [damage] [pairs] [processes] [cost] [--runs N] [--seed N]`: print tables, write JSON.

`kills` ends one of four processes at random moments, `damage` breaks files of checkpoints, `pairs` restores six plans into each other,
`processes` has the same run written by one, two and four, `cost` measures what checkpoints take from training.
"""

import argparse
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax

import jpipe
from benchmarks.faults import cost, damage, kills, plans
from benchmarks.machine import describe, make_cpu_devices

PARTS: dict[str, Callable[[pathlib.Path, argparse.Namespace], Any]] = {
    "kills": lambda folder, options: kills.main(folder, options.runs, options.seed, options.kinds),
    "damage": lambda folder, options: damage.main(folder, options.damages, options.seed),
    "pairs": lambda folder, options: plans.pairs(folder),
    "processes": lambda folder, options: plans.by_processes(folder),
    "cost": lambda folder, options: cost.main(folder, options.rounds),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the parts that the command line names.

    Args:
        arguments: of the command line, by default those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run, by default all: {', '.join(PARTS)}")
    parser.add_argument("--runs", type=int, default=50, help="that are killed, of each kind (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", default=list(kills.KINDS), choices=list(kills.KINDS), help="that are killed (default: all)")
    parser.add_argument("--damages", type=int, default=20, help="of checkpoints (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of steps with and without checkpoints (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is random (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("benchmarks/faults.json"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in PARTS]:
        parser.error(f"unknown part '{unknown[0]}'; known: {', '.join(PARTS)}")
    results: dict[str, Any] = {"machine": describe()}
    print(f"{results['machine']['device']}, {results['machine']['cores']} cores, jax {results['machine']['jax']}")
    for name in options.names or PARTS:
        print(f"\n{name}\n", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            results[name] = PARTS[name](pathlib.Path(folder), options)
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    jpipe.keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    make_cpu_devices()
    main()
