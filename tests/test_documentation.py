"""What the documents show is run: the README's snippets, its grid, and the examples in docstrings."""

import ast
import doctest
import importlib
import pathlib
import pkgutil
import re
import runpy

import jax
import pytest

import jpipe

ROOT = pathlib.Path(__file__).parents[1]
MODULES = sorted(module.name for module in pkgutil.walk_packages(jpipe.__path__, "jpipe."))


def blocks(language: str) -> list[str]:
    """The code blocks of the README in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.newest
def test_the_readmes_snippets_run_and_the_model_learns(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # JAX as a reader has it
        names = runpy.run_path(str(script))
    (loss,) = names["metrics"].losses.values()
    assert float(loss) < 0.1
    assert names["prediction"].grid() == blocks("text")[0].rstrip("\n")


def test_a_model_of_ones_own_takes_fifteen_lines():
    lines = ast.unparse(ast.parse(blocks("python")[0])).splitlines()
    assert len([line for line in lines if line and not line.startswith(("import", "from"))]) <= 15


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_files_that_the_readme_names_are_there():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^    (\S+[/.]\S*)  ", text, re.MULTILINE)) | set(re.findall(r"\]\(([^)#:]+)\)", text))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]
