"""The command line: `jpipe train CONFIG [--set key=value ...]`. Exit codes: 0 done, 1 diverged, 2 bad input, 130 interrupted."""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

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
    from jpipe import InputError, keep_freed_memory
    from train import config_file, loop

    keep_freed_memory()
    try:
        loop.main(config_file.load(config, overrides))
    except InputError as error:
        return _fail(error, 2)
    except loop.NonFiniteLoss as error:
        return _fail(error, 1)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (by default the process's own) and return the exit code."""
    try:
        code: int = app.cli(prog="jpipe", description="Pipeline-parallel training for JAX and Flax.", args=arguments)
        return code
    except KeyboardInterrupt:
        return 130


def _fail(error: Exception, code: int) -> int:
    print(f"jpipe: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
