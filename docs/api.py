"""Provide the pages of the API reference: one for each public module, which Sphinx fills from the docstrings."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

import jpipe
import jpipe_planner

MODULES = (
    "jpipe",
    "jpipe.plan",
    "jpipe.ops",
    "jpipe.schedules",
    "jpipe.model",
    "jpipe.optimizers",
    "jpipe.programs",
    "jpipe.meshes",
    "jpipe.stages",
    "jpipe.processes",
    "jpipe.runtime",
    "jpipe.errors",
    "jpipe.context",
    "jpipe.checkpoints",
    "jpipe.files",
    "jpipe_planner",
    "jpipe_train",
)
"""The public modules, in the order of the reference."""


def public_names(module: str) -> list[str]:
    """Return the public names of a module, without its submodules, which have pages of their own."""
    exporter = importlib.import_module(module)
    return [name for name in exporter.__all__ if not inspect.ismodule(getattr(exporter, name))]


@cache
def qualified_names() -> Mapping[str, str]:
    """Return the public names with their modules, such as `{"Plan": "jpipe.Plan"}`; no name is public in two modules."""
    return {name: f"{module}.{name}" for module in MODULES for name in public_names(module)}


def write_pages(folder: Path) -> None:
    """Write a page for each module into `folder`, where it differs from the one that is there."""
    folder.mkdir(exist_ok=True)
    pages = {f"{module}.rst": page(module) for module in MODULES}
    for path in folder.glob("*.rst"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:  # else Sphinx would read it again
            path.write_text(text, encoding="utf-8")


def page(module: str) -> str:
    """Return the page of a module in reStructuredText: its docstring, a table of its names, and each name with its docstring."""
    names = public_names(module)
    blocks = [f"{module}\n{'=' * len(module)}", f".. automodule:: {module}\n   :no-members:", f".. currentmodule:: {module}"]
    blocks += [".. autosummary::\n   :nosignatures:\n\n" + "\n".join(f"   {name}" for name in names)]
    blocks += [_directive(name, getattr(importlib.import_module(module), name)) for name in names]
    return "\n\n".join(blocks) + "\n"


def _directive(name: str, value: object) -> str:
    if isinstance(value, type):
        return f".. autoclass:: {name}\n   :members:\n   :member-order: bysource"
    return f".. autofunction:: {name}" if inspect.isroutine(inspect.unwrap(value)) else f".. autodata:: {name}\n   :no-value:"


def modules() -> Iterator[ModuleType]:
    """Yield all modules of the two libraries, private ones too."""
    for package in (jpipe, jpipe_planner):
        yield package
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(module.name)
