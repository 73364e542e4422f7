"""The entry point of `jpipe`. It exits with 0 (done, or saved at a signal), 1 (failed), 2 (bad input) or 130 (interrupted)."""

import importlib.util
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from jpipe_train.console import interrupt, output, platforms
from jpipe_train.console.terminal import fail, first_line, printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (by default `sys.argv[1:]`) and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the encoding may have no "→"
    words = list(sys.argv[1:] if arguments is None else arguments)
    trains = words[:1] in (["train"], ["launch"], ["sweep"])
    with interrupt.default_in_process_1(), output.steady(ends=not trains), interrupt.watched():
        if (shadow := _shadow_of_jpipe()) is not None:
            kind = "file" if shadow.suffix else "folder"
            return fail(f"Python imports '{shadow}' in place of the package jpipe; rename this {kind}, or start jpipe in another folder", 2)
        if words == ["--version"]:
            from jpipe import __version__  # this module imports no JAX

            print(f"jpipe {__version__}")
            return 0
        try:
            os.getcwd()
        except OSError as error:  # much of Python fails in a deleted folder
            return fail(f"the current folder cannot be used: {error.strerror}; change to another folder (cd), and try again", 2)
        platforms.name_platforms()
        try:
            with interrupt.importing():
                from jpipe_train import commands
            return commands.run(arguments)
        except BaseException as error:
            if (message := interrupt.words(error)) is not None:
                print(message)
                return 130
            if (problem := _invalid_jax_setting(error)) is not None:
                return fail(problem, 2)
            if type(error).__name__ == "InputError":  # from a package that adds commands; commands.run reports the others
                return fail(printable(str(error)), 2)
            raise


def _shadow_of_jpipe() -> Path | None:
    """Return the module or package of another project that `import jpipe` would find in place of this package, or None."""
    spec = importlib.util.find_spec("jpipe")
    if spec is None or spec.origin is None or Path(spec.origin).with_name("pipeline.py").is_file():
        return None
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def _invalid_jax_setting(error: BaseException) -> str | None:
    """Return a message if JAX cannot be imported because an environment variable has an invalid value, otherwise None."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    if not isinstance(error, TypeError | ValueError) or not any(file.endswith("/jax/_src/config.py") for file in files):
        return None
    names = [name for name in os.environ if name.startswith("JAX_") and name.lower() in str(error).lower()]
    setting = f"{names[0]}={os.environ[names[0]]!a}" if names else "one of the variables JAX_…"
    return f"JAX does not accept {setting}: {printable(first_line(error))}; correct or unset the variable"


if __name__ == "__main__":
    sys.exit(main())
