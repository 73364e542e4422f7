"""Check that the README and the pages of docs/ are short, that a page has one title, and that noun chains become fewer."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
README_WORDS, README_LINES, PAGE_WORDS = 900, 120, 2500
CHAINS = 8  # of such words in all, which may only fall
_CHAIN = re.compile(r"\b(?:that of|those of|of which|whose)\b", re.IGNORECASE)
_UNSEEN = re.compile(r"^(<!-- .* -->|\|[-| ]+\|)$", re.MULTILINE)  # the names of tables, and the lines below their headings
_FENCED = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$\n?", re.MULTILINE | re.DOTALL)


def problems(root: Path) -> Iterator[str]:
    """Yield a line for each page of the project in `root` that is too long or has not one title."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    move = "move what is more into a page of docs/ and link to it"
    if (words := len(readme.split())) > README_WORDS:
        yield f"README.md: {words:,} words, at most {README_WORDS:,}; {move}"
    if (lines := len(readme.splitlines())) > README_LINES:
        yield f"README.md: {lines:,} lines, at most {README_LINES:,}; {move}"
    for path in sorted((root / "docs").rglob("*.md")):
        page = path.relative_to(root).as_posix()
        text = _FENCED.sub("", path.read_text(encoding="utf-8"))
        if (words := len(_UNSEEN.sub("", text).split())) > PAGE_WORDS:
            yield f"{page}: {words:,} words outside code blocks, at most {PAGE_WORDS:,}; divide it into pages of one purpose each"
        if len(titles := re.findall(r"^# .*", text, re.MULTILINE)) != 1:
            yield f"{page}: expected one title (a line that begins with '# '), found {len(titles)}; a page has one purpose"
    if (chains := count_chains(root)) > CHAINS:
        yield f"code and docs: {chains} of 'that of', 'those of', 'of which' and 'whose', at most {CHAINS}; say who does what"


def count_chains(root: Path) -> int:
    """Count the words that join nouns to chains, in the packages and the pages of the project in `root`."""
    files = [path for name in ("jpipe", "planner", "train", "docs") for path in (root / name).rglob("*") if path.suffix in (".py", ".md")]
    return sum(len(_CHAIN.findall(path.read_text(encoding="utf-8"))) for path in files)


if __name__ == "__main__":
    sys.exit("\n".join(problems(ROOT)) or None)
