"""What a notebook shows of a plan, a pipeline or a state: a caption and a small table."""

import html
from collections.abc import Sequence

_MOST_ROWS = 40  # of a table; what is in the middle of a longer one is left out


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as HTML, every text in it escaped.

    Args:
        caption: above the table.
        head: names of the columns.
        rows: the cells, as many in each row as there are columns.

    Returns:
        Both in a `<div>`, with a row of marks in place of what is in the middle of a long table.
    """
    shown = list(rows) if len(rows) <= _MOST_ROWS else [*rows[: _MOST_ROWS - 2], ["…"] * len(head), rows[-1]]
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in shown)
    table = f"<table><thead><tr>{_cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><p>{html.escape(caption)}</p>{table}</div>"


def size(count: float) -> str:
    """Bytes with their unit: `98.6 MB`."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f'<{tag} style="text-align: left; padding-right: 1em">{html.escape(text)}</{tag}>' for text in texts)
