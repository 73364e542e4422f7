"""`jpipe compare A B …`: compare the configs and the losses of runs."""

from typing import Annotated

import tyro

from jpipe_train.console import interrupt


def compare(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN RUN …", help_behavior_hint="(required)")],
    out: Annotated[str, tyro.conf.arg(metavar="FILE.html")] = "compare.html",
) -> int:
    """Compare the configs and the losses of runs. The comparison is printed, and written as a page and a picture.

    Args:
        runs: The folders of the runs, such as runs/0001 runs/0002.
        out: The page to write. The picture has the same name with the ending svg. Only an earlier comparison is replaced, no other file.
    """
    with interrupt.importing():
        from jpipe_train.console.progress import Reporter
        from jpipe_train.runs import comparing

    comparing.main(runs, out, Reporter(1, 1, "steps"))
    return 0
