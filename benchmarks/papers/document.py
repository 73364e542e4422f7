"""Format tables as Markdown, read them from a document, and replace them there."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jpipe import InputError, files


class Table(NamedTuple):
    """A table for the document.

    Attributes:
        name: of its place, `<!-- NAME -->` in the document.
        head: names of the columns.
        rows: as many cells each.
    """

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]

    @property
    def text(self) -> str:
        """The table as Markdown, a line for each row."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def put(text: str, tables: Mapping[str, str]) -> str:
    """Put each table after the line `<!-- NAME -->` of a text, in place of the table that follows it.

    Args:
        text: of the document.
        tables: Markdown by name.

    Raises:
        InputError: the document has no place for one of them.
    """
    for name, table in tables.items():
        place = re.compile(rf"<!-- {re.escape(name)} -->\n+(?:\|.*\n)*\n*")
        if not place.search(text):
            raise InputError(f"--document: expected a line '<!-- {name} -->' for this table, found none; add it")
        new = f"<!-- {name} -->\n\n{table}\n"
        text = place.sub(lambda _, new=new: new, text)  # type: ignore[misc]
    return text


def read(text: str) -> list[Table]:
    """Return the tables of a text in Markdown, with the name of their place, which is empty if they have none.

    Args:
        text: of the document.
    """
    tables = []
    for match in re.finditer(r"(?:^<!-- (.+) -->\n+)?^(\|.*\n)\|[-:| ]+\|\n((?:\|.*(?:\n|$))*)", text, re.MULTILINE):
        name, head, rows = match.groups()
        tables.append(Table(name or "", _cells(head), [_cells(row) for row in rows.splitlines()]))
    return tables


def _cells(line: str) -> list[str]:
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def write_pages(documents: Sequence[Path], tables: Mapping[str, str]) -> None:
    """Put each table into the documents that have a place for it.

    Args:
        documents: files, which together have a place for each table.
        tables: Markdown by name.

    Raises:
        InputError: no document has a place for one of them.
    """
    texts = {document: document.read_text(encoding="utf-8") for document in documents}
    for name, table in tables.items():
        pages = [document for document, text in texts.items() if f"<!-- {name} -->" in text]
        if not pages:
            raise InputError(f"--documents: expected a line '<!-- {name} -->' for this table in one of the documents, found none; add it")
        texts |= {document: put(texts[document], {name: table}) for document in pages}
    for document, text in texts.items():
        files.write_atomically(document, text)


def write(document: Path, tables: Mapping[str, str]) -> None:
    """Put tables into a document, in one step.

    Args:
        document: a file with a place for each of them.
        tables: Markdown by name.
    """
    files.write_atomically(document, put(document.read_text(encoding="utf-8"), tables))
