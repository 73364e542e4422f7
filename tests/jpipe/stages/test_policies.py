"""Rules about the source itself."""

import ast
from pathlib import Path

import jpipe

ROOT = Path(jpipe.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The names of all modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            names.add(node.module)
    return names


def test_the_library_imports_neither_the_application_nor_the_planner():
    for path in FILES:
        assert not {name.split(".")[0] for name in imported(path)} & {"train", "planner"}, path.name


def test_only_the_registry_and_the_plan_see_schedules_and_they_see_no_arrays():
    for path in (ROOT / "schedules").glob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & {"jax", "numpy", "flax", "optax"}, path.name


def test_the_interpreter_knows_no_schedule_by_name():
    for name in ("_runtime.py", "_compile.py", "_stage.py", "_residuals.py", "_transport.py", "_state.py", "_program.py"):
        assert "jpipe.schedules" not in imported(ROOT / name)
        strings = {
            node.value
            for node in ast.walk(ast.parse((ROOT / name).read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not strings & set(jpipe.schedules.SCHEDULES), name
    text = (ROOT / "_runtime.py").read_text().lower()
    for schedule in ("gpipe", "pipedream", "2bw", "naive", "vertical_sync"):
        assert schedule not in text


def test_the_public_names_are_the_listed_ones():
    defined = {name for name in vars(jpipe) if not name.startswith("_")}
    others = {"schedules", "checkpoints", "files", "handshake"}  # folders and public modules
    others |= {"jaxtyping"}  # what the run-time type checks of the tests bring in
    assert defined - others == set(jpipe.__all__)
    assert len(set(jpipe.__all__)) == len(jpipe.__all__)


def test_modules_are_private_except_the_named_ones():
    assert {path.name for path in ROOT.glob("*.py") if not path.name.startswith("_")} == {"files.py", "handshake.py"}


def test_no_code_runs_from_data():
    for path in FILES:
        tree = ast.parse(path.read_text())
        called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert not called & {"eval", "exec", "__import__"}, path.name
        assert not imported(path) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, path.name
