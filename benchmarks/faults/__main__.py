"""`python -m benchmarks.faults [kills] [damage] [pairs] [processes] [cost] [--runs N] [--seed N]`: print tables, write JSON.

`kills` ends one of four processes at random moments, `damage` breaks files of checkpoints, `pairs` restores six plans into each other,
`processes` has the same run written by one, two and four, `cost` measures what checkpoints take from training.
"""

import argparse
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax

import jpipe
from benchmarks import parts
from benchmarks.faults import cost, damage, kills, plans
from benchmarks.machine import make_cpu_devices

Part = Callable[[argparse.Namespace], Any]


def in_a_folder(part: Callable[[pathlib.Path, argparse.Namespace], Any]) -> Part:
    """Wrap a part so that it gets a temporary folder to write in."""

    def run(options: argparse.Namespace) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return part(pathlib.Path(folder), options)

    return run


PARTS: dict[str, Part] = {
    "kills": in_a_folder(lambda folder, options: kills.main(folder, options.runs, options.seed, options.kinds)),
    "damage": in_a_folder(lambda folder, options: damage.main(folder, options.damages, options.seed)),
    "pairs": in_a_folder(lambda folder, options: plans.pairs(folder)),
    "processes": in_a_folder(lambda folder, options: plans.by_processes(folder)),
    "cost": in_a_folder(lambda folder, options: cost.main(folder, options.rounds)),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the parts that the command line names.

    Args:
        arguments: of the command line, by default those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=50, help="that are killed, of each kind (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", default=list(kills.KINDS), choices=list(kills.KINDS), help="that are killed (default: all)")
    parser.add_argument("--damages", type=int, default=20, help="of checkpoints (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of steps with and without checkpoints (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is random (default: %(default)s)")
    parts.run(parser, PARTS, "benchmarks/faults.json", arguments)


if __name__ == "__main__":
    jpipe.keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    make_cpu_devices()
    main()
