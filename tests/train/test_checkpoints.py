"""Two processes that write checkpoints, and what becomes of a part that cannot be written."""

import contextlib

import pytest

import jpipe
from train import checkpoint_files
from train.checkpoints import Checkpoints
from train.config import CheckpointConfig
from train.together import Together


class Heard(jpipe.Processes):
    """One of two processes that hear each other at once; notes how long others may wait for it."""

    def __init__(self, index, told):
        self.index, self.count, self._told, self.waits = index, 2, told, []

    def tell(self, name, values):
        self._told.add(name)

    def heard(self, name):
        return name in self._told

    def waiting(self, what, on=None, limit=None):
        self.waits.append((what, limit))
        return contextlib.nullcontext()


class Taken(jpipe.Cut):
    """A cut that is there at once and holds nothing."""

    complete = True

    def __init__(self, batch):
        self.batch = batch

    def layers(self):
        return {}


class Pipe(jpipe.Pipeline):
    """Gives such cuts."""

    def __init__(self):
        pass

    def cut(self, batch):
        return Taken(batch)


@pytest.fixture
def two(tmp_path):
    """Makes the checkpoints of two processes, those processes, and a list of what process 0 says."""

    def make(policy):
        told, said = set(), []
        processes = [Heard(index, told) for index in range(2)]
        config = CheckpointConfig(every=2, on_full_disk=policy)
        made = [
            Checkpoints(config, Pipe(), tmp_path, 100, Together(process), {}, said.append if process.index == 0 else lambda line: None)
            for process in processes
        ]
        return made, processes, said

    return make


def begin_to_save(made, step):
    for one in made:
        one.arm(step - 1)
        one.proceed(step - 1, lambda _: {})


def test_what_one_process_cannot_write_is_not_waited_for(two, tmp_path, monkeypatch):
    made, processes, said = two("train")
    begin_to_save(made, 2)
    for one in made:
        one.finish()
    write = checkpoint_files.write_layers

    def full(folder, step, layers, process):
        if process == 1 and step == 4:
            raise OSError(28, "No space left on device")
        return write(folder, step, layers, process)

    monkeypatch.setattr(checkpoint_files, "write_layers", full)
    begin_to_save(made, 4)
    begin_to_save(made, 6)
    for one in made:
        one.finish()
        one.close()
    assert said == [
        "a checkpoint could not be written: process 1 could not write its part; the run goes on, the last good one is of step 2"
    ]
    assert checkpoint_files.steps(tmp_path) == [2, 6]
    assert not [*(tmp_path / "checkpoints").glob("00000004/*")], "what is of no use takes no room"
    assert {process.waits[0] for process in processes} == {("a checkpoint to be written", 600.0)}, "the others may wait that long for it"


def test_an_old_checkpoint_that_stays_is_not_taken_for_a_new_one_that_is_lacking(two, tmp_path, monkeypatch):
    def stays(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint_files, "prune", stays)
    made, _, said = two("train")
    begin_to_save(made, 2)
    for one in made:
        one.finish()
        one.close()
    assert said == ["an old checkpoint could not be removed: Permission denied; the run goes on, the last good one is of step 2"]
    assert checkpoint_files.steps(tmp_path) == [2]


def test_a_run_that_stops_for_it_says_which_is_the_last_good_one_in_every_process(two, monkeypatch):
    made, _, _ = two("stop")
    begin_to_save(made, 2)
    for one in made:
        one.finish()
    monkeypatch.setattr(checkpoint_files, "write_layers", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    begin_to_save(made, 4)
    for one in made:
        with pytest.raises(OSError, match="a checkpoint could not be written: No space left on device; the last good one is of step 2"):
            one.finish()
        one.close()
