"""`python -m benchmarks.learning [--full] [--documents FILE ...] [--pictures FOLDER]`: train with delayed weights, and compare recipes.

The runs emulate each schedule on one device. `--full` runs the grid of docs/explanation/learning-setup.md, which takes a GPU; the default
is a part of it.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import jax

from benchmarks.learning import report, results
from benchmarks.learning.draw import draw_all
from benchmarks.learning.grid import FULL, SHORT, SHORT_SECONDS, SHORT_SEEDS, Part, Row, study
from benchmarks.machine import describe
from jpipe import InputError, keep_freed_memory

UPDATES, EVALUATIONS, SEEDS = 600, 20, 3
WRITTEN = "GPT"  # the tables for documents; seeds of the digits differ more than recipes do


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the grid, or read its results, and print the tables.

    Args:
        arguments: of the command line, by default those of this process.
    """
    options = _parser().parse_args(arguments)
    try:
        rows, platform = results.read(options.from_json) if options.from_json else _run(options)
        if not rows:
            raise InputError("--seconds-limit: no run ended in this time; allow more, or lower --updates")
        results.show(report.tables(rows, ", on a CPU" if platform == "cpu" else ""), options.documents, WRITTEN)
    except InputError as error:
        sys.exit(f"bench-learning: {error}")
    if options.pictures is not None:
        draw_all(rows, options.pictures)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the whole grid with three seeds, some minutes for each part on a large GPU")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help='only these parts, such as "digits, 8 stages, SGD"')
    parser.add_argument("--updates", type=int, default=UPDATES, help="of each run; default: %(default)s")
    parser.add_argument("--seeds", type=int, help=f"default: {SEEDS} with --full, otherwise {SHORT_SEEDS}")
    parser.add_argument("--at-once", type=int, help="how many runs are vectorized; default: 1 on CPUs, otherwise 52")
    limit = f"start no further runs after this time; default: none with --full, otherwise {SHORT_SECONDS:.0f}"
    parser.add_argument("--seconds-limit", type=float, help=limit)
    results.add_options(parser, "benchmarks/learning.json")
    return parser


def _run(options: argparse.Namespace) -> tuple[list[Row], str]:
    parts = _parts(FULL if options.full else SHORT, options.parts)
    if options.updates < EVALUATIONS:
        raise InputError(f"--updates: expected at least {EVALUATIONS}, one for each evaluation; found {options.updates}")
    machine = describe()
    print(f"{machine['device']}, {machine['cores']} cores, jax {machine['jax']}", file=sys.stderr)
    limit = options.seconds_limit or (None if options.full else SHORT_SECONDS)
    rows = study(
        parts,
        options.json,
        lambda line: print(line, file=sys.stderr, flush=True),
        updates=options.updates,
        evaluations=EVALUATIONS,
        seeds=options.seeds or (SEEDS if options.full else SHORT_SEEDS),
        at_once=options.at_once or (1 if machine["platform"] == "cpu" else 52),
        deadline=None if limit is None else time.monotonic() + limit,
    )
    print(f"written to {options.json}", file=sys.stderr)
    return rows, machine["platform"]


def _parts(parts: Sequence[Part], names: Sequence[str] | None) -> list[Part]:
    known = {part.name: part for part in parts}
    if unknown := [name for name in names or () if name not in known]:
        raise InputError(f"--parts: unknown part '{unknown[0]}'; known: {'; '.join(known)}")
    return [known[name] for name in names or known]


if __name__ == "__main__":
    keep_freed_memory()
    jax.config.update("jax_default_matmul_precision", "highest")
    main()
