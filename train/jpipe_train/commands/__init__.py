"""The commands of `jpipe`, one module each."""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jpipe
from jpipe_lm.commands import data, generate
from jpipe_train.commands import completion, configs, evaluate, export, launch, plan, simulate, train
from jpipe_train.commands.machine import doctor, target
from jpipe_train.commands.parsing import app
from jpipe_train.commands.runs import compare, listing, sweep
from jpipe_train.console.exit_codes import failed
from jpipe_train.console.terminal import LINES, fail, printable

COMMANDS: Mapping[str, Any] = {
    "train": train.train,
    "plan": plan.plan,
    "export": export.export,
    "evaluate": evaluate.evaluate,
    "generate": generate.generate,
    "launch": launch.launch,
    "runs": listing.runs,
    "compare": compare.compare,
    "sweep": sweep.sweep,
    "simulate": simulate.simulate,
    "target": target.target,
    "doctor": doctor.doctor,
    "data": data.app,
    "configs": configs.configs,
    "completion": completion.completion,
}
"""The function or the application of each command, in the order of `jpipe --help`."""
GROUPS: Mapping[str, tuple[str, ...]] = {"data": ("prepare", "tokenizer", "show")}
"""The commands that have commands of their own, with those."""
ABOUT = """Pipeline-parallel training for JAX and Flax. Three commands do most of the work:

  jpipe train CONFIG         train a model through a pipeline
  jpipe plan CONFIG          find the fastest plan that fits into memory
  jpipe export RUN FILE      write the trained weights

Begin with a copy of a config: jpipe configs copy

Describe a command: jpipe COMMAND --help. Print the version: jpipe --version."""
"""The text at the top of `jpipe --help`."""

for _name, _command in COMMANDS.items():
    app.command(name=_name)(_command)


def names(group: str | None = None) -> tuple[str, ...]:
    """Return the names of all commands, or of a group."""
    return tuple(COMMANDS) if group is None else GROUPS[group]


def unknown(arguments: Sequence[str]) -> str | None:
    """Return the error message for a command or option that does not exist, or None."""
    group, words = None, list(arguments)
    if words and words[0] in GROUPS:
        group = words.pop(0)
    if words and words[0].replace("_", "-").startswith("--tyro-"):  # tyro answers a mistake in its own options with a traceback
        return f"unknown option {words[0]}; jpipe completion SHELL prints a script for a shell"
    if not words or words[0].startswith("-") or words[0] in names(group):
        return None
    from jpipe.errors import nearest, short

    where = "" if group is None else f"{group}: "
    return f"{where}unknown command {short(words[0])}; {nearest(words[0], names(group))}"


def run(arguments: Sequence[str] | None) -> int:
    """Run the command line `arguments` and return the exit code.

    Raises:
        SystemExit: the command line is wrong, or asks for help.
    """
    if message := unknown(sys.argv[1:] if arguments is None else arguments):
        sys.exit(fail(printable(message), 2))
    logging.getLogger("jpipe").addHandler(LINES)  # a logger keeps one handler once, even if this function runs again
    try:
        code: int = app.cli(prog="jpipe", description=ABOUT, args=arguments)
    except ValueError as error:
        if not isinstance(error, jpipe.InputError):
            raise
        return failed(error)
    return code
