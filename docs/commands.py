"""Write the help of every command into the page of the command line: `python -m docs.commands`.

It is what `jpipe COMMAND --help` prints, without `--help` itself, lists of commands and empty defaults. The options of a process, which
several commands have, are printed once, above the first section.
"""

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from jpipe_train import cli, commands

COLUMNS = 80
PAGE = Path(__file__).parent / "reference" / "cli.md"
_HELP = re.compile(r"\n```\n(?:usage: |  --coordinator ).*?\n```\n", re.DOTALL)
_LEFT_OUT = re.compile(r"\n subcommands\n.*|\n +\(default:\s+(?:None|False)\)| +\(default:\s+(?:None|False)\)", re.DOTALL)
_HEADINGS = re.compile(r"\n+ (?:positional arguments|options)\n -+(?=\n|\Z)")
_OPTION = re.compile(r"^  (-\S+).*\n(?:   .*\n)*", re.MULTILINE)
OF_PROCESSES = "--coordinator", "--num-processes", "--process-id", "--connect-limit", "--wait-limit", "--secret-file"
"""The options of a job of several processes."""


def names() -> Iterator[str]:
    """Yield the commands, also inside groups: `train`, `data`, `data prepare`."""
    for name in commands.names():
        yield name
        if name in commands.groups():
            yield from (f"{name} {inner}" for inner in commands.names(name))


def help_text(name: str = "") -> str:
    """Return what a command prints for `--help`."""
    width = mock.patch.dict(os.environ, COLUMNS=str(COLUMNS))
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit), width:
        cli.main([*name.split(), "--help"])
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


def with_help(page: str) -> str:
    """Return the page with the help of each command at the end of its section, which is headed `jpipe COMMAND`.

    Args:
        page: with or without the help, which is put in place of what the page has.
    """
    sections = re.split(r"(?=^## )", _HELP.sub("\n", page), flags=re.MULTILINE)
    return "\n".join(f"{section.rstrip()}\n{_help_of(section)}" for section in sections)


def _help_of(section: str) -> str:
    heading = re.match(r"## `jpipe ?([a-z ]*)`\n", section)
    whole = _LEFT_OUT.sub("", help_text(heading[1] if heading else "train")) + "\n"
    if heading:
        text = _OPTION.sub(lambda option: "" if option[1] in ("-h,", *OF_PROCESSES) else option[0], whole)
        text = _HEADINGS.sub("\n", text.rstrip())
    else:
        text = "".join(option[0] for option in _OPTION.finditer(whole) if option[1] in OF_PROCESSES)
    return f"\n```\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(with_help(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
