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
    """Show the timeline, the bubble and the weight versions of a pipeline and, for a config, its bytes. Nothing is trained.

    Args:
        source: The JSON file of a plan, or a YAML config such as configs/gpt-bytes.yaml.
        overrides: Replace one key of a config, such as plan.schedule=gpipe.
        batches: How many batches to show; by default enough batches to reach the steady state.
        png: Draw the timeline into this file. For a config, the memory is drawn into a second file next to it.
        no_compile: Do not compile the stages of a config. Compiling takes seconds for small models and minutes for large ones. Without it
            the temporary memory of the programs, and so the peak memory, is unknown.
        target: Compile for this device, which this machine need not have: a name that jpipe target lists, or a YAML file of a target or a
            topology. By default, the stages are compiled for the devices of this machine.
        allow_code: Allow a config that names functions of your own, which jpipe imports and runs.
    """
    with interrupt.importing():
        import jpipe_train.plan.simulate as simulation

    text = simulation.main(source, overrides, batches, png, allow_code=allow_code, compile=not no_compile, target=target)
    print("\n".join(map(printable, text.split("\n"))))
    return 0
