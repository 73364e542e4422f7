"""`jpipe simulate PLAN|CONFIG`: show the timeline of a pipeline."""

from typing import Annotated

import tyro

from jpipe_train.console import interrupt
from jpipe_train.console.options import Flag, OptionalCount, OptionalFile, Overrides
from jpipe_train.console.terminal import printable


def simulate(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN|CONFIG")],
    overrides: Overrides = (),
    batches: OptionalCount = None,
    png: OptionalFile = None,
    no_compile: Flag = False,
    target: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE")] = None,
    allow_code: Flag = False,
) -> int:
    """Show what a pipeline would do: timeline, bubble, weight versions and, for a config, bytes. Nothing is trained.

    Args:
        source: A plan's JSON file, or a YAML config such as configs/gpt-bytes.yaml.
        overrides: Replace one key of a config, such as plan.schedule=gpipe.
        batches: How many batches to show; by default enough to see the steady state.
        png: Draw the timeline into this file and, for a config, the memory into one next to it.
        no_compile: Do not compile the stages of a config, which takes seconds for small models and minutes for large ones; the temporaries
            of their programs, and so the peak memory, are then unknown.
        target: Compile for this device, which need not be here: one that jpipe target lists, or a YAML file of a target or a topology; by
            default for the devices of this machine.
        allow_code: Import and run the functions that a config names, as in train.
    """
    with interrupt.importing():
        import jpipe_train.plan.simulate as simulation

    text = simulation.main(source, overrides, batches, png, allow_code=allow_code, compile=not no_compile, target=target)
    print("\n".join(map(printable, text.split("\n"))))
    return 0
