"""The request of `jpipe doctor`, which the command line is read from."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from jpipe_train.console.options import Flag, Overrides


@dataclass(frozen=True)
class Request:
    """The arguments of `jpipe doctor`.

    Attributes:
        config: The YAML file of a run: its folder is tried; by default as of a run without run.dir.
        overrides: Replace one key of the config, such as run.dir=/shared/runs/1.
        as_json: Print findings and facts as JSON, for programs.
    """

    config: Annotated[str | None, tyro.conf.arg(metavar="CONFIG")] = None
    overrides: Overrides = ()
    as_json: Annotated[Flag, tyro.conf.arg(name="json")] = False
