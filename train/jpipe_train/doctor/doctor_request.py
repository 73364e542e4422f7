"""The request of `jpipe doctor`, made from the command line."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from jpipe_train.console.options import Flag, Overrides


@dataclass(frozen=True)
class Request:
    """The arguments of `jpipe doctor`.

    Attributes:
        config: The YAML file of the run to check. By default, the folder of a run without run.dir is checked.
        overrides: Replace one key of the config, such as run.dir=/shared/runs/1.
        as_json: Print findings and facts as JSON, for programs.
    """

    config: Annotated[str | None, tyro.conf.arg(metavar="CONFIG")] = None
    overrides: Overrides = ()
    as_json: Annotated[Flag, tyro.conf.arg(name="json")] = False
