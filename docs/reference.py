"""Build the API reference, one page of HTML, from the docstrings of the public names: `python -m docs.reference FOLDER`."""

import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import pdoc.doc
import pdoc.render
import pdoc.render_helpers

import jpipe


def build(folder: Path) -> Path:
    """Write the reference into `folder`, and return the page's path."""
    page = pdoc.doc.Module(jpipe)
    elsewhere = _documented_variables()
    for variable in page.variables:  # pdoc looks for their docstrings only in the module that shows them
        variable.docstring = variable.docstring or elsewhere.get(variable.name, "")
    for described in page.classes:
        _leave_out_bare_fields(described)
    pdoc.render.configure(docformat="google", footer_text=f"jpipe {jpipe.__version__}")
    pdoc.render.env.filters["format_signature"] = _format_signature
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "jpipe.html"
    path.write_text(pdoc.render.html_module(page, all_modules={"jpipe": page}), encoding="utf-8")
    return path


def _documented_variables() -> dict[str, str]:
    """The docstrings that stand below variables, in all modules of jpipe."""
    names = [module.name for module in pkgutil.walk_packages(jpipe.__path__, "jpipe.")]
    variables = [variable for name in names for variable in pdoc.doc.Module(importlib.import_module(name)).variables]
    return {variable.name: variable.docstring for variable in variables if variable.docstring}


def _leave_out_bare_fields(described: pdoc.doc.Class) -> None:
    """Drop fields without a docstring of their own, which the class tells of under `Attributes`, and what NamedTuple says of itself."""
    for name, member in list(described.members.items()):
        if member.docstring.startswith(("Alias for field number", "Create new instance of")):
            member.docstring = ""
        if isinstance(member, pdoc.doc.Variable):
            member.annotation_str = _readable(member.annotation_str)
            if not member.docstring:
                del described.members[name]


def _format_signature(signature: inspect.Signature, colon: bool) -> Any:
    """As pdoc writes it, with readable types."""
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
    """Types without the modules they are kept in, and the union of all instructions by its name."""
    text = re.sub(r"\b(jax\.)?jaxlib\._jax\.", "jax.", text)
    text = re.sub(r"\b(typing|collections\.abc|jpipe|pydantic(_core)?)\.([a-z_]+\.)*(?=[A-Z])", "", text)
    return re.sub(r"Load \| .* \| Evaluate", "Instruction", text)


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
