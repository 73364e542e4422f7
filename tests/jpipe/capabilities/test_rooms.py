"""Each capability is known in few files outside its folder, and the library runs without it."""

import ast
import functools
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jpipe.capabilities.registry import OPTIONS, programs, runtimes
from tests.packages import ROOT

NAMES = {
    "agreement": r"agree(d|s|ment|ments)?|agree(d|ment)_\w+|\w+_agreed|Agree(d|ment)?|OuterOptimizer|SumChanges|sum_changes",
    "compressed_messages": r"links|Links|BLOCK|[Bb]ottleneck\w*|\w*compress(ed|ion)?\w*|(specs|bytes)_of_(sent|given)|with_feedback",
    "global_norm": r"\w*global_norm|GlobalNorm|Norm(s|Costs)|norms_of|clip_stage_norm|skip_nonfinite|SumSquares|(sum_)?squares|stage_norms",
    "host_memory": r"offload\w*|Offload|Fetch|HostMemory|Kept|MoveWatcher",
    "shared_optimizer": r"shard_optimizer|deal|lower_weights|Share",
    "shared_parameters": r"(Take|Add)Shared|(take|add|update|un)_?shared|shared_(with|gradients|parameters)|[Ss]haring|SharedCosts",
    "slices": r"Slices|ComputeSlice|lengths_of|positions_of|functions_of_slices|row_length",
    "sums_in_parts": r"sum_parts?|compute_part|part_(times|accumulators)|\w+(_of|_by)_part|ComputePart|SumParts?|PartCosts|\w+InParts",
}
"""The names of each capability, as in its own files. A new capability needs a line here."""

MOST = 3  # files that may use them outside its folder
COMPILED = shutil.ignore_patterns("__pycache__")


def names(source: str) -> Iterator[str]:
    """Yield the names that code uses; comments, docstrings and other texts are left out."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name.split(".")[-1]


@functools.cache
def names_in(file: Path) -> frozenset[str]:
    """Return the names in the code of a file, which is parsed once for all capabilities."""
    return frozenset(names(file.read_text("utf-8")))


def outside(room: str, package: Path) -> list[str]:
    """Return the files of a package outside the folder of a capability that use its names."""
    pattern = re.compile(rf"_?({NAMES[room]})")
    files = sorted(path for path in package.rglob("*.py") if package / "capabilities" / room not in path.parents)
    return [str(path.relative_to(package)) for path in files if any(map(pattern.fullmatch, names_in(path)))]


def test_every_capability_has_its_names():
    assert NAMES.keys() == {option.room for option in OPTIONS} == programs().keys() == runtimes().keys()


@pytest.mark.parametrize("room", NAMES)
def test_a_capability_is_known_in_few_files(room):
    found = outside(room, ROOT / "jpipe")
    assert len(found) <= MOST, found
    used = {name for path in (ROOT / "jpipe" / "capabilities" / room).rglob("*.py") for name in names_in(path)}
    assert any(re.fullmatch(NAMES[room], name) for name in used)


def test_names_outside_their_folder_are_found(tmp_path):
    (tmp_path / "capabilities" / "host_memory").mkdir(parents=True)
    for name, source in {
        "capabilities/host_memory/option.py": "offload = 1",
        "a.py": "def f(plan):\n    return plan.offload",
        "b.py": "from x import Offload as _Offload",
        "c.py": "f(offload=None)",
        "d.py": '"""About offload."""  # offload',
        "e.py": "g = lambda offloaded: 0",
    }.items():
        (tmp_path / name).write_text(source, "utf-8")
    assert outside("host_memory", tmp_path) == ["a.py", "b.py", "c.py", "e.py"]


@pytest.mark.parametrize("room", NAMES)
def test_the_instructions_of_a_capability_run(room):
    assert runtimes()[room].handlers.keys() == set(programs()[room].instructions)


@pytest.mark.parametrize("room", NAMES)
def test_what_the_core_calls_is_described(room):
    used = [hooks for hooks in (programs()[room].lower, programs()[room].verify, runtimes()[room].snapshot) if hooks is not None]
    for hooks in used:
        described = set(re.findall(r"^    (\w+): ", inspect.getdoc(hooks.__base__), re.MULTILINE))
        assert {name for name in vars(hooks) if not name.startswith("_")} <= described


def without(room: str, folder: Path) -> None:
    """Copy the library into a folder, and remove a capability: its folder, and its lines of the registry."""
    shutil.copytree(ROOT / "jpipe", folder / "jpipe", ignore=COMPILED)
    shutil.rmtree(folder / "jpipe" / "capabilities" / room)
    registry, mine = folder / "jpipe" / "capabilities" / "registry.py", re.compile(rf"\b({NAMES[room]}|{room}|{room.upper()})\b")
    lines = registry.read_text("utf-8").splitlines(keepends=True)
    registry.write_text("".join(line for line in lines if not mine.search(line)), "utf-8")


PROGRAMS = """
import sys
from jpipe import Plan, lower, simulate
for name in ("gpipe", "pipedream", "pipedream_2bw", "interleaved_1f1b", "zb_v"):
    plan = Plan.even("abcd", 4, name, 8, replicas=2)
    print(plan.to_json(), simulate(lower(plan, 2)).grid(transfers=True))
assert "jax" not in sys.modules
print(sorted(set(sys.modules["jpipe.plan"].__all__)))
"""

TRAINING = """
import jax, jax.numpy as jnp, optax
from jpipe import Layer, LayerStack, Pipeline, Plan

def init(key, x):
    return {"w": jax.random.normal(key, (2, 2))}, {}

layer = Layer(init, lambda params, state, x, key, train: (jnp.tanh(x @ params["w"]), state))
stack = LayerStack(dict.fromkeys("abc", layer))
plan = Plan.even(stack.ids, 3, "pipedream_2bw", 6, replicas=2)

def loss(y, labels):
    return ((y - labels) ** 2).sum(), jnp.float32(y.size)

def pipeline():
    return Pipeline(stack, plan, loss, optax.adam(0.1), devices=jax.devices()[:1] * 6)

pipe, batch = pipeline(), (jnp.ones((12, 2)), jnp.zeros((12, 2)))
state, snapshot = pipe.init(jax.random.key(0), batch), pipe.snapshot(2)
for _ in range(4):
    state, metrics = pipe.step(state, batch, observe=snapshot)
    print(pipe.evaluate(state, batch).loss)
    print(metrics.losses)
restored = pipeline().restore(jax.random.key(0), batch, snapshot.layers(), 2)
print(jax.tree.map(str, pipe.params(pipe.drain(state))))
"""


@functools.cache
def output(program: str, folder: Path) -> str:
    """Return what a program prints that imports the library in a folder."""
    environment = {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.parametrize("room", NAMES)
def test_programs_are_the_same_without_a_capability(room, tmp_path):
    without(room, tmp_path)
    field = next(option.field for option in OPTIONS if option.room == room)
    expected = [line.rstrip(",") for line in output(PROGRAMS, ROOT).splitlines()[:-1] if f'"{field}"' not in line]
    *found, exported = output(PROGRAMS, tmp_path).splitlines()
    assert [line.rstrip(",") for line in found] == expected
    assert not re.search(rf"'({NAMES[room]})'", exported)


@pytest.mark.slow
@pytest.mark.parametrize("room", NAMES)
def test_a_pipeline_trains_without_a_capability(room, tmp_path):
    without(room, tmp_path)
    assert output(TRAINING, tmp_path) == output(TRAINING, ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("room", ["agreement", "host_memory"])
def test_other_tests_pass_without_a_capability(room, tmp_path):
    """Run the tests of the library in a copy without the capability, except the files that speak of it."""
    without(room, tmp_path)
    for name in ("planner", "train", "tests", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=COMPILED)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.rmtree(tmp_path / "tests" / "jpipe" / "capabilities" / room)
    mine = re.compile(rf"\b({NAMES[room]}|{room}|{room.replace('_', ' ')})\b")
    folders = [tmp_path / "tests" / "jpipe" / name for name in ("capabilities", "checkpoints", "programs", "schedules", "weights")]
    files = [file for folder in folders for file in sorted(folder.rglob("test_*.py")) if not mine.search(file.read_text("utf-8"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(tmp_path / name) for name in (".", "planner", "train"))}
    chosen = ["-m", "not slow and not targets", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *chosen, *map(str, files)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 500
