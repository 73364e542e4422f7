"""Processes that write checkpoints, and what becomes of a part that cannot be written."""

import contextlib
import time

import pytest

import jpipe
from jpipe.checkpoints import files as checkpoint_files
from jpipe_train.checkpoint.checkpoints import Checkpoints
from jpipe_train.config.config import CheckpointConfig
from jpipe_train.launch.together import Together


class Heard(jpipe.processes.Processes):
    """One of some processes that hear each other at once; notes how long others may wait for it."""

    def __init__(self, index, count, told):
        self.index, self.count, self._told, self.waits = index, count, told, []

    def broadcast(self, name, values):
        self._told.add(name)

    def has_message(self, name):
        return name in self._told

    def check(self):
        pass

    def finished(self):
        return frozenset()

    def still(self):
        return 0.0

    def receive(self, name, on=None, what=None):
        assert name in self._told
        return ()

    def waiting(self, what, on=None, limit=None):
        self.waits.append((what, limit))
        return contextlib.nullcontext()


class Taken(jpipe.runtime.Snapshot):
    """A snapshot that is complete at once and holds nothing."""

    complete, shared = True, ()

    def __init__(self, batch):
        self.batch = batch

    def layers(self):
        return {}


class Pipe(jpipe.Pipeline):
    """Gives such cuts."""

    def __init__(self):
        pass

    def snapshot(self, batch):
        return Taken(batch)


@pytest.fixture
def some(tmp_path):
    """Return a function that returns the checkpoints of several processes, the processes, and a list of process 0's messages."""

    def make(policy, count=2):
        told, said = set(), []
        processes = [Heard(index, count, told) for index in range(count)]
        config = CheckpointConfig(every=2, on_full_disk=policy)
        made = [
            Checkpoints(
                config, Pipe(), tmp_path, 100, Together(process), {}, bytes, said.append if process.index == 0 else lambda line: None
            )
            for process in processes
        ]
        return made, processes, said

    return make


def begin_to_save(made, step):
    for one in made:
        one.schedule_snapshot(step - 1)
        one.flush_finished(step - 1, lambda _: {})


def check_what_becomes_of_4(made, processes, said, folder, reason):
    """Step 2 could be written, step 4 could not for this reason, step 6 can; step 4 takes no room meanwhile."""
    begin_to_save(made, 4)
    for one in made:
        one.finish()
    assert said == [f"a checkpoint could not be written: {reason}; the run continues, the last good one is of step 2"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["2"], "what is of no use takes no room"
    begin_to_save(made, 6)
    for one in made:
        one.finish()
        one.close()
    assert checkpoint_files.steps(folder) == [2, 6]
    waits = [[wait for wait in process.waits if wait[0] == "a checkpoint to be written"] for process in processes]
    assert {each[0] for each in waits} == {("a checkpoint to be written", 600.0)}, "the others may wait that long for it"


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [({0}, "No space left on device"), ({1}, "process 1 could not write its part"), ({0, 2}, "No space left on device")],
    ids=str,
)
def test_what_a_process_cannot_write_is_not_waited_for_and_takes_no_room(lacking, reason, some, tmp_path, monkeypatch):
    made, processes, said = some("train", 3)
    begin_to_save(made, 2)
    for one in made:
        one.finish()
    write = checkpoint_files.write_layers

    def full(folder, step, layers, process):
        if step == 4:
            time.sleep(0.1 * process)  # the others are not cleared away while they are being written
            if process in lacking:
                raise OSError(28, "No space left on device")
        return write(folder, step, layers, process)

    monkeypatch.setattr(checkpoint_files, "write_layers", full)
    check_what_becomes_of_4(made, processes, said, tmp_path, reason)


def test_where_only_the_marker_finds_no_room_nothing_else_takes_it(some, tmp_path, monkeypatch):
    made, processes, said = some("train")
    begin_to_save(made, 2)
    for one in made:
        one.finish()
    complete = checkpoint_files.complete

    def full(folder, step, *rest):
        if step == 4:
            raise OSError(28, "No space left on device")
        complete(folder, step, *rest)

    monkeypatch.setattr(checkpoint_files, "complete", full)
    check_what_becomes_of_4(made, processes, said, tmp_path, "No space left on device")


def test_an_old_checkpoint_that_stays_is_not_taken_for_a_new_one_that_is_lacking(some, tmp_path, monkeypatch):
    def stays(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint_files, "prune", stays)
    made, _, said = some("train")
    begin_to_save(made, 2)
    for one in made:
        one.finish()
        one.close()
    assert said == ["an old checkpoint could not be removed: Permission denied; the run continues, the last good one is of step 2"]
    assert checkpoint_files.steps(tmp_path) == [2]


def test_a_run_that_stops_for_it_says_which_is_the_last_good_one_in_every_process(some, monkeypatch):
    made, _, _ = some("stop")
    begin_to_save(made, 2)
    for one in made:
        one.finish()
    monkeypatch.setattr(checkpoint_files, "write_layers", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    begin_to_save(made, 4)
    for one in made:
        with pytest.raises(OSError, match="a checkpoint could not be written: No space left on device; the last good one is of step 2"):
            one.finish()
        one.close()
