"""Choose the combinations of a test's parameters that each command runs; they change from commit to commit."""

import functools
import itertools
import os
import re
import subprocess
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = 10
VARIABLE = "JPIPE_TEST_PART"
TEST, SLOW, ALL = range(3)  # the first command that runs a combination: `make test`, `make test-slow` or `make test-all`


@functools.cache
def invariants() -> frozenset[str]:
    """Return the tests of docs/explanation/invariants.md, as `tests/FILE::NAME`."""
    return frozenset(re.findall(r"`(tests/[\w/]+\.py::\w+)`", (ROOT / "docs" / "explanation" / "invariants.md").read_text("utf-8")))


def part_of_commit() -> tuple[int, str]:
    """Return the part of ten that this commit runs, and where it comes from.

    Each commit on the first-parent line of a branch has another part than the nine before it. A shallow clone does not know its place on
    the line: its part is drawn by the commit's hash.
    """
    if VARIABLE in os.environ:
        return int(os.environ[VARIABLE]) % PARTS, VARIABLE
    if _git("rev-parse", "--is-shallow-repository") == "false" and (count := _git("rev-list", "--count", "--first-parent", "HEAD")):
        return int(count) % PARTS, "the number of commits"
    if hash_of_commit := commit():
        return int(hash_of_commit, 16) % PARTS, "the commit's hash"
    return 0, "no Git here"


def commit() -> str:
    """Return the hash of the commit, which is empty where there is no Git."""
    return _git("rev-parse", "HEAD")


def _git(*words: str) -> str:
    """Return what git prints, which is empty where there is no git, no repository or no commit."""
    command = ["git", "-c", f"safe.directory={ROOT}", *words]  # in a container the folder may be another user's
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def levels(cases: Sequence[pytest.Item], part: int, every: bool) -> list[int]:
    """Return for each combination the first command that runs it.

    Args:
        cases: all combinations of one test.
        part: 0 to 9.
        every: in ten parts all combinations run: `make test` and `make test-slow` run a tenth of them in each part, whatever else they run.
    """
    drawn = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
    turn = drawn[part::PARTS] if every else []
    thinned = cases[0].get_closest_marker("thinned")
    chosen = _chosen(drawn, turn, part, thinned.kwargs) if thinned and hasattr(cases[0], "callspec") else dict.fromkeys(cases, TEST)
    found = []
    for item in cases:
        marked = ALL if item.get_closest_marker("exhaustive") else SLOW if item.get_closest_marker("slow") else TEST
        level = max(chosen.get(item, ALL), marked)
        found.append(min(level, SLOW) if item in turn else level)
    return found


def is_due(name: str, part: int, turns: int) -> bool:
    """Return whether a test that takes turns with others runs in this part: once in as many consecutive parts as there are turns."""
    return zlib.crc32(name.encode()) % turns == part % turns


def _chosen(drawn: Sequence[pytest.Item], turn: Collection[pytest.Item], part: int, options: Mapping[str, int]) -> dict[pytest.Item, int]:
    """Return the combinations that `make test` and `make test-slow` run for what they cover."""
    begin = len(drawn) * part // PARTS
    cases = [*drawn[begin:], *drawn[:begin]]
    size = options.get("size", 1)
    few = _covering(cases, turn, size, options.get("most", len(cases)))
    more = _covering(cases, turn, size + 1, options.get("most_slow", 0 if few else 1), few)
    return dict.fromkeys(more, SLOW) | dict.fromkeys(few, TEST)


def _covering(
    cases: Sequence[pytest.Item], turn: Collection[pytest.Item], size: int, most: int, before: Collection[pytest.Item] = ()
) -> list[pytest.Item]:
    """Return few cases, at most `most`, that together have each combination of `size` values that those before lack.

    Those whose turn it is come first, as long as they add something.
    """
    covers = {item: _combinations(item, size) for item in cases}
    left = set().union(*covers.values()).difference(*(covers[item] for item in before))
    remaining, selected = dict.fromkeys(item for item in cases if item not in before), []
    while left and len(selected) < most:
        best = max(remaining, key=lambda item: (item in turn and not left.isdisjoint(covers[item]), len(covers[item] & left)))
        left -= covers[best]
        selected.append(best)
        del remaining[best]
    return selected


@functools.cache
def _combinations(item: pytest.Item, size: int) -> frozenset[tuple[tuple[str, str], ...]]:
    """Return each combination of `size` values that a case has."""
    params = sorted((name, repr(value)) for name, value in item.callspec.params.items())
    return frozenset(itertools.combinations(params, min(size, len(params))))


def never_run(cases: Sequence[pytest.Item], every: bool) -> list[str]:
    """Return the combinations that neither `make test` nor `make test-slow` runs in any of ten parts."""
    lowest = [min(found) for found in zip(*(levels(cases, part, every) for part in range(PARTS)), strict=True)]
    return [item.nodeid for item, level in zip(cases, lowest, strict=True) if level == ALL]
