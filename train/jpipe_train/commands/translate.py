"""`jpipe translate RUN`: translate sentences with a trained GNMT."""

import sys
from typing import Annotated

import tyro

from jpipe_train.commands.parsing import OptionalCount, OptionalFile, Weights
from jpipe_train.console import interrupt
from jpipe_train.console.terminal import printable


def translate(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    source: OptionalFile = None,
    reference: OptionalFile = None,
    step: OptionalCount = None,
    weights: Weights = "newest",
) -> int:
    """Translate sentences with a GNMT that was trained, and find BLEU; translations go to standard output.

    Args:
        run: The folder of the run, such as runs/0001.
        source: A file with a sentence to a line; by default those that the run is validated on.
        reference: A file with their translations, for BLEU; by default those that the run is validated on, without a source.
        step: Of the checkpoint after so many steps; by default of the newest that is whole.
        weights: The newest parameters, or their moving average (ema), of a run with optimizer.ema_decay.
    """
    with interrupt.importing():
        from jpipe_train.generate import translate as translating

    def say(line: str) -> None:
        print(f"jpipe: {printable(line)}", file=sys.stderr, flush=True)

    def write(line: str) -> None:
        print(printable(line.removesuffix("\n")), flush=True)

    translating.main(translating.Request(run, source, reference, step, weights), write, say)
    return 0
