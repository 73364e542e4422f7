"""The arguments of `jpipe sweep` as a dataclass; tyro makes the command-line options from it."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from jpipe_train.console.options import Flag, Overrides


@dataclass(frozen=True)
class Request:
    """The arguments of `jpipe sweep`.

    Attributes:
        config: The YAML file.
        grid: A key and its values, such as optimizer.learning_rate=1e-3,3e-3. With several --grid, every combination is trained.
        overrides: Replace one key of the file in all runs, such as train.steps=100.
        folder: The folder for the runs; by default sweeps/ and the name of the config.
        allow_code: Import and run the functions that the file names.
    """

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    grid: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE,VALUE")] = ()
    overrides: Overrides = ()
    folder: Annotated[str | None, tyro.conf.arg(name="dir", metavar="FOLDER")] = None
    allow_code: Flag = False
