"""List the configs and examples that come with jpipe, and copy them to the user's folder."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from jpipe import InputError
from jpipe.errors import nearest
from jpipe.files import write_atomically

_FOLDERS = "configs", "examples"
_DATA = ".json", ".jsonl", ".jinja"
_SUFFIXES = ".yaml", ".py", ".md", ".sh", ".ipynb", *_DATA
_NAMES = ("Dockerfile",)
_PACKAGE = Path(__file__).parents[1]
_PAPERS = "examples.papers"
_FEW = 8  # up to this many files are listed one by one


def list_all(say: Callable[[str], None]) -> None:
    """Print the name and the first line of each config."""
    names = shipped()
    width = max(map(len, names))
    for name, file in names.items():
        if name.endswith(".yaml"):
            first = file.read_text(encoding="utf-8").partition("\n")[0]
            say(f"{name:{width}}  {first.removeprefix('#').strip().removeprefix('What:').strip()}")
    say("jpipe configs copy copies all of them into the current folder; jpipe configs copy NAME copies one.")


def copy(names: Sequence[str], folder: Path, overwrite: bool, say: Callable[[str], None]) -> None:
    """Copy configs such as `configs/gpt-bytes.yaml` or `gpt-bytes`, with the files that they name, or all files without `names`.

    They go to `folder`/configs and `folder`/examples; with `overwrite`, existing files that differ are replaced. `say` prints one line for
    each file or, if there are many files, for each folder. Raise InputError if a config does not exist, an existing file differs, or the
    folder cannot be written.
    """
    available = shipped()
    wanted = list(dict.fromkeys(file for name in names for file in _files_for(name, available))) if names else list(available)
    try:
        changed = {name: available[name].read_bytes() for name in wanted if _content(folder / name) != available[name].read_bytes()}
        existing = [name for name in changed if os.path.lexists(folder / name)]
        if existing and not overwrite:
            raise InputError(
                f"configs copy: '{folder / existing[0]}' exists with other content"
                + (f", and {len(existing) - 1} more" if len(existing) > 1 else "")
                + "; nothing was copied; copy to another folder with --to, or add --overwrite"
            )
        for name, content in changed.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, content)
    except OSError as error:
        where = error.filename or folder
        raise InputError(f"configs copy: cannot write '{where}': {error.strerror}; choose another folder with --to") from None
    for done, files in (("copied", [name for name in changed if name not in existing]), ("overwritten", existing)):
        for line in _counted(folder, files):
            say(f"{done}: {line}")
    if len(changed) < len(wanted):
        say(f"already up to date: {len(wanted) - len(changed)} of {len(wanted)} files")


def _counted(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the paths of at most `_FEW` files; of more files, return the number in each folder."""
    if len(names) <= _FEW:
        return [str(folder / name) for name in names]
    counts = Counter(name.partition("/")[0] for name in names)
    return [f"{number} {'file' if number == 1 else 'files'} in {folder / top}" for top, number in counts.items()]


def shipped() -> dict[str, Path]:
    """Return the files that come with jpipe, from the wheel or from the clone that contains this module; the keys are relative paths."""
    root = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parents[1]
    files = (file for folder in _FOLDERS for file in sorted((root / folder).rglob("*")) if file.suffix in _SUFFIXES or file.name in _NAMES)
    return {file.relative_to(root).as_posix(): file for file in files}


def _files_for(name: str, available: dict[str, Path]) -> list[str]:
    """Return the config with the name that the user typed, and the files that this config names."""
    configs = [file for file in available if file.endswith(".yaml")]
    files = [file for file in configs if name in (file, Path(file).name, Path(file).stem)]
    if not files:
        raise InputError(f"configs copy: unknown config '{name}'; {nearest(name, [Path(file).stem for file in configs])}")
    config = available[files[0]].read_text(encoding="utf-8")
    data = [file for file, path in available.items() if path.suffix in _DATA and f" {Path(file).parent.as_posix()}/" in config]
    return files + data + _code(config, available)


def _code(config: str, available: dict[str, Path]) -> list[str]:
    """Return the Python files that a config needs: the modules that it names, and all of `examples.papers` if one of them is there."""
    modules = {file: file.removesuffix(".py").replace("/", ".") for file in available if file.endswith(".py")}
    code = [file for file, module in modules.items() if f"{module}:" in config or (module.startswith(_PAPERS) and _PAPERS in config)]
    return [*code, "examples/__init__.py"] if code else []


def _content(path: Path) -> bytes | None:
    """Return the content of a regular file, or None."""
    return path.read_bytes() if path.is_file() else None
