"""Build the HTML pages that jpipe writes. A page needs no other file, and all external text is escaped."""

import base64
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template

_TEMPLATE = Path(__file__).with_name("page.html")
_STYLE = Path(__file__).with_name("page_style.css")


def document(title: str, results: str, sections: Mapping[str, str], generator: str, beside: str | None = None) -> str:
    """Return a whole HTML page. `results` is the HTML below the title; `sections` maps headings, as text, to HTML.

    A wide window shows the section with the heading `beside` to the right of the previous section.
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
    """Escape a text for HTML."""
    # A path may have bytes that are not UTF-8. Python represents them by surrogates, which cannot be written to a file.
    return html.escape(words.encode("utf-8", "replace").decode("utf-8"))


def note(words: str) -> str:
    """Return a paragraph of HTML with this text."""
    return f'<p class="note">{escape(words)}</p>'


def results(values: Mapping[str, str]) -> str:
    """Return boxes with the names and values of the most important results; "" if there are none."""
    boxes = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    columns = " ".join(f"{name}-{_columns(len(values), *limits)}" for name, limits in (("few", (3, 4)), ("many", (4, 7))))
    return f'<dl class="results {columns}">{boxes}</dl>' if boxes else ""


def _columns(boxes: int, least: int, most: int) -> int:
    """Return the number of columns, from `least` to `most`, with the fewest rows and, among equals, the fullest last row."""
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
    """Put a wide table into a box that scrolls, also with the keyboard."""
    return f'<div class="scrolls" tabindex="0" role="region" aria-label="A table">{content}</div>'


def figure(picture: bytes, size: str, alt: str, caption: str, kind: str = "png", wide: bytes | None = None) -> str:
    """Return a picture with a caption; `kind` is `png` or `svg+xml`.

    `size` is a CSS class: `narrow`, `small` or `wide`. A wide picture scrolls on a phone, also with the keyboard. `wide` is the content of
    a second file of the same kind, which replaces the picture in wide windows.
    """
    data, other = (f"data:image/{kind};base64,{base64.b64encode(content).decode()}" for content in (picture, wide or b""))
    image = f'<img src="{data}" alt="{escape(alt)}">'
    if wide is not None:
        image = f'<picture><source media="(min-width: 70rem)" srcset="{other}">{image}</picture>'
    scrolls = f' tabindex="0" role="region" aria-label="{escape(alt)}"' if size == "wide" else ""
    return f'<figure><div class="picture {size}"{scrolls}>{image}</div><figcaption>{escape(caption)}</figcaption></figure>'
