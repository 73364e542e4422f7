"""TensorBoard reads the events while they are written; a full disk or Ctrl-C damages neither the run nor the file."""

import math
import resource
import signal
from contextlib import contextmanager

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.record_writer import RecordWriter

from jpipe_train.console import interrupt
from jpipe_train.report.loggers.tensorboard import TensorBoard


@pytest.fixture
def messages() -> list[str]:
    return []


def read(folder) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_the_scalars_back(tmp_path, messages):
    with TensorBoard(tmp_path / "run" / "tensorboard", messages.append) as board:
        board.write(0, {"loss": 5.5, "val_loss": 5.25})
        board.write(1, {"loss": 5.0, "tokens_per_second": 1e6})
        board.write(2, {"loss": math.inf})
    assert read(tmp_path / "run" / "tensorboard") == {
        "loss": [(0, 5.5), (1, 5.0), (2, math.inf)],
        "val_loss": [(0, 5.25)],
        "tokens_per_second": [(1, 1e6)],
    }
    assert messages == []


def test_a_live_tensorboard_sees_what_is_written(tmp_path, messages):
    with TensorBoard(tmp_path, messages.append, flush_seconds=0.0) as board:
        board.write(0, {"loss": 3.0})
        assert read(tmp_path) == {"loss": [(0, 3.0)]}
        board.write(1, {"loss": 2.0})
        assert read(tmp_path) == {"loss": [(0, 3.0), (1, 2.0)]}


def test_a_resumed_run_keeps_the_existing_files(tmp_path, messages):
    for step in range(3):
        with TensorBoard(tmp_path, messages.append) as board:
            board.write(step, {"loss": 3.0 - step})
    assert read(tmp_path) == {"loss": [(0, 3.0), (1, 2.0), (2, 1.0)]}


def test_a_run_resumed_from_an_earlier_step_replaces_the_later_rows(tmp_path, messages):
    for loss, steps in ((3.0, range(6)), (2.0, range(4, 8))):
        with TensorBoard(tmp_path, messages.append) as board:
            for step in steps:
                board.write(step, {"loss": loss})
    assert read(tmp_path)["loss"] == [(step, 3.0) for step in range(4)] + [(step, 2.0) for step in range(4, 8)]


@contextmanager
def no_room_beyond(size):
    """Limit the files of this process to `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("flush_seconds", [0.0, 1e9])
def test_a_full_disk_is_reported_once_and_the_run_continues(tmp_path, messages, flush_seconds):
    with no_room_beyond(200), TensorBoard(tmp_path / "full", messages.append, flush_seconds) as board:
        for step in range(20):
            board.write(step, {"loss": 1.0})
    assert messages == [f"tensorboard: cannot write in '{tmp_path / 'full'}': File too large; the run continues without TensorBoard"]
    if flush_seconds == 0.0:
        assert read(tmp_path / "full")["loss"][:2] == [(0, 1.0), (1, 1.0)]  # what found room is there


def test_a_folder_that_cannot_be_created_is_reported(tmp_path, messages):
    (tmp_path / "file").write_text("")
    with TensorBoard(tmp_path / "file" / "tensorboard", messages.append) as board:
        board.write(0, {"loss": 1.0})
    assert len(messages) == 1
    assert "Not a directory; the run continues without TensorBoard" in messages[0]


def test_ctrl_c_waits_until_a_record_is_whole(tmp_path, messages, monkeypatch, interruptible):
    whole = []

    def interrupted(self, record):
        signal.raise_signal(signal.SIGINT)
        whole_write(self, record)
        whole.append(record)

    whole_write = RecordWriter.write
    with interrupt.watched(), TensorBoard(tmp_path, messages.append) as board:
        board.write(0, {"loss": 2.0})
        monkeypatch.setattr(RecordWriter, "write", interrupted)
        board.write(1, {"loss": 1.0})
        assert len(whole) == 1
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
        monkeypatch.undo()
    assert read(tmp_path) == {"loss": [(0, 2.0), (1, 1.0)]}
