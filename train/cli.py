"""The entry point of `jpipe`: exit codes 0 done or saved, 1 failed, 2 bad input, 130 interrupted. Commands: `train.commands`."""

import io
import sys
from collections.abc import Sequence

from train.console import interrupt, output, signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (by default the process's own) and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without "→" is no reason to stop
    given = list(sys.argv[1:] if arguments is None else arguments)
    trains = given[:1] in (["train"], ["launch"])
    with signals.as_usual_in_process_1(), output.steady(ends=not trains), interrupt.watched():
        if given == ["--version"]:
            from jpipe import __version__  # which imports no JAX

            print(f"jpipe {__version__}")
            return 0
        try:
            with interrupt.held():  # modules in C may crash when interrupted
                from train import commands
            interrupt.check()
            return commands.run(arguments)
        except BaseException as error:
            if (words := interrupt.words(error)) is None:
                raise
            print(words)
            return 130


if __name__ == "__main__":
    sys.exit(main())
