"""The commands: `jpipe train CONFIG [--set key=value ...]`."""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from train import interrupt

app = tyro.extras.SubcommandApp()


@app.command
def train(
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")],
    overrides: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")] = (),
) -> int:
    """Train a model through a pipeline, as a YAML file says.

    Args:
        config: The YAML file, such as configs/gpt-bytes.yaml.
        overrides: Replace one key of the file, such as train.steps=100.
    """
    # JAX is imported by these, so not above: `--help` and slips of the keyboard are answered at once.
    with interrupt.held():
        from jpipe import InputError, keep_freed_memory
        from train import config_file, loop
    interrupt.check()

    keep_freed_memory()
    try:
        loop.main(config_file.load(config, overrides))
    except InputError as error:
        return _fail(error, 2)
    except loop.NonFiniteLoss as error:
        return _fail(error, 1)
    return 0


def run(arguments: Sequence[str] | None) -> int:
    """Run the command line `arguments` and return the exit code."""
    code: int = app.cli(prog="jpipe", description="Pipeline-parallel training for JAX and Flax.", args=arguments)
    return code


def _fail(error: Exception, code: int) -> int:
    print(f"jpipe: {error}", file=sys.stderr)
    return code
