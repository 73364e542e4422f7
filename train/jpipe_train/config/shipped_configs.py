"""`jpipe configs`: the configs and examples that come with jpipe, listed, and copied to where the user is."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from jpipe import InputError
from jpipe.errors import nearest
from jpipe.files import write_atomically

_FOLDERS = "configs", "examples"
_PACKAGE = Path(__file__).parents[1]
_PAPERS = "examples.papers"


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
        names: of them, such as `configs/gpt-bytes.yaml`, or `gpt-bytes`; none: all. With a config come the Python files that it names.
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


def _parts(asked: str, there: dict[str, Path]) -> list[str]:
    """The files that one name of the user's means."""
    configs = [name for name in there if name.endswith(".yaml")]
    found = [name for name in configs if asked in (name, Path(name).name, Path(name).stem)]
    if not found:
        raise InputError(f"configs copy: unknown config '{asked}'; {nearest(asked, [Path(name).stem for name in configs])}")
    return found + _code(there[found[0]].read_text(encoding="utf-8"), there)


def _code(config: str, there: dict[str, Path]) -> list[str]:
    """Return the Python files that a config needs: the modules that it names, and those of a package that import each other."""
    modules = {name: name.removesuffix(".py").replace("/", ".") for name in there if name.endswith(".py")}
    code = [name for name, module in modules.items() if f"{module}:" in config or (module.startswith(_PAPERS) and _PAPERS in config)]
    return [*code, "examples/__init__.py"] if code else []


def _content(path: Path) -> bytes | None:
    """What a file holds; None where no regular file is."""
    return path.read_bytes() if path.is_file() else None
