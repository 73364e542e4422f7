"""Print tables that can be read in a terminal and pasted into a document."""

from collections.abc import Sequence


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table as Markdown.

    Args:
        head: names of the columns.
        rows: as many cells each.
    """
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in (cells[0], ["-" * width for width in widths], *cells[1:]):
        print(f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |", flush=True)
