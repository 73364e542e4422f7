"""Make the tables of measurements on the pages of docs/ from the data that the repository has.

`python -m benchmarks.tables` writes them into the pages. `benchmarks/data/PAGE.json` has tables of a page with the command and the machine;
its `source` says where the figures come from, and `hidden` lists columns that the page leaves out. If results of a benchmark are kept, in
`benchmarks/hosts/links.json`, `benchmarks/hosts/accuracy.json`, `benchmarks/peers/*.json` and `benchmarks/check_gpu/results.json`, tables
are made from them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.check_gpu import tables as check_gpu
from benchmarks.hosts import accuracy, links
from benchmarks.papers.document import Table, write
from benchmarks.peers import report

DATA = Path(__file__).parent / "data"
PAGES = Path(__file__).parents[1] / "docs" / "explanation"


def file_of(page: str) -> Path:
    """Return the file of a page, which is in `docs/explanation/` or in `docs/how-to/`."""
    file = PAGES / f"{page}.md"
    return file if file.exists() else PAGES.parent / "how-to" / file.name


def transcribed(page: str) -> dict[str, Table]:
    """Return the tables of a page that its file in `benchmarks/data/` has, by name.

    Args:
        page: the name without its ending.
    """
    tables = json.loads((DATA / f"{page}.json").read_text(encoding="utf-8"))["tables"]
    return {table["name"]: _shown(table) for table in tables}


def _shown(table: Mapping[str, Any]) -> Table:
    """Return a table without the columns that only the data have, those in `hidden`."""
    kept = [i for i, name in enumerate(table["head"]) if name not in table.get("hidden", ())]
    head, *rows = ([line[i] for i in kept] for line in (table["head"], *table["rows"]))
    return Table(table["name"], head, rows)


def from_results() -> list[Table]:
    """Return the tables that are made from results of benchmarks."""
    tables = [links.table(links.read(links.RESULTS)), *report.tables(report.RESULTS), *check_gpu.tables()]
    if accuracy.RESULTS.exists():
        tables.append(accuracy.table(json.loads(accuracy.RESULTS.read_text(encoding="utf-8"))["runs"]))
    return tables


def of_pages() -> Mapping[str, Mapping[str, Table]]:
    """Return the tables of each page by name."""
    pages = {path.stem: transcribed(path.stem) for path in sorted(DATA.glob("*.json"))}
    for table in from_results():
        for page, tables in pages.items():
            if f"<!-- {table.name} -->" in file_of(page).read_text(encoding="utf-8"):
                tables[table.name] = table
    return pages


def main() -> None:
    """Write all tables into their pages."""
    for page, tables in of_pages().items():
        write(file_of(page), {name: table.text for name, table in tables.items()})


if __name__ == "__main__":
    main()
