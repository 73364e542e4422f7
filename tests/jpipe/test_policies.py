"""Rules about the source itself."""

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest
from beartype import beartype
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation

import jpipe
from docs import api
from jpipe_planner import Profile
from tests.conftest import unknown_word
from tests.packages import PACKAGES, module_name

ROOT = Path(jpipe.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, parsed once for all tests."""
    return ast.parse(path.read_text())


def statements(path: Path) -> Iterator[ast.AST]:
    """Return all statements of a file, those inside of others, too: a fifth of the nodes that `ast.walk` has."""
    left: list[ast.AST] = [parsed(path)]
    while left:
        yield (node := left.pop())
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, None)
            left += inner if isinstance(inner, list) else ()


def imported(path: Path) -> set[str]:
    """Return the names of all modules that a file imports, anywhere in it."""
    names = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            names.add(node.module)
    return names


def test_the_interpreter_knows_no_schedule_by_name():
    interprets = (
        "runtime/_interpreter",
        "runtime/_worker",
        "runtime/_transport",
        "runtime/state/_state",
        "runtime/state/_weights",
        "stages/_calls",
        "stages/_compile",
        "stages/_compiled_stage",
        *(f"stages/functions/{path.stem}" for path in (ROOT / "stages" / "functions").glob("*.py")),
    )
    for name in (*interprets, "programs/_instructions"):
        path = ROOT / f"{name}.py"
        assert "jpipe.schedules" not in imported(path)
        strings = {node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert not strings & set(jpipe.schedules.SCHEDULES), name
    text = (ROOT / "runtime" / "_interpreter.py").read_text().lower()
    for schedule in ("gpipe", "pipedream", "2bw", "naive", "vertical_sync"):
        assert schedule not in text


def test_the_public_names_of_each_submodule_are_defined_in_it():
    for name in api.MODULES[1:]:
        module = importlib.import_module(name)
        assert len(set(module.__all__)) == len(module.__all__)
        for exported in module.__all__:
            where = getattr(getattr(module, exported), "__module__", name)
            inside = where == name or where.startswith(f"{name}.") or (name == "jpipe.plan" and where.startswith("jpipe.capabilities."))
            assert inside or not where.startswith("jpipe"), f"{name}.{exported} is of {where}"


def test_modules_of_rooms_are_private_except_the_named_ones():
    public = {str(path.relative_to(ROOT)) for path in FILES if not path.name.startswith("_") and "capabilities" not in path.parts}
    files = [f"schedules/{name}.py" for name in jpipe.schedules.SCHEDULES]
    schedules = {file if (ROOT / file).exists() else file.replace("schedules/", "schedules/zero_bubble/") for file in files}
    checkpoints = {f"checkpoints/{name}.py" for name in ("checkpoint", "folders", "orbax_item", "records", "writing")}
    assert (
        public
        == {
            "ops.py",
            "pipeline.py",
            "errors.py",
            "files.py",
            "context.py",
            "processes/handshake.py",
            "processes/jax_internals.py",
        }
        | schedules
        | checkpoints
    )


def test_a_folder_has_at_most_twelve_modules():
    for package in PACKAGES.values():
        for folder in {path.parent for path in package.rglob("*.py")}:
            modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
            assert len(modules) <= 12, f"{folder.relative_to(ROOT.parent)} has {len(modules)}"


def test_plans_are_lowered_and_simulated_without_jax():
    program = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax"):
            raise ImportError(f"no {name} here")
sys.meta_path.insert(0, Without())
from jpipe import Plan, draw_timeline, lower, simulate
print(simulate(lower(Plan.even("abcd", 2, "pipedream_2bw", 4), batches=2)).versions_alive)
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.stderr) == ("(2, 2)\n", "")


def test_jaxs_private_modules_are_imported_in_one_place():
    importing = {
        path.relative_to(ROOT.parent).as_posix()
        for package in PACKAGES.values()
        for path in package.rglob("*.py")
        if any(name.startswith(("jax._", "jaxlib")) for name in imported(path))
    }
    assert importing == {"jpipe/processes/jax_internals.py"}


def test_no_code_runs_from_data():
    for path in FILES:
        tree = parsed(path)
        called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert not called & {"eval", "exec", "__import__"}, path.name
        assert not imported(path) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, path.name


def test_no_function_is_longer_than_90_lines():
    """Documentation counts. It is an alarm: a function that is read from top to bottom may be longer than a part of it with a name."""
    for package in ("jpipe", "planner", "train", "benchmarks", "docs", "examples", "tests"):
        for path in (ROOT.parent / package).rglob("*.py"):
            for node in statements(path):
                if isinstance(node, ast.FunctionDef):
                    length = node.end_lineno - node.lineno + 1
                    assert length <= 90, f"{path}: {node.name} has {length} lines"


_EDITS = frozenset({"replace", "removeprefix", "removesuffix", "partition", "rpartition", "sub", "lstrip", "args"})


_INPUT_ERRORS = ("InputError", "Damaged", "NotRestorable", "TargetUnavailable")


def edits_of_input_errors(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that edit the text of an `InputError` that was caught, or that `explain` has made."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "args" and "explain" in ast.dump(node.value):
            yield node.lineno
        if not isinstance(node, ast.ExceptHandler) or node.type is None or not any(name in ast.dump(node.type) for name in _INPUT_ERRORS):
            continue
        for inner in ast.walk(node):
            is_edit = isinstance(inner, ast.Attribute) and inner.attr in _EDITS
            whole = next((call for call in ast.walk(node) if isinstance(call, ast.Call) and call.func is inner), inner)
            if is_edit and any(isinstance(name, ast.Name) and name.id == node.name for name in ast.walk(whole)):
                yield inner.lineno


def test_nobody_edits_the_text_of_an_input_error():
    """A layer that knows a better name of the place, or what to change, sets that field."""
    found = {
        f"{module_name(path)}:{line}"
        for folder in PACKAGES.values()
        for path in folder.rglob("*.py")
        if "InputError" in path.read_text()
        for line in edits_of_input_errors(parsed(path))
    }
    assert found == set()


def test_an_edit_of_an_error_is_found():
    source = "try:\n    f()\nexcept jpipe.InputError as error:\n    raise InputError({}) from None\n"
    for edit in ("str(error).removeprefix('a')", "re.sub('a', 'b', str(error))", "*error.args", "*explain(error).args"):
        assert set(edits_of_input_errors(ast.parse(source.format(edit)))) == {4}
    assert not list(edits_of_input_errors(ast.parse(source.format("f'{error}: {name.removeprefix(1)}'"))))


def test_a_changed_copy_recomputes_cached_properties():
    """Pydantic's `model_copy` copies cached properties; models that have some must drop them."""
    files = [path for folder in PACKAGES.values() for path in folder.rglob("*.py") if "cached_property" in path.read_text()]
    modules = [importlib.import_module(module_name(path)) for path in files]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    caching = {
        kind
        for kind in classes
        if issubclass(kind, pydantic.BaseModel) and any(isinstance(v, functools.cached_property) for v in vars(kind).values())
    }
    assert caching == {jpipe.Plan, Profile}
    plan = jpipe.Plan.even("abcd", 2, "gpipe", 2)
    assert (plan.replicas, len(plan.workers), plan.rank_of, plan.pipeline_ranks) == ((1, 1), 2, (0, 1), ((0,), (1,)))
    changed = plan.model_copy(update={"stages": (plan.stages[0].model_copy(update={"replicas": 2}), plan.stages[1])})
    assert vars(changed).keys() == jpipe.Plan.model_fields.keys()
    assert (changed.replicas, len(changed.workers), changed.rank_of) == ((2, 1), 3, (0, 1, 2))
    assert plan.replicas == (1, 1)
    layer = {"id": "a", "weights": 4, "optimizer": 4, "at": [{"forward": 1.0, "backward": 2.0, "outputs": 4, "residuals": {"none": 4}}]}
    profile = Profile(source="analytic", sizes=[1], inputs=[4], labels=[4], layers=[layer])
    assert (profile.ids, profile.costs(1).keys(), profile.shared_costs) == (("a",), {"a"}, ())
    changed = profile.model_copy(update={"layers": (profile.layers[0].model_copy(update={"id": "b"}),)})
    assert vars(changed).keys() == Profile.model_fields.keys()
    assert (changed.ids, profile.ids) == (("b",), ("a",))


def test_a_word_of_pytests_k_that_no_test_can_have_is_told_at_once():
    nowhere = "".join(("zq", "xj", "vw"))
    assert unknown_word(f"gpipe and {nowhere}") == nowhere
    for keywords in ("gpipe and ZB_V", f"gpipe or {nowhere}", f"not {nowhere}", "test_policies.py", "a-1"):
        assert unknown_word(keywords) is None


def test_a_function_inside_of_another_one_checks_its_types_each_time():
    def outer(kind):
        @beartype
        def inner(value: kind) -> int:
            return value

        return inner

    for kind, right, wrong in ((int, 1, "a"), (int, 2, "a"), (str | int, 3, 1.5)):
        inner = outer(kind)
        assert inner(right) == right
        with pytest.raises(BeartypeCallHintParamViolation, match=f"value={wrong!r}"):
            inner(wrong)
    with pytest.raises(BeartypeCallHintReturnViolation):
        outer(str | int)("a")
