"""Names that a package, a benchmark, an example or a page imports from another package are public there."""

import ast
import functools
import importlib
import importlib.util
import re
import types
from collections.abc import Iterator

import pytest

from tests.packages import PACKAGES as FOLDERS
from tests.packages import ROOT

LIBRARIES = ("jpipe", "jpipe_planner")  # every public name of theirs is listed in an `__all__`
PACKAGES = (*LIBRARIES, "jpipe_train", "jpipe_lm")  # an application: only names that begin with `_` are private
OF_PYTHON = ("_replace", "_asdict", "_fields", "_make", "_exit")  # of named tuples and `os`, public in spite of the underscore


def private_names(source: str, package: str = "") -> Iterator[str]:
    """Yield `line N: name` for each use of a private name of another package than `package`."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}  # by the local name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
                if _is_foreign(alias.name, package) and _is_private(alias.name):
                    yield f"line {node.lineno}: {alias.name}"
        elif isinstance(node, ast.ImportFrom) and _is_foreign(node.module or "", package):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if not _is_public(str(node.module), alias.name):
                    yield f"line {node.lineno}: {name}"
                elif _is_module(name):
                    modules[alias.asname or alias.name] = name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_allowed(node, modules, package):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def _is_foreign(module: str, package: str) -> bool:
    return module.split(".")[0] in PACKAGES and module.split(".")[0] != package


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


@functools.cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def _is_public(module: str, name: str) -> bool:
    """Return whether a module lists the name, or is a package in which the name is a module with a list of its own."""
    if _is_private(f"{module}.{name}"):
        return False
    if module.split(".")[0] not in LIBRARIES or name.endswith("__"):
        return True
    if name in getattr(importlib.import_module(module), "__all__", ()):
        return True
    return _is_module(f"{module}.{name}") and hasattr(importlib.import_module(f"{module}.{name}"), "__all__")


def _is_allowed(node: ast.Attribute, modules: dict[str, str], package: str) -> bool:
    """Return whether an attribute of a module is public, or one of another object is not private to a class."""
    path = _path(node.value, modules)
    if path is not None and _is_foreign(path, package) and isinstance(_resolve(path), types.ModuleType):
        return _is_public(path, node.attr)
    is_of_class = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    return is_of_class or package == "jpipe" or not _is_private(node.attr) or node.attr in OF_PYTHON


def _path(node: ast.expr, modules: dict[str, str]) -> str | None:
    """Return the dotted name that an expression stands for, if it begins with an imported module."""
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if isinstance(node, ast.Attribute) and (path := _path(node.value, modules)) is not None:
        return f"{path}.{node.attr}"
    return None


def _resolve(path: str) -> object:
    first, *attributes = path.split(".")
    value: object = importlib.import_module(first)
    for name in attributes:
        value = getattr(value, name, None)
    return value


SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("package", [*FOLDERS, "benchmarks", "docs", "examples"])
def test_no_private_name_is_used_by_another_package(package):
    for path in sorted(FOLDERS.get(package, ROOT / package).rglob("*.py")):
        assert list(private_names(path.read_text(), package)) == [], path.relative_to(ROOT)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name)
def test_no_page_shows_a_private_name(page):
    assert list(private_names("\n".join(SNIPPET.findall(page.read_text())))) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from jpipe.programs._costs import Link", "jpipe.programs._costs.Link"),
        ("import jpipe.runtime._state", "jpipe.runtime._state"),
        ("from jpipe import pipeline", "jpipe.pipeline"),
        ("from jpipe.files import to_disk", "jpipe.files.to_disk"),
        ("from jpipe import files\nfiles.to_disk(path)", "files.to_disk"),
        ("import jpipe\njpipe.errors.cause(error)", "jpipe.errors.cause"),
        ("from jpipe_planner.search.equal import EXTRA", "jpipe_planner.search.equal.EXTRA"),
        ("from jpipe_train.report.report import _chart", "jpipe_train.report.report._chart"),
        ("pipe._executor.close()", "pipe._executor"),
        ("from jpipe import Link, files\nfiles.shown(path)\nfrom jpipe.processes import handshake\nrow._replace(x=self._x)", None),
    ],
)
def test_a_private_name_is_found(source, expected):
    assert [line.split(": ")[1] for line in private_names(source, "jpipe_train" if "report" not in source else "docs")] == [
        expected
    ] * bool(expected)
