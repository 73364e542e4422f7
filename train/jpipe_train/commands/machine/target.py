"""`jpipe target`: list the devices that stages can be compiled for, or write this machine's."""

from typing import Annotated

import tyro

import jpipe
from jpipe_train.console import interrupt
from jpipe_train.console.options import Flag, OptionalFile
from jpipe_train.console.terminal import printable


def target(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME|FILE]", help_behavior_hint="")] = None,
    here: Flag = False,
    out: OptionalFile = None,
) -> int:
    """List the devices that stages can be compiled for although they are not here, with their published properties.

    Args:
        name: Show this one with its sources: a name, such as h100-80gb, or a YAML file of the same format.
        here: Write the GPU or TPU of this machine into a file, from which other machines compile stages for it.
        out: With --here, the file, a new one; by default named after the device, in the current folder.
    """
    with interrupt.importing():
        import jpipe_train.plan.target as targets

    if here and name is not None:
        raise jpipe.InputError(where="target", expected="a name or --here", found=f"both '{name}' and --here", change="leave one out")
    if out is not None and not here:
        raise jpipe.InputError("target: --out is for --here; did you mean jpipe target --here?")
    lines = targets.write_here(out) if here else targets.listing() if name is None else targets.description(name)
    print("\n".join(map(printable, lines)))
    return 0
