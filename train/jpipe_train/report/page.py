"""Parts of the HTML pages that jpipe writes. A page needs no other file, and all external text is escaped."""

import base64
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template

_TEMPLATE = Path(__file__).with_name("page.html")
_STYLE = Path(__file__).with_name("page_style.css")


def document(title: str, results: str, sections: Mapping[str, str], generator: str, beside: str | None = None) -> str:
    """Return a page.

    Args:
        title: its title, as text.
        results: what stands below the title, as HTML; may be empty.
        sections: the content of each section as HTML, by its heading as text.
        generator: the program that wrote the page, for its metadata.
        beside: the heading of the section that stands in wide windows beside the one before it.
    """
    names, bodies = list(sections), []
    for i, (heading, content) in enumerate(sections.items()):
        side = "right" if heading == beside else "left" if names[i + 1 : i + 2] == [beside] else ""
        place = f' class="{side}"' if side else ""
        bodies.append(f"<section{place}>\n<h2>{escape(heading)}</h2>\n{content}\n</section>")
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        results=results,
        sections="\n".join(bodies),
        generator=escape(generator),
        style=_STYLE.read_text(encoding="utf-8"),
    )


def escape(words: str) -> str:
    """Return a text as HTML."""
    # A path may have bytes that are not UTF-8; Python represents them by surrogates, which cannot be written to a file.
    return html.escape(words.encode("utf-8", "replace").decode("utf-8"))


def note(words: str) -> str:
    """Return a paragraph."""
    return f'<p class="note">{escape(words)}</p>'


def results(values: Mapping[str, str]) -> str:
    """Return boxes with the most important results by name, or "" without any."""
    boxes = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    columns = " ".join(f"{name}-{_columns(len(values), *limits)}" for name, limits in (("few", (3, 4)), ("many", (4, 7))))
    return f'<dl class="results {columns}">{boxes}</dl>' if boxes else ""


def _columns(boxes: int, least: int, most: int) -> int:
    """Return the number of columns that needs the fewest rows; of several, the one with the fullest last row."""
    return min(range(least, most + 1), key=lambda columns: (math.ceil(boxes / columns), -boxes % columns))


def table(kind: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with the names of the rows in its first column; `kind` is a CSS class."""
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>' for first, *cells in rows
    )
    top = f"<thead><tr>{columns}</tr></thead>" if head else ""
    return f'<table class="{kind}">{top}<tbody>{lines}</tbody></table>'


def scrolling(content: str) -> str:
    """Return a wide table in a box that scrolls, also by keyboard."""
    return f'<div class="scrolls" tabindex="0" role="region" aria-label="A table">{content}</div>'


def figure(picture: bytes, size: str, alt: str, caption: str, kind: str = "png", wide: bytes | None = None) -> str:
    """Return a picture with a caption.

    Args:
        picture: the content of the file.
        size: a class of the style, `narrow`, `small` or `wide`; a wide one scrolls on a phone, also by keyboard.
        alt: what the picture shows, in words.
        caption: the text below it.
        kind: `png` or `svg+xml`.
        wide: another picture of the same kind for wide windows, in place of a narrow one.
    """
    data, other = (f"data:image/{kind};base64,{base64.b64encode(content).decode()}" for content in (picture, wide or b""))
    image = f'<img src="{data}" alt="{escape(alt)}">'
    if wide is not None:
        image = f'<picture><source media="(min-width: 70rem)" srcset="{other}">{image}</picture>'
    scrolls = f' tabindex="0" role="region" aria-label="{escape(alt)}"' if size == "wide" else ""
    return f'<figure><div class="picture {size}"{scrolls}>{image}</div><figcaption>{escape(caption)}</figcaption></figure>'
