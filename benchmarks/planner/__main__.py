"""`python -m benchmarks.planner [speed] [papers] [2bw] [here] [--json FILE]`: print tables, write JSON.

`speed` times the searches, `papers` and `2bw` hold them against the papers' experiments without any of their GPUs, `here` trains on this
machine and holds measurements against predictions.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.machine import describe
from benchmarks.planner import here, paper_2bw, paper_pipedream, speed

PARTS: dict[str, Callable[[], Any]] = {"speed": speed.main, "papers": paper_pipedream.main, "2bw": paper_2bw.main, "here": here.main}


def main(arguments: list[str] | None = None) -> None:
    """Run the parts that the command line names.

    Args:
        arguments: of the command line, by default those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run, by default all: {', '.join(PARTS)}")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("benchmarks/planner.json"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in PARTS]:
        parser.error(f"unknown part '{unknown[0]}'; known: {', '.join(PARTS)}")
    results: dict[str, Any] = {"machine": describe()}
    print(f"{results['machine']['device']}, {results['machine']['cores']} cores, jax {results['machine']['jax']}")
    for name in options.names or PARTS:
        print(f"\n{name}\n", flush=True)
        results[name] = PARTS[name]()
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
