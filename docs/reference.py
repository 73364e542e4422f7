"""Build the API reference, a page of HTML for each public module, from the docstrings of its names: `python -m docs.reference FOLDER`."""

import importlib
import inspect
import pkgutil
import re
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import pdoc.doc
import pdoc.render
import pdoc.render_helpers

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
)


def public_names(module: str) -> list[str]:
    """Return the public names of a module, without its submodules, which have pages of their own."""
    exporter = importlib.import_module(module)
    return [name for name in exporter.__all__ if not inspect.ismodule(getattr(exporter, name))]


def build(folder: Path) -> Path:
    """Write the pages into `folder`, and return the path of the first one."""
    modules = {name: importlib.import_module(name) for name in MODULES}
    for name, module in modules.items():
        for member in public_names(name):  # pdoc looks into the module, where names that are imported on first use are not
            setattr(module, member, getattr(module, member))
    elsewhere = _documented_variables()
    pages = {name: _Page(module) for name, module in modules.items()}
    for page in pages.values():
        for variable in page.variables:  # pdoc looks for their docstrings only in the module that shows them
            variable.docstring = variable.docstring or elsewhere.get(variable.name, "")
        for described in page.classes:
            _leave_out_bare_fields(described)
    pdoc.render.configure(docformat="google", footer_text=f"jpipe {jpipe.__version__}")
    pdoc.render.env.filters["format_signature"] = _format_signature
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in pages.items():
        path = folder.joinpath(*name.split(".")).with_suffix(".html")
        path.parent.mkdir(exist_ok=True)
        path.write_text(pdoc.render.html_module(page, all_modules=pages), encoding="utf-8")
    return folder / "jpipe.html"


class _Page(pdoc.doc.Module):
    """A module as its page shows it: its public names, and no submodules."""

    @cached_property
    def own_members(self) -> Any:
        """The members of the public names."""
        return [self.members[name] for name in public_names(self.fullname)]

    @cached_property
    def submodules(self) -> Any:
        """The submodules that have pages of their own."""
        return [pdoc.doc.Module(importlib.import_module(name)) for name in MODULES if name.rpartition(".")[0] == self.fullname]


def _documented_variables() -> dict[str, str]:
    """Return the docstrings that stand below variables, in all modules of the two libraries."""
    packages = (jpipe, jpipe_planner)
    names = [module.name for package in packages for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    variables = [variable for name in names for variable in pdoc.doc.Module(importlib.import_module(name)).variables]
    return {variable.name: variable.docstring for variable in variables if variable.docstring}


def _leave_out_bare_fields(described: pdoc.doc.Class) -> None:
    """Drop fields without a docstring of their own, which the class describes under `Attributes`, and NamedTuple's own."""
    for name, member in list(described.members.items()):
        if member.docstring.startswith(("Alias for field number", "Create new instance of")):
            member.docstring = ""
        if isinstance(member, pdoc.doc.Variable):
            member.annotation_str = _readable(member.annotation_str)
            if not member.docstring:
                del described.members[name]


def _format_signature(signature: inspect.Signature, colon: bool) -> Any:
    """Format a signature as pdoc does, with readable types."""
    parameters = [p.replace(annotation=_Written(p.annotation)) for p in signature.parameters.values()]
    returned = _Written(signature.return_annotation)
    return pdoc.render_helpers.format_signature(signature.replace(parameters=parameters, return_annotation=returned), colon)


class _Written:
    """A type that prints as a person would write it."""

    def __new__(cls, annotation: Any) -> Any:
        return annotation if annotation is inspect.Signature.empty else super().__new__(cls)

    def __init__(self, annotation: Any) -> None:
        self._text = _readable(inspect.formatannotation(annotation))

    def __repr__(self) -> str:
        return self._text


def _readable(text: str) -> str:
    """Replace types by ones without their modules, and the union of all instructions by its name."""
    text = re.sub(r"\b(jax\.)?jaxlib\._jax\.", "jax.", text)
    text = re.sub(r"\b(typing|collections\.abc|jpipe|jpipe_planner|pydantic(_core)?)\.([a-z_]+\.)*(?=[A-Z])", "", text)
    return re.sub(r"Load \| .* \| Release", "Instruction", text)


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
