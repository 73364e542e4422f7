"""Tables in HTML: notebooks show plans, pipelines and states in this form."""

import html
from collections.abc import Sequence

_MAX_ROWS = 40  # the middle of a longer table is left out


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a `<div>` with a caption and a table, all text escaped; a row of `…` replaces the middle of a long table."""
    shown = list(rows) if len(rows) <= _MAX_ROWS else [*rows[: _MAX_ROWS - 2], ["…"] * len(head), rows[-1]]
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in shown)
    table = f"<table><thead><tr>{_cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><p>{html.escape(caption)}</p>{table}</div>"


def size(count: float) -> str:
    """Return a number of bytes as text with a unit, such as `98.6 MB`."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f'<{tag} style="text-align: left; padding-right: 1em">{html.escape(text)}</{tag}>' for text in texts)
