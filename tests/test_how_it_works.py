"""What the pages about the code name exists: files, functions, tests, schedules, fields of a plan."""

import ast
import re
from pathlib import Path

import pytest

import jpipe
from benchmarks.papers.document import read
from docs import microbatch
from tests.conftest import NEVER_RUN

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "explanation"


def text_of(page: str) -> str:
    return (PAGES / f"{page}.md").read_text(encoding="utf-8")


def definitions(path: Path) -> set[str]:
    """Return the names of the functions and classes of a file, and of methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names |= {node.name} | {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def test_the_steps_of_a_microbatch_are_in_ten_files():
    """Those of each step; five prepare the run. `tests/jpipe/runtime/test_path.py` compares them with the files that run."""
    (table,) = [table for table in read(text_of("how-it-works")) if table.name == microbatch.NAME]
    files = [row[2].strip("`") for row in table.rows]
    assert len({file for file, row in zip(files, table.rows, strict=True) if row[1] == "each step"}) == 10
    assert len(set(files)) == 15
    for file, row in zip(files, table.rows, strict=True):
        assert row[3].strip("`") in definitions(ROOT / file), row


def test_the_methods_and_files_that_the_page_names_exist():
    text = text_of("how-it-works")
    files = set(re.findall(r"`(jpipe/[\w/]+\.py)`", text))
    assert len(files) > 10
    known = set().union(*(definitions(ROOT / file) for file in files), definitions(ROOT / "jpipe" / "programs" / "_instructions.py"))
    known |= definitions(ROOT / "jpipe" / "runtime" / "_metrics.py")
    for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", text):
        assert name in known, name


def test_the_picture_has_the_steps_of_the_table():
    (table,) = [table for table in read(text_of("how-it-works")) if table.name == microbatch.NAME]
    (axes,) = microbatch.picture(table).axes
    texts = [text.get_text() for text in axes.texts if text.get_text()]
    assert {str(row[0]) for row in table.rows} | {str(row[4]) for row in table.rows} | {"once", "each step"} <= set(texts)


TESTS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text_of("invariants"))


@pytest.mark.parametrize("file", sorted({file for file, _ in TESTS}))
def test_each_test_of_an_invariant_exists(file):
    assert {name for one, name in TESTS if one == file} <= definitions(ROOT / file)


def test_each_test_of_an_invariant_runs_without_being_asked_for():
    """Not only `make test-all` runs it."""
    for file, name in TESTS:
        text = (ROOT / file).read_text(encoding="utf-8")
        (test,) = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
        marks = [ast.unparse(decorator) for decorator in test.decorator_list]
        assert "pytest.mark.exhaustive" not in marks, f"{file}::{name}"


def test_each_combination_of_a_test_of_an_invariant_runs_within_ten_commits(request):
    """Of those that are collected: all where all tests are asked for. One that no commit runs makes its invariant a promise only."""
    never_run = request.config.stash[NEVER_RUN]
    assert {name: cases for name, cases in never_run.items() if cases} == {}


def test_each_invariant_has_a_test():
    rows = [row for table in read(text_of("invariants")) for row in table.rows]
    assert len(rows) > 40
    assert all(re.fullmatch(r"`tests/[\w/]+\.py::\w+`", row[1]) for row in rows)


def test_the_names_of_the_papers_have_every_schedule_and_only_fields_that_exist():
    text = text_of("names-of-the-papers")
    assert [name for name in jpipe.schedules.SCHEDULES if f"`{name}`" not in text] == []
    for name in re.findall(r"`Plan\.(\w+)`", text):
        assert name in jpipe.Plan.model_fields or hasattr(jpipe.Plan, name), name
    for name in re.findall(r"`(\w+): [\w.]+`", text):
        assert name in jpipe.Plan.model_fields | jpipe.Stage.model_fields or name == "delay_correction", name
