"""The command line of benchmarks with several parts: which parts to run, and the file for their figures."""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.machine import describe


def run(
    parser: argparse.ArgumentParser,
    parts: Mapping[str, Callable[[argparse.Namespace], Any]],
    results_file: str,
    arguments: list[str] | None,
) -> None:
    """Run the parts that the command line names, and write their figures after each.

    Args:
        parser: parser of the command line, with the options of the parts.
        parts: functions that print tables and return figures, by name.
        results_file: the default file for the figures.
        arguments: the arguments of the command line; None: those of this process.
    """
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run, by default all: {', '.join(parts)}")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path(results_file), help="default: %(default)s")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in parts]:
        parser.error(f"unknown part '{unknown[0]}'; known: {', '.join(parts)}")
    results: dict[str, Any] = {"machine": describe()}
    print(f"{results['machine']['device']}, {results['machine']['cores']} cores, jax {results['machine']['jax']}")
    for name in options.names or parts:
        print(f"\n{name}\n", flush=True)
        results[name] = parts[name](options)
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {options.json}", file=sys.stderr)
