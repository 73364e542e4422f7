"""What a check found, how equal findings of several processes become one, and their table."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from jpipe_train.console.terminal import align, count, printable

Level = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """One row of the table.

    Attributes:
        level: whether it is as it should be (`ok`), worth knowing (`note`), or keeps a job from running or from its speed (`problem`).
        what: what was looked at.
        found: what is there.
        advice: what to do about it; empty if nothing is to be done.
        measured: numbers that no two processes measure equally, which follow `found`.
        least: the one of these numbers by which the worst of several processes is chosen.
    """

    level: Level
    what: str
    found: str
    advice: str = ""
    measured: str = ""
    least: float = 0.0


def merged(of_processes: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Merge the findings of all processes; a finding of only some processes names them.

    Of findings that differ only in their measurement, the one with the least is shown.

    Args:
        of_processes: the findings of each process, in order.
    """
    having: dict[Finding, list[tuple[float, int, str]]] = {}
    for index, findings in enumerate(of_processes):
        for finding in findings:
            equal = finding._replace(measured="", least=0.0)
            having.setdefault(equal, []).append((finding.least, index, finding.measured))
    return [finding._replace(found=_found(finding, members, len(of_processes))) for finding, members in having.items()]


def _found(finding: Finding, members: Sequence[tuple[float, int, str]], count: int) -> str:
    """Return what some of `count` processes have found, with the worst of their measurements."""
    _, worst, measured = min(members)
    text = finding.found + (f", {measured}" if measured else "")
    if len({each for *_, each in members}) > 1:
        text += f" (the least, in process {worst})"
    return text if len(members) == count else f"{processes([index for _, index, _ in members])}: {text}"


def processes(indices: Sequence[int]) -> str:
    """Return a text such as `process 3` or `processes 0-3, 6`."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return f"process{'' if len(indices) == 1 else 'es'} {shown}"


def differing(values: Sequence[str]) -> str:
    """Describe which processes have which value, such as `0.12 in processes 0-2; 0.10 in process 3`."""
    groups: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(value, []).append(index)
    return "; ".join(f"{value or 'nothing'} in {processes(indices)}" for value, indices in groups.items())


def table(findings: Sequence[Finding]) -> list[str]:
    """Return the findings as lines: level, what, and what was found; below, indented, what to do."""
    rows = align([[finding.level, finding.what, printable(finding.found)] for finding in findings])
    indent = " " * sum(2 + max(len(cell) for cell in column) for column in zip(*(finding[:2] for finding in findings), strict=True))
    lines = []
    for finding, row in zip(findings, rows, strict=True):
        lines += [row, *([f"{indent}→ {printable(finding.advice)}"] if finding.advice else [])]
    numbers = [sum(finding.level == level for finding in findings) for level in ("problem", "note")]
    return [*lines, f"{count(numbers[0], 'problem')}, {count(numbers[1], 'note')}"]
