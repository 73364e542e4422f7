"""Findings as a table for people, and as JSON for programs."""

import json
from collections.abc import Sequence

from jpipe_train.console.terminal import align, count, printable
from jpipe_train.doctor.findings import Finding
from jpipe_train.doctor.local import Facts

FORMAT = "jpipe-doctor/1"


def has_problem(findings: Sequence[Finding]) -> bool:
    """Return whether one of the findings is a problem."""
    return any(finding.level == "problem" for finding in findings)


def table(findings: Sequence[Finding]) -> list[str]:
    """Return the findings as lines: level, subject and finding; below, indented, what to do."""
    rows = align([[finding.level, finding.what, printable(finding.found)] for finding in findings])
    indent = " " * sum(2 + max(len(cell) for cell in column) for column in zip(*(finding[:2] for finding in findings), strict=True))
    lines = []
    for finding, row in zip(findings, rows, strict=True):
        lines += [row, *([f"{indent}→ {printable(finding.advice)}"] if finding.advice else [])]
    numbers = [sum(finding.level == level for finding in findings) for level in ("problem", "note")]
    return [*lines, f"{count(numbers[0], 'problem')}, {count(numbers[1], 'note')}"]


def as_json(findings: Sequence[Finding], everyone: Sequence[Facts]) -> str:
    """Return findings and the facts of all processes as JSON."""
    rows = [{name: getattr(finding, name) for name in ("level", "what", "found", "advice")} for finding in findings]
    data = {"format": FORMAT, "findings": rows, "processes": list(everyone)}
    return json.dumps(data, indent=2)
