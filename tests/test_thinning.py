"""Which combinations of a test's parameters run at a commit."""

import subprocess

import pytest

from tests import thinning


class Case:
    """A combination, as pytest collects it."""

    def __init__(self, number: int, marks: dict[str, dict[str, int]]) -> None:
        self.nodeid, self.marks = f"tests/test_it.py::test_it[{number}]", marks
        self.callspec = self
        self.params = {"number": number, "kind": number % 3}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return pytest.Mark(name, (), self.marks[name], _ispytest=True) if name in self.marks else None


MARKS = [
    {"thinned": {}},
    {"thinned": {"most": 1}},
    {"thinned": {"most": 2, "most_slow": 1}},
    {"thinned": {"most": 0, "most_slow": 0}},
    {"thinned": {"most": 1}, "slow": {}},
    {"exhaustive": {}},
]


@pytest.mark.parametrize("marks", MARKS, ids=str)
@pytest.mark.parametrize("number", [1, 7, 10, 14, 122])
def test_every_combination_of_an_invariant_runs_in_one_of_ten_parts(number, marks):
    cases = [Case(i, marks) for i in range(number)]
    found = [thinning.levels(cases, part, every=True) for part in range(thinning.PARTS)]
    assert all(min(levels) < thinning.ALL for levels in zip(*found, strict=True))
    assert thinning.never_run(cases, every=True) == []
    for levels in found:  # and no more than `most` in `make test`
        assert levels.count(thinning.TEST) <= marks.get("thinned", {}).get("most", number)
        assert "thinned" in marks or sum(level < thinning.ALL for level in levels) <= -(-number // thinning.PARTS)


def test_what_no_part_runs_is_found():
    few = [Case(i, {"thinned": {"most": 1, "most_slow": 0}}) for i in range(30)]
    assert len(thinning.never_run(few, every=False)) == 20
    assert len(thinning.never_run([Case(i, {"exhaustive": {}}) for i in range(3)], every=False)) == 3


def test_tests_that_take_turns_run_once_in_as_many_parts_as_there_are_turns():
    for turns in (2, 5):
        for number in range(20):
            due = [thinning.is_due(f"tests/test_it.py::test_{number}", part, turns) for part in range(thinning.PARTS)]
            assert due.count(True) == thinning.PARTS // turns
            assert due == due[:turns] * (thinning.PARTS // turns)


def test_ten_commits_of_a_branch_have_all_parts(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words], cwd=tmp_path, check=True, capture_output=True
        )

    def commit():
        git("commit", "--allow-empty", "-m", "more")

    monkeypatch.delenv(thinning.VARIABLE, raising=False)
    monkeypatch.setattr(thinning, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert thinning.part_of_commit() == (0, "no Git here")
    git("init", "-b", "main")
    parts = []
    for number in range(10):
        if number == 4:  # a merge is one commit of the branch, however many it brings
            git("checkout", "-b", "other")
            commit()
            commit()
            git("checkout", "main")
            git("merge", "--no-ff", "other")
        else:
            commit()
        parts.append(thinning.part_of_commit())
    assert sorted(parts) == [(part, "the number of commits") for part in range(10)]
    git("clone", "--depth=1", tmp_path.as_uri(), "shallow")
    monkeypatch.setattr(thinning, "ROOT", tmp_path / "shallow")
    part, source = thinning.part_of_commit()
    assert (part in range(10), source) == (True, "the commit's hash")
    monkeypatch.setenv(thinning.VARIABLE, "7")
    assert thinning.part_of_commit() == (7, thinning.VARIABLE)
