"""Several processes write checkpoints, of which some parts fail."""

import contextlib
import time

import pytest

import jpipe
import jpipe.checkpoints.writing
from jpipe_train.checkpoint.checkpoints import Checkpoints
from jpipe_train.config.config import CheckpointConfig
from jpipe_train.launch.team import Team


class ConnectedProcesses(jpipe.processes.Processes):
    """One of several processes that receive each other's messages at once; records how long others may wait for it."""

    def __init__(self, index, count, messages):
        self.index, self.count, self._messages, self.waits = index, count, messages, []

    def broadcast(self, name, data):
        self._messages[name] = data

    def has_message(self, name):
        return name in self._messages

    def check(self):
        pass

    def finished(self):
        return frozenset()

    def still(self):
        return 0.0

    def receive(self, name, on=None, what=None):
        return self._messages[name]

    def waiting(self, what, on=None, limit=None):
        self.waits.append((what, limit))
        return contextlib.nullcontext()


class EmptySnapshot(jpipe.runtime.Snapshot):
    """A snapshot that is complete at once and empty."""

    complete, copied = True, ()

    def __init__(self, batch):
        self.batch = batch

    def layers(self):
        return {}


class Pipe(jpipe.Pipeline):
    """A pipeline with empty snapshots."""

    def __init__(self):
        pass

    def snapshot(self, batch):
        return EmptySnapshot(batch)


@pytest.fixture
def make_checkpoints(tmp_path):
    """Return a function that returns the checkpoints of several processes, the processes, and a list of process 0's messages."""

    def make(policy, count=2):
        sent, messages = {}, []
        processes = [ConnectedProcesses(index, count, sent) for index in range(count)]
        config = CheckpointConfig(every=2, on_full_disk=policy)
        checkpoints = [
            Checkpoints(
                config, Pipe(), tmp_path, 100, Team(process), {}, bytes, messages.append if process.index == 0 else lambda line: None
            )
            for process in processes
        ]
        return checkpoints, processes, messages

    return make


def start_saves(checkpoints, step):
    for one in checkpoints:
        one.schedule_snapshot(step - 1)
        one.flush_finished(step - 1, lambda _: {})


def check_failed_save(checkpoints, processes, messages, folder, reason):
    """Check that step 2 is saved, step 4 fails for this reason and is removed, and step 6 is saved."""
    start_saves(checkpoints, 4)
    for one in checkpoints:
        one.finish()
    assert messages == [f"a checkpoint could not be written: {reason}; the run continues, the last complete checkpoint is of step 2"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["2"], "what is of no use takes no room"
    start_saves(checkpoints, 6)
    for one in checkpoints:
        one.finish()
        one.close()
    assert jpipe.checkpoints.steps(folder) == [2, 6]
    waits = [[wait for wait in process.waits if wait[0] == "a checkpoint to be written"] for process in processes]
    assert {each[0] for each in waits} == {("a checkpoint to be written", 600.0)}, "the others may wait that long for it"


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [({0}, "No space left on device"), ({1}, "process 1 could not write its part"), ({0, 2}, "No space left on device")],
    ids=str,
)
def test_a_failed_part_of_a_checkpoint_is_not_waited_for_and_is_removed(lacking, reason, make_checkpoints, tmp_path, monkeypatch):
    checkpoints, processes, messages = make_checkpoints("train", 3)
    start_saves(checkpoints, 2)
    for one in checkpoints:
        one.finish()
    write = jpipe.checkpoints.writing.write_layers

    def full(folder, step, layers, process):
        if step == 4:
            time.sleep(0.1 * process)  # the others are not cleared away while they are being written
            if process in lacking:
                raise OSError(28, "No space left on device")
        return write(folder, step, layers, process)

    monkeypatch.setattr(jpipe.checkpoints.writing, "write_layers", full)
    check_failed_save(checkpoints, processes, messages, tmp_path, reason)


def test_a_checkpoint_whose_marker_cannot_be_written_is_removed(make_checkpoints, tmp_path, monkeypatch):
    checkpoints, processes, messages = make_checkpoints("train")
    start_saves(checkpoints, 2)
    for one in checkpoints:
        one.finish()
    complete = jpipe.checkpoints.writing.complete

    def full(folder, step, *arguments):
        if step == 4:
            raise OSError(28, "No space left on device")
        complete(folder, step, *arguments)

    monkeypatch.setattr(jpipe.checkpoints.writing, "complete", full)
    check_failed_save(checkpoints, processes, messages, tmp_path, "No space left on device")


def test_a_failure_to_remove_an_old_checkpoint_is_not_reported_as_a_failed_save(make_checkpoints, tmp_path, monkeypatch):
    def stays(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(jpipe.checkpoints, "prune", stays)
    checkpoints, _, messages = make_checkpoints("train")
    start_saves(checkpoints, 2)
    for one in checkpoints:
        one.finish()
        one.close()
    assert messages == [
        "an old checkpoint could not be removed: Permission denied; the run continues, the last complete checkpoint is of step 2"
    ]
    assert jpipe.checkpoints.steps(tmp_path) == [2]


def test_every_process_of_a_stopped_run_names_the_last_good_checkpoint(make_checkpoints, monkeypatch):
    checkpoints, _, _ = make_checkpoints("stop")
    start_saves(checkpoints, 2)
    for one in checkpoints:
        one.finish()
    monkeypatch.setattr(jpipe.checkpoints.writing, "write_layers", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    start_saves(checkpoints, 4)
    for one in checkpoints:
        with pytest.raises(
            OSError, match="a checkpoint could not be written: No space left on device; the last complete checkpoint is of step 2"
        ):
            one.finish()
        one.close()


def test_a_part_of_which_its_process_says_nothing_is_not_joined(tmp_path):
    for process in range(2):  # that of process 1 may be of an earlier attempt
        jpipe.checkpoints.writing.write_layers(tmp_path, 2, {}, process)
    with pytest.raises(TimeoutError, match=r"waited 0 s for process 1 to report that the part of step 2 is written"):
        jpipe.checkpoints._complete(tmp_path, EmptySnapshot(2), [], ConnectedProcesses(0, 2, {}), None, {}, bytes, 0.0)
    assert jpipe.checkpoints.steps(tmp_path) == []
