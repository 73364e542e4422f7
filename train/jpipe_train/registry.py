"""Find what packages add to jpipe under a name: kinds of models, formats of data, losses, commands.

A package lists what it adds in its `pyproject.toml`, as Python entry points. jpipe's own packages use entry points, too:

    [project.entry-points."jpipe.models"]
    conv = "my_package.conv:Conv"

Then `model.kind: conv` in a config means the class `Conv` of the module `my_package.conv`. `GROUPS` lists what a package can add. A module
is imported only when a config or a command line names something in it.
"""

import functools
import tomllib
import traceback
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from jpipe import InputError
from jpipe.errors import nearest
from jpipe.files import expanded

GROUPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "models": "model.kind",  # a subclass of `jpipe_train.config.model_section.ModelSection`
        "formats": "data.format",  # a subclass of `jpipe_train.config.data_section.DataSection`
        "losses": "loss.name",  # a function (outputs, labels) -> (sum, weight), or a class of such functions, made with loss.arguments
        "sources": "warm_start.file",  # an object with the functions of `jpipe_train.checkpoint.sources.source.Format`
        "layouts": "--layout",  # a function that takes an `ExportRequest` of `jpipe_train.checkpoint`, and a function that prints a line
        "schemes": "a path, before the colon",  # an object with the functions of `jpipe_lm.hub`, for names such as `hf:owner/name`
        "commands": "jpipe",  # a function for tyro, or a `tyro.extras.SubcommandApp`
    }
)
"""For each group of entry points, without the prefix `jpipe.`: the config key, option or command that takes such a name."""


_CLONE, _OURS = Path(__file__).parents[2] / "pyproject.toml", "jpipe-train"


@functools.cache
def entries(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points that the installed packages add to a group; the keys are their names.

    Raise InputError if two packages add different entry points with the same name.
    """
    found: dict[str, EntryPoint] = {}
    installed = [entry for entry in entry_points(group=f"jpipe.{group}") if not _clone() or entry.dist is None or entry.dist.name != _OURS]
    for entry in [*installed, *(EntryPoint(name, value, "") for name, value in _clone().get(f"jpipe.{group}", {}).items())]:
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise InputError(
                f"{GROUPS[group]} {entry.name}: expected one package that adds it, found {described(other)} and {described(entry)}; "
                "uninstall one of them"
            )
    return MappingProxyType(dict(sorted(found.items())))


@functools.cache
def _clone() -> Mapping[str, Mapping[str, str]]:
    """Return jpipe's own entry points from the `pyproject.toml` of a clone, which may be newer than the installed metadata.

    Outside a clone the mapping is empty.
    """
    project = tomllib.loads(_CLONE.read_text(encoding="utf-8")).get("project", {}) if _CLONE.is_file() else {}
    found: Mapping[str, Mapping[str, str]] = project.get("entry-points", {}) if project.get("name") == _OURS else {}
    return found


def names(group: str) -> tuple[str, ...]:
    """Return the names of the entry points that the installed packages add to a group."""
    return tuple(entries(group))


def find(group: str, name: str) -> Any:
    """Import the object that a package adds to a group under the name `name`.

    Raise InputError if no package adds this name, or the object's module cannot be imported.
    """
    known = entries(group)
    if name not in known:
        hint = nearest(name, known) if known else "no installed package adds one; install jpipe-train again"
        raise InputError(f"unknown {GROUPS[group].rpartition('.')[2].removeprefix('--')} {name!r}; {hint}")
    try:
        return known[name].load()
    except Exception as error:
        line = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
        raise InputError(f"{described(known[name])} cannot be imported: {line}; correct the module, or uninstall the package") from None


def scheme_of(path: str) -> Any:
    """Return what a package adds for names like this one, such as `hf:owner/name`; None if the text is a path."""
    scheme, colon, _ = path.partition(":")
    return find("schemes", scheme) if colon and scheme in entries("schemes") else None


def located(path: str, where: str) -> Path:
    """Return the path on this machine of what a name means, after downloading it if need be. In a path, the home folder replaces `~`.

    Args:
        path: a path or a name.
        where: the config key or option that gives it, for messages.

    Raises:
        InputError: as in `jpipe.files.expanded`; or what the name means is not on this machine and cannot be downloaded.
    """
    scheme = scheme_of(path)
    return expanded(path if scheme is None else scheme.fetch(path, where), where)


def packages() -> tuple[str, ...]:
    """Return the import names of the packages that add an entry point to any group, in alphabetical order."""
    return tuple(sorted({entry.module.partition(".")[0] for group in GROUPS for entry in entries(group).values()}))


def described(entry: EntryPoint) -> str:
    """Return the object and the package of an entry point, as messages name them."""
    return f"{entry.value} of the package {_OURS if entry.dist is None else entry.dist.name}"
