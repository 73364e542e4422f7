"""The mark of a run that has come to its end, as real runs write and remove it."""

import json
import signal

import pytest

from jpipe_train.checkpoint.checkpoints import Checkpoints
from jpipe_train.checkpoint.run_folder import RunFolder, mark_missing_end
from jpipe_train.report.summary import Summary
from jpipe_train.run import ending, loop
from jpipe_train.run.settings import settings_of
from jpipe_train.runs.reading import end_of, read
from tests.train.conftest import changed
from tests.train.runs.folders import PLAN


def test_a_run_that_goes_on_loses_its_mark(tiny, tmp_path):
    config, mark = changed(tiny), tmp_path / "run" / "end.json"
    with RunFolder(settings_of(config), PLAN) as folder:
        folder.mark_end(5, 5, None)
    assert json.loads(mark.read_text()) == {"format": "jpipe-end/1", "steps": 5, "length": 5, "stopped_early": None, "stopped_by": None}
    with RunFolder(settings_of(config), PLAN, resumes=True) as folder:
        assert mark.exists()
        folder.go_on("")
        assert not mark.exists()


def test_the_steps_of_epochs_are_in_the_folder_until_it_goes_on_with_steps(tiny, tmp_path):
    epochs, length = changed(tiny | {"train": {"epochs": 2, "batch_size": 4}}), tmp_path / "run" / "length.json"
    counted = epochs.model_copy(update={"train": epochs.train.model_copy(update={"steps": 9})})
    with RunFolder(settings_of(counted), PLAN):
        assert json.loads(length.read_text()) == {"format": "jpipe-length/1", "steps": 9}
        assert read(tmp_path / "run", whole=False).steps == 9
    with RunFolder(settings_of(changed(tiny)), PLAN, resumes=True) as folder:
        folder.go_on("")
    assert not length.exists()


def test_a_missing_mark_is_written_for_the_same_config_and_no_other(tiny, tmp_path):
    config, path = changed(tiny), tmp_path / "run"
    with RunFolder(settings_of(config), PLAN):
        mark_missing_end(settings_of(config), path, 5, None)
        assert not (path / "end.json").exists(), "a process is training"
    for other, steps in ((changed(tiny, train={"steps": 3}), 3), (config, 6)):
        mark_missing_end(settings_of(other), path, steps, None)
        assert not (path / "end.json").exists()
    mark_missing_end(settings_of(config), path, 3, "at step 3: why")
    assert end_of(path) == (3, 5, "at step 3: why", None)
    mark_missing_end(settings_of(config), path, 5, None)
    assert end_of(path).steps == 3, "the mark that there is stays"


def test_a_signal_is_named_in_the_mark(tiny, tmp_path):
    settings = settings_of(changed(tiny))
    with RunFolder(settings, PLAN) as folder:
        ending.complete(Summary(3, None, None, 1.0, folder.path, None, None, stopped_by=signal.SIGINT), settings, PLAN, (), folder)
    assert end_of(tmp_path / "run") == (3, 5, None, "Ctrl-C")


@pytest.mark.slow
def test_a_run_that_is_complete_gets_its_mark_and_one_that_a_signal_stopped_another(tiny, tmp_path, no_report, monkeypatch):
    base = tiny | {"log": [], "train": {"epochs": 0.2, "batch_size": 4, "eval_every": 100}, "checkpoint": {"every": 2}}
    log_finished, flush, stopped = loop.MetricsLog.finished, Checkpoints.flush_finished, []

    def finished(self, metrics):
        log_finished(self, metrics)
        if self.last_step == 2 and not stopped:
            stopped.append(signal.raise_signal(signal.SIGTERM))

    def waiting(self, *arguments):  # for the checkpoint, while the run would end
        flush(self, *arguments)
        if stopped:
            self.finish()

    monkeypatch.setattr(loop.MetricsLog, "finished", finished)
    monkeypatch.setattr(Checkpoints, "flush_finished", waiting)
    summary = loop.main(changed(base))
    run = read(tmp_path / "run", whole=True)
    assert run.end == (summary.steps, run.steps, None, "SIGTERM")
    assert (run.state.name, run.steps > summary.steps) == ("stopped", True)
    with monkeypatch.context() as killed:
        killed.setattr("jpipe_train.run.loop.complete", lambda summary, *_: summary)  # as if it were killed at its end
        loop.main(changed(base))
    assert not (tmp_path / "run" / "end.json").exists()
    loop.main(changed(base))
    assert read(tmp_path / "run", whole=True).end == (run.steps, run.steps, None, None)


@pytest.mark.slow
def test_a_run_of_epochs_is_complete_and_is_not_when_more_are_to_be_trained(tiny, tmp_path, no_report, monkeypatch):
    base = tiny | {"log": [], "train": {"epochs": 0.05, "batch_size": 4}}
    summary = loop.main(changed(base, checkpoint={"every": 100}))
    run = read(tmp_path / "run", whole=True)
    assert (run.state.name, run.steps, run.done) == ("complete", summary.steps, summary.steps)
    monkeypatch.setattr("jpipe_train.run.loop.complete", lambda summary, *_: summary)  # as if it were killed at its end
    loop.main(changed(base, checkpoint={"every": 100}, train={"epochs": 0.1}))
    assert read(tmp_path / "run", whole=True).end is None


@pytest.mark.slow
def test_a_run_that_stopped_early_says_why(tiny, tmp_path, no_report):
    stop = {"metric": "val_loss", "patience": 1, "min_delta": 100.0}
    summary = loop.main(changed(tiny | {"log": []}, train={"steps": 20, "stop": stop}))
    run = read(tmp_path / "run", whole=False)
    assert (run.state.name, run.steps, run.done) == ("stopped early", 20, summary.steps)
    assert run.state.why == summary.remarks["stopped early"]
