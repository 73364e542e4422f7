"""`jpipe sweep CONFIG --grid KEY=VALUES`: train with every combination of some values."""

from typing import Annotated

import tyro

from jpipe_train.commands.parsing import Flag, OptionalCount, Overrides
from jpipe_train.console import interrupt


def sweep(
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")],
    grid: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE,VALUE")] = (),
    overrides: Overrides = (),
    folder: Annotated[str | None, tyro.conf.arg(name="dir", metavar="FOLDER")] = None,
    sample: OptionalCount = None,
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0,
    task: Annotated[int | None, tyro.conf.arg(metavar="I")] = None,
    slurm: Flag = False,
    allow_code: Flag = False,
) -> int:
    """Train a run for every combination of some values, one after the other, and compare them.

    Runs that are complete are skipped, and others are resumed, so the same command continues a sweep, and another grid adds runs to it.

    Args:
        config: The YAML file.
        grid: A key and its values, such as optimizer.learning_rate=1e-3,3e-3; may be given several times, for every combination.
            With --sample also a range: log:1e-4:1e-2, uniform:0:0.5.
        overrides: Replace one key of the file in all runs, such as train.steps=100.
        folder: The folder of the runs; by default sweeps/ and the name of the config.
        sample: Train only N combinations, drawn at random; a larger N adds runs.
        seed: Seed of these draws.
        task: Train only combination number I, from 0, and compare nothing, as a job of an array does.
        slurm: Print the script of a SLURM job array with a task for each run, and train nothing.
        allow_code: Import and run the functions that the file names, as in train.
    """
    with interrupt.importing():
        from jpipe_train.runs import sweeping
        from jpipe_train.runs.grid import Request

    request = Request(config, grid, overrides, folder, sample, seed, allow_code)
    if slurm:
        print(sweeping.slurm_script(request, task), end="")
        return 0
    return sweeping.main(request, task)
