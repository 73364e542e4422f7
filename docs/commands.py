"""Provide the help of every command for the page of the command line: what `jpipe COMMAND --help` prints."""

import contextlib
import io
import os
import re
from collections.abc import Iterator
from unittest import mock

from jpipe_train import cli, commands

COLUMNS = 80


def names() -> Iterator[str]:
    """Yield the commands, those of groups too: `train`, `data`, `data prepare`."""
    for name in commands.names():
        yield name
        if name in commands.GROUPS:
            yield from (f"{name} {inner}" for inner in commands.names(name))


def help_text(name: str = "") -> str:
    """Return what a command prints for `--help`."""
    width = mock.patch.dict(os.environ, COLUMNS=str(COLUMNS))
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit), width:
        cli.main([*name.split(), "--help"])
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


def with_help(page: str) -> str:
    """Return the page with the help of each command at the end of its section, which is headed `jpipe COMMAND`."""
    sections = re.split(r"(?=^## )", page, flags=re.MULTILINE)
    return "".join(f"{section.rstrip()}\n{_help_of(section)}\n" for section in sections)


def _help_of(section: str) -> str:
    heading = re.match(r"## `jpipe ?([a-z ]*)`\n", section)
    return f"\n```text\n{help_text(heading[1])}\n```\n" if heading else ""
