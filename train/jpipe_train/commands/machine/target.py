"""`jpipe target`: list the devices that stages can be compiled for, describe this machine's device in a file, or compile a plan for one."""

from typing import Annotated

import tyro

import jpipe
from jpipe_train.console import interrupt
from jpipe_train.console.options import Flag, OptionalFile, Overrides
from jpipe_train.console.terminal import printable


def target(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME|FILE]", help_behavior_hint="")] = None,
    here: Flag = False,
    out: OptionalFile = None,
    roofline: Annotated[str | None, tyro.conf.arg(metavar="CONFIG")] = None,
    overrides: Overrides = (),
    allow_code: Flag = False,
    json: Flag = False,
) -> int:
    """List the devices, with their published properties, that stages can be compiled for even if this machine does not have them.

    Args:
        name: Show one device with the sources of its properties. Give a name, such as h100-80gb, or a YAML file in the same format.
        here: Describe the GPU or TPU of this machine in a file. With this file other machines can compile stages for the device.
        out: The file that --here writes; it must not exist. By default it is named after the device, in the current folder.
        roofline: Compile the stages of this config's plan for NAME, and show the bytes, FLOPs and least seconds of each program, its most
            expensive kernels, and the same train step as one program. Nothing is run.
        overrides: With --roofline, replace one key of the config, such as plan.recompute=elementwise.
        allow_code: With --roofline, import and run the functions that the config names, as in train.
        json: With --roofline, print JSON.
    """
    with interrupt.importing():
        import jpipe_train.plan.roofline as rooflines
        import jpipe_train.plan.target as targets

    if here and name is not None:
        raise jpipe.InputError(where="target", expected="a name or --here", found=f"both '{name}' and --here", change="remove one of them")
    if out is not None and not here:
        raise jpipe.InputError("target: --out has no effect without --here; did you mean jpipe target --here?")
    if roofline is None and (overrides or allow_code or json):
        raise jpipe.InputError("target: --set, --allow-code and --json have no effect without --roofline; add --roofline CONFIG")
    if roofline is not None and name is None:
        raise jpipe.InputError("target: --roofline needs the name of a target; did you mean jpipe target h100-80gb --roofline CONFIG?")
    if roofline is not None and name is not None:
        lines = rooflines.main(name, roofline, overrides, allow_code=allow_code, as_json=json)
    else:
        lines = targets.write_here(out) if here else targets.listing() if name is None else targets.description(name)
    print("\n".join(map(printable, lines)))
    return 0
