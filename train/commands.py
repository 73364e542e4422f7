"""The commands: `jpipe train CONFIG [--set key=value ...]` and `jpipe simulate PLAN|CONFIG [--png FILE] ...`."""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from train import interrupt
from train.terminal import printable

app = tyro.extras.SubcommandApp()


@app.command
def train(
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")],
    overrides: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")] = (),
    allow_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Train a model through a pipeline, as a YAML file says.

    Args:
        config: The YAML file, such as configs/gpt-bytes.yaml.
        overrides: Replace one key of the file, such as train.steps=100.
        allow_code: Import and run the functions that the file names as module:function, from the current folder or installed packages.
    """
    # JAX is imported by these, so not above: `--help` and slips of the keyboard are answered at once.
    with interrupt.held():
        from jpipe import InputError, keep_freed_memory
        from train import config_file, loop
    interrupt.check()

    keep_freed_memory()
    try:
        loop.main(config_file.load(config, overrides, allow_code=allow_code))
    except InputError as error:
        return _fail(str(error), 2)
    except loop.RunStopped as error:
        return _fail(printable(str(error)), 1)
    return 0


@app.command
def simulate(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN|CONFIG")],
    overrides: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")] = (),
    batches: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    png: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    allow_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Show what a pipeline would do: timeline, bubble, weight versions and, for a config, bytes. Nothing is trained.

    Args:
        source: A plan's JSON file, or a YAML config such as configs/gpt-bytes.yaml.
        overrides: Replace one key of a config, such as plan.schedule=gpipe.
        batches: How many batches to show; by default enough to see the steady state.
        png: Draw the timeline into this file and, for a config, the memory into one next to it.
        allow_code: Import and run the functions that a config names, as in train.
    """
    with interrupt.held():
        import train.simulate as simulation
        from jpipe import InputError
    interrupt.check()

    try:
        shown = simulation.main(source, overrides, batches, png, allow_code=allow_code)
    except InputError as error:
        return _fail(str(error), 2)
    print("\n".join(map(printable, shown.split("\n"))))
    return 0


def run(arguments: Sequence[str] | None) -> int:
    """Run the command line `arguments` and return the exit code."""
    about = "Pipeline-parallel training for JAX and Flax. The version: jpipe --version."
    code: int = app.cli(prog="jpipe", description=about, args=arguments)
    return code


def _fail(message: str, code: int) -> int:
    print(f"jpipe: {message}", file=sys.stderr)
    return code
