"""The path of a step: the files of jpipe that run between `Pipeline.step` and the first call of a compiled program."""

import inspect
import sys
from pathlib import Path

import jax
import pytest

import jpipe
from benchmarks.papers.document import read
from docs import microbatch
from jpipe import Pipeline, Plan
from tests.jpipe import models, running

ROOT = Path(jpipe.__file__).parents[1]
COMPILED = inspect.unwrap(jax.stages.Compiled.__call__).__code__


def path_of_a_step(schedule):
    """Return the files of jpipe that run in a step up to its first compiled call, and the calls of jpipe around that call."""
    plan = Plan.even(models.plain_stack().ids, 2, schedule, microbatches=2)
    pipe, batches = Pipeline(models.plain_stack(), plan, models.squares, models.momentum()), models.batches_of(2, 4)
    state, _ = pipe.step(running.fresh(pipe, batches), batches[0])  # what is computed once, such as a program, is known then
    files, around = [], []

    def file_of(frame):
        file = Path(frame.f_code.co_filename)
        return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT / "jpipe") else None

    def note(frame, event, _):
        if event == "call" and frame.f_code is COMPILED and not around:
            outer = frame
            while (outer := outer.f_back) is not None:
                around.extend([outer.f_code.co_qualname] if file_of(outer) else [])
        elif event == "call" and not around and (file := file_of(frame)) and file not in files:
            files.append(file)

    sys.setprofile(note)
    try:
        pipe.step(state, batches[1])
    finally:
        sys.setprofile(None)
    return files, around[::-1]


@pytest.mark.parametrize("schedule", ["gpipe", "pipedream_flush"])
def test_a_step_reaches_the_first_compiled_call_within_ten_files_and_twelve_calls(schedule):
    files, calls = path_of_a_step(schedule)
    assert files[0] == "jpipe/pipeline.py"
    assert calls[-2:] == ["Worker.compute", "Worker.run"]
    assert len(calls) <= 12, calls
    assert len(files) <= 10, files


def test_the_page_about_a_step_has_these_files():
    text = (ROOT / "docs" / "explanation" / "how-it-works.md").read_text(encoding="utf-8")
    (table,) = [table for table in read(text) if table.name == microbatch.NAME]
    assert {row[2].strip("`") for row in table.rows if row[1] == "each step"} == set(path_of_a_step("gpipe")[0])
