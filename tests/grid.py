"""A parser of the rank x time grid, to compare grids with timelines, and with other grids."""

import re

from jpipe.programs import Span, Timeline

_OF_TRANSFERS = re.compile(r"(\d+|host) to (\d+|host)|sum \d+(,\d+)*")  # the name of a row
_CELL = re.compile(r"([A-Z]+)(\d+)\.(\d+)(?:/(\d+))?(?::(\d+))?(\*?)")


def parse_grid(text: str) -> Timeline:
    """Read the text of `format_grid`, in ticks; indentation, blank lines, rows of transfers and notes behind a row are ignored."""
    rows: list[tuple[Span, ...]] = []
    for line in text.splitlines():
        head, bar, cells = line.split("<<<")[0].partition("|")
        if not line.strip() or (bar and (head.split() == ["tick"] or _OF_TRANSFERS.fullmatch(head.strip()))):
            continue
        assert [bar, *head.split()] == ["|", "rank", str(len(rows))], line
        rows.append(_parse_row(cells.split()))
    return tuple(rows)


def _parse_row(tokens: list[str]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for tick, token in enumerate(tokens):
        if token == "-":
            assert spans[-1].end == tick, f"'-' continues nothing at tick {tick}"
            spans[-1] = spans[-1]._replace(end=tick + 1)
        elif token != ".":
            match = _CELL.fullmatch(token)
            assert match is not None, token
            op, microbatch, version, chunk, place, star = match.groups()
            part = None if place is None else int(place)
            spans.append(Span(op, int(microbatch), int(version), tick, tick + 1, bool(star), chunk=int(chunk or 0), part=part))
    return tuple(spans)
