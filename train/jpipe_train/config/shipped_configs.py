"""`jpipe configs`: the configs and examples that come with jpipe, listed, and copied to where the user is."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from jpipe import InputError
from jpipe.errors import nearest
from jpipe.files import write_atomically

_FOLDERS = "configs", "examples"
_PACKAGE = Path(__file__).parents[1]


def list_all(say: Callable[[str], None]) -> None:
    """Say the name of each config and its first line."""
    names = shipped()
    width = max(map(len, names))
    for name, file in names.items():
        if name.endswith(".yaml"):
            first = file.read_text(encoding="utf-8").partition("\n")[0]
            say(f"{name:{width}}  {first.removeprefix('#').strip().removeprefix('What:').strip()}")
    say("jpipe configs copy copies all of them into the current folder, jpipe configs copy NAME one of them.")


def copy(names: Sequence[str], folder: Path, overwrite: bool, say: Callable[[str], None]) -> None:
    """Copy files to `folder`/configs and `folder`/examples.

    Args:
        names: of them, such as `configs/gpt-bytes.yaml`, or `gpt-bytes`; none: all. With an example comes its Python file.
        folder: where to.
        overwrite: replace files that differ; says which.
        say: gets a line for each thing done.

    Raises:
        InputError: there is no such config; an existing file differs; the folder cannot be written.
    """
    there = shipped()
    wanted = list(dict.fromkeys(name for asked in names for name in _parts(asked, there))) if names else list(there)
    try:
        new = {name: there[name].read_bytes() for name in wanted if _content(folder / name) != there[name].read_bytes()}
        old = [name for name in new if os.path.lexists(folder / name)]
        if old and not overwrite:
            raise InputError(
                f"configs copy: '{folder / old[0]}' is there and differs"
                + (f", and {len(old) - 1} more" if len(old) > 1 else "")
                + "; nothing was copied; copy to another folder with --to, or add --overwrite"
            )
        for name, content in new.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, content)
            say(f"{'overwritten' if name in old else 'copied'}: {folder / name}")
    except OSError as error:
        where = error.filename or folder
        raise InputError(f"configs copy: cannot write '{where}': {error.strerror}; choose another folder with --to") from None
    if len(new) < len(wanted):
        say(f"there already: {len(wanted) - len(new)} of {len(wanted)} files")


def shipped() -> dict[str, Path]:
    """The files that come with jpipe, by name: those in the wheel, or those of the clone that this module is in."""
    root = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parents[1]
    files = (file for folder in _FOLDERS for file in sorted((root / folder).rglob("*")) if file.suffix in (".yaml", ".py", ".md"))
    return {file.relative_to(root).as_posix(): file for file in files}


def _parts(asked: str, there: Sequence[str] | dict[str, Path]) -> list[str]:
    """The files that one name of the user's means."""
    configs = [name for name in there if name.endswith(".yaml")]
    found = [name for name in configs if asked in (name, Path(name).name, Path(name).stem)]
    if not found:
        raise InputError(f"configs copy: unknown config '{asked}'; {nearest(asked, [Path(name).stem for name in configs])}")
    code = [f"{found[0].removesuffix('.yaml')}.py", "examples/__init__.py"] if found[0].startswith("examples/") else []
    return found + code


def _content(path: Path) -> bytes | None:
    """What a file holds; None where no regular file is."""
    return path.read_bytes() if path.is_file() else None
