"""Checkpoints with any damaged file, and the comparison of ends in `make bench-faults`."""

import itertools
import random
import shutil

import numpy as np
import pytest

import jpipe.checkpoints
from benchmarks.faults import damage, kills
from benchmarks.faults.runs import EVERY, KINDS, config_of, difference, end_of
from jpipe_train.checkpoint.resume import find
from jpipe_train.config.config import Config
from jpipe_train.launch.team import Team
from jpipe_train.run import loop

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return the folder of a run with three checkpoints, for tests to copy."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("jpipe_train.run.loop.write_report", lambda *_: None)  # which takes longer than the run
        return damage.trained(tmp_path_factory.mktemp("stopped"), damage.STOPPED)


@pytest.fixture
def copied_run(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path


@pytest.mark.slow
def test_any_damaged_file_is_named_and_the_previous_checkpoint_used(copied_run, stopped):
    place, before = damage.newest(stopped), damage.STOPPED - EVERY
    expected, config = (
        jpipe.checkpoints.Checkpoint(stopped, before).read(),
        Config.model_validate(config_of(copied_run, damage.PLAN, damage.END)),
    )
    names = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert {"checkpoint.json", "process-0.json"} < names
    tried = set()
    for name, how, at in itertools.islice(damage.damages(place, random.Random(0)), len(names) * len(damage.HOW)):
        file = copied_run / "run" / place.relative_to(stopped) / name
        damage.damage(file, how, at)
        messages = []
        resumed = find(config.run.dir, "auto", Team(None), messages.append)
        assert resumed.step == before
        assert file.name in messages[0]
        assert difference(jpipe.checkpoints.Checkpoint(resumed.folder, before).read(), expected) is None
        shutil.copy(place / name, file)
        tried.add((name, how))
    assert tried == set(itertools.product(names, damage.HOW))
    assert find(config.run.dir, "auto", Team(None), print).step == damage.STOPPED, "each time all was as before but for one file"


@pytest.mark.exhaustive
def test_a_run_with_a_damaged_checkpoint_ends_with_equal_results(copied_run, tmp_path_factory, monkeypatch):
    monkeypatch.setattr("jpipe_train.run.loop.write_report", lambda *_: None)
    expected = end_of(damage.trained(tmp_path_factory.mktemp("whole"), damage.END))
    name, how, at = next(one for one in damage.damages(damage.newest(copied_run / "run"), random.Random(1)) if one[1] == "changed")
    damage.damage(damage.newest(copied_run / "run") / name, how, at)
    assert damage.outcome(copied_run, name, expected) is None


@pytest.mark.exhaustive
def test_replicas_that_save_within_a_round_write_every_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("jpipe_train.run.loop.write_report", lambda *_: None)
    loop.main(Config.model_validate(config_of(tmp_path, KINDS["2-1-1"], EVERY + 1)))
    assert jpipe.checkpoints.steps(tmp_path / "run") == [EVERY, EVERY + 1]


def test_differences_between_ends_are_found():
    end = {"a": [np.float32([1, np.nan]), {"b": 1.5}], "c": 3}
    assert difference(end, {"a": [np.float32([1, np.nan]), {"b": 1.5}], "c": 3}) is None
    changed_ends = {
        "/a/0: other numbers": {"a": [np.float32([-1, np.nan]), {"b": 1.5}], "c": 3},
        "/a/1/b: 1.5 in place of 2.5": {"a": [np.float32([1, np.nan]), {"b": 2.5}], "c": 3},
        "/a: another length": {"a": [np.float32([1, np.nan])], "c": 3},
        ": other keys": {"a": [np.float32([1, np.nan]), {"b": 1.5}]},
        "/c: 3 in place of 4": {"a": [np.float32([1, np.nan]), {"b": 1.5}], "c": 4},
    }
    for words, other in changed_ends.items():
        assert difference(end, other) == words
    assert difference(np.float32([0.0]), np.float32([-0.0])) is not None
    assert difference(np.zeros(2, np.float32), np.zeros(2)) is not None
    assert difference(np.zeros(2), np.zeros((2, 1))) is not None


def test_the_folder_tells_when_a_run_was_killed(tmp_path):
    assert kills.moment_of(tmp_path) == "before the first"
    place = tmp_path / "checkpoints" / "3"
    place.mkdir(parents=True)
    assert kills.moment_of(tmp_path) == "during a save"
    (place / "checkpoint.json").touch()
    assert kills.moment_of(tmp_path) == "between saves"
