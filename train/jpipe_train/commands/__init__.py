"""The commands of `jpipe`."""

import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

import jpipe
from jpipe_train import registry
from jpipe_train.commands import model_commands, plan_commands, run_commands, setup_commands
from jpipe_train.commands.group import Group
from jpipe_train.console.exit_codes import failed
from jpipe_train.console.terminal import LINES, fail, printable

COMMANDS: Mapping[str, Any] = {
    "train": model_commands.train,
    "plan": plan_commands.plan,
    "export": model_commands.export,
    "evaluate": model_commands.evaluate,
    "launch": setup_commands.launch,
    "runs": run_commands.runs,
    "compare": run_commands.compare,
    "sweep": run_commands.sweep,
    "simulate": plan_commands.simulate,
    "target": plan_commands.target,
    "doctor": setup_commands.doctor,
    "configs": setup_commands.configs,
    "completion": setup_commands.completion,
}
"""The function of each command of this package, in the order of `jpipe --help`. The commands of other packages follow."""
ABOUT = """Pipeline-parallel training for JAX and Flax. Three commands do most of the work:

  jpipe train CONFIG         train a model through a pipeline
  jpipe plan CONFIG          find the fastest plan that fits into memory
  jpipe export RUN FILE      write the trained weights

Begin with a copy of a config: jpipe configs copy

Describe a command: jpipe COMMAND --help. Print the version: jpipe --version."""
"""The text at the top of `jpipe --help`."""


def names(group: str | None = None) -> tuple[str, ...]:
    """Return the names of all commands, or of the commands of one group."""
    return (*COMMANDS, *registry.names("commands")) if group is None else groups()[group]


def groups() -> dict[str, tuple[str, ...]]:
    """Return the names of the command groups, each with the names of its commands."""
    return {name: tuple(found.commands) for name, found in _added().items() if isinstance(found, Group)}


@functools.cache
def _added() -> Mapping[str, Any]:
    """Return the commands of other packages. Raise InputError if one cannot be imported, or has the name of a command of jpipe."""
    if twice := next((name for name in registry.names("commands") if name in COMMANDS), None):
        raise jpipe.InputError(
            f"{registry.described(registry.entries('commands')[twice])} adds the command {twice}, which jpipe has already; uninstall the "
            "package"
        )
    return {name: registry.find("commands", name) for name in registry.names("commands")}


def unknown(arguments: Sequence[str]) -> str | None:
    """Return the error message for a command or option that does not exist, or None."""
    group, words = None, list(arguments)
    if words and words[0] not in COMMANDS and words[0] in groups():
        group = words.pop(0)
    if words and words[0].replace("_", "-").startswith("--tyro-"):  # tyro answers a mistake in its own options with a traceback
        return f"unknown option {words[0]}; jpipe completion SHELL prints a script for a shell"
    if not words or words[0].startswith("-") or words[0] in names(group):
        return None
    from jpipe.errors import nearest, short

    where = "" if group is None else f"{group}: "
    return f"{where}unknown command {short(words[0])}; {nearest(words[0], names(group))}"


def application(command: str | None) -> tyro.extras.SubcommandApp:
    """Return the tyro application with all commands, or without other packages' commands if `command` is a command of this package.

    The command `completion` gets all of them.
    """
    app = tyro.extras.SubcommandApp()
    needs_all = command not in COMMANDS or command == "completion"
    for name, found in {**COMMANDS, **(_added() if needs_all else {})}.items():
        command_or_group: Any = found.application() if isinstance(found, Group) else found
        app.command(name=name)(command_or_group)
    return app


def run(arguments: Sequence[str] | None) -> int:
    """Run the command line `arguments` and return the exit code. Raise SystemExit if the command line is wrong, or asks for help."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    logging.getLogger("jpipe").addHandler(LINES)  # a logger does not add the same handler twice
    try:
        if message := unknown(words):
            sys.exit(fail(printable(message), 2))
        code: int = application(words[0] if words else None).cli(prog="jpipe", description=ABOUT, args=words)
    except ValueError as error:
        if not isinstance(error, jpipe.InputError):
            raise
        return failed(error)
    return code
