"""What the programs of the studies share: options for results, reading results, and showing tables."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning.grid import Row
from benchmarks.papers.document import Table, write_pages
from jpipe import InputError


def add_options(parser: argparse.ArgumentParser, file: str) -> None:
    """Add the options for results and what is made of them; `file` is the default for the results."""
    parser.add_argument("--json", type=Path, default=Path(file), help="default: %(default)s")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="run nothing; make tables and pictures of these results")
    parser.add_argument("--documents", nargs="+", type=Path, metavar="FILE", help="put the tables into these, in place of their own")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw pictures into this folder")


def read(path: Path) -> tuple[list[Row], str]:
    """Read the rows and the platform of results.

    Raises:
        InputError: they cannot be read.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        return [Row(**row) for row in results["rows"]], results["machine"]["platform"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--from-json: expected results that this program wrote in '{path}': {error}") from None


def show(tables: Sequence[Table], documents: Sequence[Path] | None, written: str = "") -> None:
    """Print tables, and put those into documents that have names which begin with `written`."""
    for table in tables:
        print(f"\n{table.name}\n\n{table.text}", end="")
    if documents:
        write_pages(documents, {table.name: table.text for table in tables if table.name.startswith(written)})
