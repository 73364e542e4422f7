"""`python -m benchmarks.papers [NAME ...] [--documents FILE ...] [--pictures FOLDER]`: compare the papers' tables with predictions.

No GPU is needed: profiles are analytic. Each part is a table or figure of PipeDream (SOSP 2019) or PipeDream-2BW (ICML 2021).
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks import parts
from benchmarks.papers import pipedream, two_bw
from benchmarks.papers.document import Table, write_pages
from benchmarks.papers.draw import draw_all
from jpipe import InputError

PARTS: dict[str, Callable[[argparse.Namespace], list[Table]]] = {
    "table-1": lambda options: pipedream.table_1(options.model or ()),
    "figure-17": lambda _: pipedream.figure_17(),
    "figure-1": lambda _: pipedream.figure_1(),
    "section-5.4": lambda _: pipedream.section_5_4(),
    "figure-15": lambda _: pipedream.figure_15(),
    "figure-16": lambda _: pipedream.figure_16(),
    "figure-18": lambda _: pipedream.figure_18(),
    "2bw-choice": lambda _: two_bw.choice(),
    "2bw-figure-6": lambda _: two_bw.figure_6(),
    "2bw-figure-7": lambda _: two_bw.figure_7(),
    "2bw-figure-8": lambda _: two_bw.figure_8(),
    "2bw-figure-9": lambda _: two_bw.figure_9(),
    "2bw-appendix-b": lambda _: two_bw.appendix_b(),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the parts that the command line names.

    Args:
        arguments: of the command line, by default those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", nargs="+", type=_document, metavar="FILE", help="put the tables into these, in place of their own")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the tables into this folder")
    parser.add_argument(
        "--model",
        action="append",
        choices=sorted({name for name, *_ in pipedream.TABLE_1}),
        help="of table-1: only this model; more than once for several",
    )
    try:
        tables = dict[str, Table]()
        parts.run(parser, {name: _shown(part, tables) for name, part in PARTS.items()}, "benchmarks/papers.json", arguments)
    except InputError as error:
        sys.exit(f"bench-papers: {error}")


def _document(name: str) -> Path:
    """Return the path of an existing document."""
    if not (path := Path(name)).is_file():
        raise argparse.ArgumentTypeError(f"expected a document, found no file '{name}'; name one with a place for a table")
    return path


def _shown(part: Callable[[argparse.Namespace], list[Table]], earlier: dict[str, Table]) -> Callable[[argparse.Namespace], Any]:
    """Wrap a part: print its tables, write them into the documents, draw them with earlier ones, and return them as data."""

    def run(options: argparse.Namespace) -> Any:
        tables = part(options)
        for table in tables:
            print(f"{table.name}\n\n{table.text}", flush=True)
        if options.documents:
            write_pages(options.documents, {table.name: table.text for table in tables})
        earlier.update({table.name: table for table in tables})
        if options.pictures:
            draw_all(earlier, [table.name for table in tables], options.pictures)
        return [table._asdict() for table in tables]

    return run


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
