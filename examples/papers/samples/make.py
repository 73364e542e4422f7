"""Write a small generated data set into a new folder, to try a kind of data offline."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from examples.papers.samples import images, sentences
from jpipe import InputError
from jpipe.errors import nearest
from jpipe.files import new_folder, unused
from jpipe_train.console.exit_codes import failed
from jpipe_train.console.terminal import printable

Maker = Callable[[Path, int], str]
"""Writes a data set into an empty folder, depending only on the seed, from 0 to 2**32 - 1, and returns a description."""

SAMPLES: Mapping[str, Maker] = MappingProxyType(
    {
        "images": images.make,
        "translation": sentences.make_translation,
        "words": sentences.make_words,
        "captions": sentences.make_captions,
    }
)
"""By name. Each is read by the same loader as real data."""

FOLDER = "samples"
"""Where a data set is written unless another place is named: a folder of its name in this one."""


def make(name: str, out: str | None, seed: int, say: Callable[[str], None]) -> None:
    """Write a data set into a new folder, which appears whole or not at all.

    Args:
        name: one of `SAMPLES`.
        out: the folder; None: `samples/NAME`.
        seed: of what is drawn.
        say: gets a line that says what was written.

    Raises:
        InputError: there is no such data set, the seed is out of range, or the folder exists or cannot be written.
    """
    if name not in SAMPLES:
        raise InputError(f"samples: unknown data set '{name}'; {nearest(name, SAMPLES)}")
    if not 0 <= seed < 2**32:
        raise InputError(f"--seed: expected a number from 0 to {2**32 - 1}, found {seed}; choose one between")
    out = f"{FOLDER}/{name}" if out is None else out
    with new_folder(unused(out, "--out"), "--out") as place:
        description = SAMPLES[name](place, seed)
    say(f"{out}: {description}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the data set that the command line names.

    Args:
        arguments: of the command line, by default those of this process.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m examples.papers.samples", description="Write a small generated data set.")
    parser.add_argument("name", metavar="NAME", help=", ".join(SAMPLES))
    parser.add_argument("--out", metavar="FOLDER", help=f"a new folder (default: {FOLDER}/NAME)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of what is drawn (default: 0)")
    options = parser.parse_args(arguments)
    try:
        make(options.name, options.out, options.seed, lambda line: print(printable(line)))
    except InputError as error:
        return failed(error)
    return 0
