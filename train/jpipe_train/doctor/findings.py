"""What a check found, and how equal findings of several processes become one."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Level = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """One row of the table.

    Attributes:
        level: whether it is as it should be (`ok`), worth knowing (`note`), or keeps a job from running or from its speed (`problem`).
        what: what was looked at.
        found: what is there.
        advice: what to do about it; empty if nothing is to be done.
    """

    level: Level
    what: str
    found: str
    advice: str = ""


def merged(of_processes: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the findings of all processes; one that not all of them have names those that have it.

    Args:
        of_processes: the findings of each process, in order.
    """
    having: dict[Finding, list[int]] = {}
    for index, findings in enumerate(of_processes):
        for finding in findings:
            having.setdefault(finding, []).append(index)
    count = len(of_processes)
    return [
        finding if len(indices) == count else finding._replace(found=f"{processes(indices)}: {finding.found}")
        for finding, indices in having.items()
    ]


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
    """Return which processes have which value, such as `0.12 in processes 0-2; 0.10 in process 3`."""
    groups: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(value, []).append(index)
    return "; ".join(f"{value or 'nothing'} in {processes(indices)}" for value, indices in groups.items())
