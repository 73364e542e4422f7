"""Commands that predict: `plan`, `simulate` and `target`."""

from functools import partial
from typing import Annotated

import tyro

import jpipe
from jpipe_train.console import interrupt
from jpipe_train.console.options import ALONE, Fields, Flag, OptionalCount, OptionalFile, Overrides, Process
from jpipe_train.console.terminal import printable
from jpipe_train.plan.request import LOCAL, Options


def plan(options: Fields[Options], process: Fields[Process] = ALONE) -> int:
    """Find the plan that trains a model fastest on these machines and fits into their memory. No run is started."""
    with interrupt.importing():
        from jpipe_train.plan.inputs import Request
        from jpipe_train.plan.plan import main
        from jpipe_train.run import job

    find = partial(main, Request(**vars(options)), process.connect_limit, process.wait_limit)
    return job.plan(find, process, alone=options.topology != LOCAL)


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
        no_compile: Do not compile the stages of a config. Then the peak memory is unknown.
        target: Compile for this device, which this machine need not have: a name that jpipe target lists, or a YAML file of a target or a
            topology.
        allow_code: Import and run the functions that a config names, as in train.
    """
    with interrupt.importing():
        import jpipe_train.plan.simulate as simulation

    text = simulation.main(source, overrides, batches, png, allow_code=allow_code, compile=not no_compile, target=target)
    print("\n".join(map(printable, text.split("\n"))))
    return 0


def target(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME|FILE]", help_behavior_hint="")] = None,
    here: Flag = False,
    out: OptionalFile = None,
    roofline: Annotated[str | None, tyro.conf.arg(metavar="CONFIG")] = None,
    longest_rows: Annotated[str | None, tyro.conf.arg(metavar="CONFIG")] = None,
    overrides: Overrides = (),
    allow_code: Flag = False,
    json: Flag = False,
) -> int:
    """List the devices that stages can be compiled for even if this machine lacks them, with their published properties.

    Args:
        name: Show one device with the sources of its properties. Give a name, such as h100-80gb, or a YAML file in the same format.
        here: Describe the GPU or TPU of this machine in a file, for which other machines can compile.
        out: The file that --here writes; it must not exist. By default it is named after the device, in the current folder.
        roofline: Compile the stages of this config's plan for NAME, and show the bytes, FLOPs and least seconds of each program, its most
            expensive kernels, and the same train step as one program. Nothing is run.
        longest_rows: Find how many tokens the rows of this config may have, so that the stages of its plan fit into the memory of NAME, by
            number of slices and recomputation. Nothing is run.
        overrides: With a config, replace one key of it, such as plan.recompute=none.
        allow_code: With a config, import and run the functions that it names, as in train.
        json: With --roofline, print JSON.
    """
    with interrupt.importing():
        import jpipe_train.plan.longest_rows as longest
        import jpipe_train.plan.roofline as rooflines
        import jpipe_train.plan.target as targets

    if here and name is not None:
        raise jpipe.InputError(where="target", expected="a name or --here", found=f"both '{name}' and --here", change="remove one of them")
    if out is not None and not here:
        raise jpipe.InputError("target: --out has no effect without --here; did you mean jpipe target --here?")
    config = roofline or longest_rows
    if roofline is not None and longest_rows is not None:
        raise jpipe.InputError("target: --roofline and --longest-rows are two questions; ask one at a time")
    if config is None and (overrides or allow_code):
        raise jpipe.InputError("target: --set and --allow-code have no effect without --roofline or --longest-rows; add one with a CONFIG")
    if roofline is None and json:
        raise jpipe.InputError("target: --json has no effect without --roofline; add --roofline CONFIG")
    if config is not None and name is None:
        option = "--roofline" if roofline else "--longest-rows"
        raise jpipe.InputError(f"target: {option} needs the name of a target; did you mean jpipe target h100-80gb {option} CONFIG?")
    if roofline is not None and name is not None:
        lines = rooflines.main(name, roofline, overrides, allow_code=allow_code, as_json=json)
    elif longest_rows is not None and name is not None:
        lines = longest.main(name, longest_rows, overrides, allow_code=allow_code)
    else:
        lines = targets.write_here(out) if here else targets.listing() if name is None else targets.description(name)
    print("\n".join(map(printable, lines)))
    return 0
