"""The tutorial "Write a capability", followed to the letter in a copy of jpipe: its snippets print what it shows."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jpipe.capabilities.registry import OPTIONS
from tests.packages import ROOT
from tests.test_documentation import SNIPPET

PAGE = ROOT / "docs" / "tutorials" / "write-a-capability.md"
TEXT = PAGE.read_text("utf-8")
FILE = re.compile(r"^`(?P<file>\S+)`:\n\n```py\n(?P<content>.*?)^```", re.MULTILINE | re.DOTALL)
REGISTRY = "jpipe/capabilities/registry.py"


def with_lines(source: str, changes: str) -> str:
    """Return a source with the lines of a diff, each behind the line above it there or before the one below it."""
    for part in changes.split("@@\n"):
        lines = part.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        assert source.count(before) == 1, f"not once in the file:\n{before}"
        source = source.replace(before, "".join(line[1:] for line in lines))
    return source


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a copy of the library with what the page adds."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "jpipe", folder / "jpipe", ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILE.finditer(TEXT):
        path = folder / file["file"]
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(file["content"], "utf-8")
    (changes,) = re.findall(r"^```diff\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    registry = folder / REGISTRY
    registry.write_text(with_lines(registry.read_text("utf-8"), changes), "utf-8")
    return folder


def run(folder: Path, program: str) -> str:
    """Return what a program prints with the library in a folder, and with JAX as a reader has it."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_NUMPY_DTYPE_PROMOTION": "standard", "JAX_NUMPY_RANK_PROMOTION": "allow"}
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_page_has_the_modules_of_a_capability():
    assert [Path(file["file"]).name for file in FILE.finditer(TEXT)] == ["option.py", "program.py", "runtime.py"]
    assert "activation_mean" not in {option.room for option in OPTIONS}


@pytest.mark.slow
def test_its_snippets_print_what_the_page_shows(copy):
    snippets = [*SNIPPET.finditer(TEXT)]
    printed = run(copy, "\n".join(f"{snippet[1]}\nprint(end='\\0')" for snippet in snippets))
    assert printed.split("\0")[:-1] == [snippet[2] or "" for snippet in snippets]


@pytest.mark.slow
def test_a_wrong_decay_is_refused(copy):
    program = 'import jpipe\ntry: jpipe.Plan.even("ab", 2, activation_mean=1.5)\nexcept jpipe.InputError as error: print(error)'
    assert run(copy, program).startswith("plan: activation_mean: expected a decay of at least 0 and below 1, found 1.5")


@pytest.mark.slow
def test_a_restored_run_begins_with_a_new_mean(copy):
    program = """
import jax, jax.numpy as jnp, optax
from jpipe import Layer, LayerStack, Pipeline, Plan

def init(key, x):
    return {"w": jax.random.normal(key, (2, 2))}, {}

stack = LayerStack(dict.fromkeys("ab", Layer(init, lambda params, state, x, key, train: (x @ params["w"], state))))
plan = Plan.even(stack.ids, 2, "pipedream_2bw", 4, replicas=2, activation_mean=0.5)

def loss(y, labels):
    return ((y - labels) ** 2).sum(), jnp.float32(y.size)

pipe, batch = Pipeline(stack, plan, loss, optax.sgd(0.1)), (jnp.ones((8, 2)), jnp.zeros((8, 2)))
state, snapshot = pipe.init(jax.random.key(0), batch), pipe.snapshot(2)
for _ in range(4):
    state, _ = pipe.step(state, batch, observe=snapshot)
restored = pipe.restore(jax.random.key(0), batch, snapshot.layers(), 2)
print(*(float(worker.capabilities["activation_mean"]) > 0 for each in (state, restored) for worker in each.workers))
"""
    assert run(copy, program).split() == ["False", "False", "True", "True", *["False"] * 4]
