"""`jpipe configs`: list or copy the shipped configs and examples."""

from typing import Annotated

import tyro

import jpipe
from jpipe_train.console.options import Flag
from jpipe_train.console.terminal import printable


def configs(
    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[copy [NAME …]]", help_behavior_hint="")] = (),
    to: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ".",
    overwrite: Flag = False,
) -> int:
    """List the configs and examples that come with jpipe, or copy them to the current folder.

    Args:
        words: Nothing: list them. copy: copy all of them. copy NAME: copy one config, such as gpt-bytes, and the Python files it names.
        to: The folder in which the folders configs and examples are created.
        overwrite: Replace existing files that differ.
    """
    from jpipe.files import expanded
    from jpipe_train.config import shipped_configs

    if not words and (to != "." or overwrite):
        raise jpipe.InputError("configs: --to and --overwrite have no effect without copy; did you mean jpipe configs copy?")
    if not words:
        shipped_configs.list_all(print)
    elif words[0] == "copy":
        shipped_configs.copy(words[1:], expanded(to, "configs copy --to"), overwrite, lambda line: print(printable(line)))
    else:
        raise jpipe.InputError(
            f"configs: expected no word or the word copy, found '{words[0]}'; did you mean jpipe configs copy {words[0]}?"
        )
    return 0
