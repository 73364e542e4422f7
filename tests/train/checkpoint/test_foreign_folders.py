"""Foreign run folders: nothing outside is written or removed, and nothing of another program is overwritten."""

import os
import shutil
import time
from pathlib import Path

import pytest

import jpipe.checkpoints.writing
from jpipe import InputError
from jpipe.checkpoints.folders import discard, unfinished_folder
from jpipe_lm.data.splits import read_bytes
from jpipe_train.assemble.build import make_plan
from jpipe_train.checkpoint.export import write_file
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.checkpoint.resume import find
from jpipe_train.checkpoint.run_folder import OUTPUTS, RunFolder
from jpipe_train.launch.team import Team
from jpipe_train.report.loggers.tensorboard import TensorBoard
from jpipe_train.run import loop
from jpipe_train.run.settings import settings_of
from tests.train.conftest import changed

NAMES = ("config.yaml", "plan.json", "metrics.jsonl", ".job", ".lock", "trace.json", "report.html", "loss.png", "planned.json")


@pytest.fixture
def saved(tiny):
    return tiny | {"checkpoint": {"every": 2, "keep": 1}, "train": tiny["train"] | {"steps": 4, "trace_batches": 0}}


@pytest.fixture
def outside(tmp_path):
    """Write files of the user: one named like a start-up file, and a folder of numbered ones."""
    folder = tmp_path / "home"
    for name in (".bashrc", "1/photo.jpg", "9/checkpoint.json", "9/photo.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_links_planted_in_a_run_folder_are_not_followed(saved, outside, monkeypatch):
    """A foreign run folder contains links to the user's files in place of its own and of future files."""
    before = contents(outside)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "write_report", lambda *_: None)  # the second run's overwrites what was planted
        folder = loop.main(changed(saved)).folder
    rows = (folder / "metrics.jsonl").read_bytes()
    for name in NAMES:
        for planted in (folder / name, folder / f".{name}.unfinished"):
            if name != ".lock" and not os.path.lexists(planted):
                planted.symlink_to(outside / ".bashrc")
            elif name != ".lock":
                planted.unlink()
                planted.symlink_to(outside / ".bashrc")
    for place in ("6", "6.orbax-checkpoint-tmp"):
        (folder / "checkpoints" / place).mkdir()
        for name in ("process-0", "default", "complete", "process-0.json", "checkpoint.json", "metrics.jsonl"):
            (folder / "checkpoints" / place / name).symlink_to(outside / ".bashrc" if "." in name else outside)
    summary = loop.main(changed(saved, train={"steps": 6}))
    assert summary.steps == 6
    assert contents(outside) == before
    assert (folder / "metrics.jsonl").read_bytes().startswith(rows[:-1].rpartition(b"\n")[0])
    assert jpipe.checkpoints.steps(folder) == [6]


def test_a_planted_lock_is_refused(saved, outside):
    before = contents(outside)
    folder = Path(saved["run"]["dir"])
    folder.mkdir()
    (folder / ".lock").symlink_to(outside / "new")
    with pytest.raises(InputError, match=r"run.dir: cannot write '.*/run/.lock': it is a symbolic link, which jpipe does not follow there"):
        loop.main(changed(saved))
    assert contents(outside) == before


def test_a_linked_folder_of_checkpoints_is_refused_and_its_target_stays(saved, outside, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "write_report", lambda *_: None)
    folder = loop.main(changed(saved)).folder
    shutil.move(folder / "checkpoints", outside / "checkpoints")
    before = contents(outside)
    (folder / "checkpoints").symlink_to(outside / "checkpoints")
    message = r"checkpoints: expected a folder, found a symbolic link; move the checkpoints here, or choose another run.dir"
    for use in (
        lambda: loop.main(changed(saved, train={"steps": 6})),
        lambda: loop.main(changed(saved), resume="must"),
        lambda: write_file(ExportRequest(str(folder), str(tmp_path / "out.safetensors")), print),
        lambda: loop.main(changed(saved, run={"dir": str(tmp_path / "new")}, warm_start={"file": str(folder)})),
    ):
        with pytest.raises(InputError, match=message):
            use()
    assert contents(outside) == before


@pytest.mark.parametrize("link", [False, True], ids=["folder", "link"])
def test_numbered_folders_of_other_programs_stay(saved, outside, link):
    before = contents(outside)
    folder = Path(saved["run"]["dir"])
    folder.mkdir()
    if link:
        (outside / "9" / "checkpoint.json").unlink()
        before = contents(outside)
        (folder / "checkpoints").symlink_to(outside)
    else:
        shutil.copytree(outside, folder / "checkpoints")
    with pytest.raises(InputError, match="symbolic link" if link else "found another run in"):
        loop.main(changed(saved), resume="never")
    if not link:
        (folder / "checkpoints" / "9" / "checkpoint.json").unlink()
        with pytest.raises(InputError, match=r"1: .* it holds 'photo.jpg', which jpipe has not written; move it away"):
            loop.main(changed(saved))
        assert (folder / "checkpoints" / "1" / "photo.jpg").read_text() == "mine"
    assert contents(outside) == before


def test_old_folders_that_hold_something_else_are_kept(tmp_path):
    for step in (1, 2, 3):
        jpipe.checkpoints.writing.write_layers(tmp_path, step, {}, 0)
        jpipe.checkpoints.writing.complete(tmp_path, step, 1, {})
    (tmp_path / "checkpoints" / "1" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / "2" / "default" / "photo.jpg").write_text("mine")
    jpipe.checkpoints.prune(tmp_path, keep=1)
    assert jpipe.checkpoints.steps(tmp_path) == [1, 2, 3]
    with pytest.raises(InputError, match=r"2: it is in the way .* it holds 'default/photo.jpg', which jpipe has not written"):
        jpipe.checkpoints.folders.begin(tmp_path, 1)
    (tmp_path / "checkpoints" / "2" / "default" / "photo.jpg").unlink()
    jpipe.checkpoints.prune(tmp_path, keep=1)
    assert jpipe.checkpoints.steps(tmp_path) == [1, 3]


@pytest.mark.parametrize("linked", ["checkpoints", "checkpoints/2.orbax-checkpoint-tmp"])
def test_layers_are_not_written_through_a_link(linked, outside, tmp_path):
    before = contents(outside)
    (tmp_path / "run" / linked).parent.mkdir(parents=True)
    (tmp_path / "run" / linked).symlink_to(outside)
    with pytest.raises(OSError, match="it is a symbolic link, which jpipe does not follow there"):
        jpipe.checkpoints.writing.write_layers(tmp_path / "run", 2, {}, 0)
    assert contents(outside) == before


def test_a_planted_link_in_an_unfinished_checkpoint_is_not_followed(outside, tmp_path):
    before = contents(outside)
    jpipe.checkpoints.writing.write_layers(tmp_path, 2, {}, 0)
    (unfinished_folder(tmp_path, 2) / "complete").symlink_to(outside)
    with pytest.raises(OSError, match="it is a symbolic link, which jpipe does not follow there"):
        jpipe.checkpoints.writing.complete(tmp_path, 2, 1, {})
    (tmp_path / "checkpoints" / "2").symlink_to(outside)
    (unfinished_folder(tmp_path, 2) / "complete").unlink()
    jpipe.checkpoints.writing.complete(tmp_path, 2, 1, {})
    assert jpipe.checkpoints.steps(tmp_path) == [2]
    assert contents(outside) == before


@pytest.mark.parametrize("name", ["3", "3/default"])
def test_linked_checkpoints_and_items_are_not_read(name, tmp_path):
    for step in (1, 3):
        jpipe.checkpoints.writing.write_layers(tmp_path, step, {}, 0)
        jpipe.checkpoints.writing.complete(tmp_path, step, 1, {})
    linked = tmp_path / "checkpoints" / name
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    messages: list[str] = []
    newest = jpipe.checkpoints.newest(tmp_path, lambda damaged: messages.append(str(damaged)))
    assert newest is not None
    assert newest.step == 1
    assert messages == [f"{linked}: is a symbolic link, not a folder that jpipe has written; restore another checkpoint"]
    for read in (jpipe.checkpoints.Checkpoint.read, jpipe.checkpoints.Checkpoint.specs):
        with pytest.raises(InputError, match="is a symbolic link"):
            read(jpipe.checkpoints.Checkpoint(tmp_path, 3))


@pytest.mark.parametrize("name", ["process-0.log", "process-x", ".notes.unfinished", "metrics.jsonl.bak"])
def test_names_that_only_look_like_those_of_a_checkpoint_are_kept(name, tmp_path):
    file = unfinished_folder(tmp_path, 9) / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(InputError, match=f"it holds '{name}', which jpipe has not written; move it away"):
        jpipe.checkpoints.folders.begin(tmp_path, 3)
    jpipe.checkpoints.writing.write_layers(tmp_path, 9, {}, 0)
    discard(tmp_path, 9)
    assert file.read_text() == "mine"


def test_a_file_in_place_of_an_old_checkpoint_is_not_removed(tmp_path):
    for step in (1, 2, 3):
        jpipe.checkpoints.writing.write_layers(tmp_path, step, {}, 0)
        jpipe.checkpoints.writing.complete(tmp_path, step, 1, {})
    (tmp_path / "checkpoints" / "0").write_text("mine")
    jpipe.checkpoints.prune(tmp_path, keep=1)
    assert jpipe.checkpoints.steps(tmp_path) == [3]
    assert (tmp_path / "checkpoints" / "0").read_text() == "mine"


def test_event_files_for_tensorboard_follow_no_planted_link(outside, tmp_path, monkeypatch):
    before = contents(outside)
    monkeypatch.setattr(time, "time_ns", lambda: 7)
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.7").symlink_to(outside / ".bashrc")
    (tmp_path / "linked").symlink_to(outside)
    messages: list[str] = []
    for folder in ("tensorboard", "linked"):
        with TensorBoard(tmp_path / folder, messages.append) as tensorboard:
            tensorboard.write(0, {"loss": 1.0})
    assert contents(outside) == before
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert [line.partition("': ")[2].partition(",")[0] for line in messages] == ["it is a symbolic link"]


def test_a_folder_with_something_that_a_run_would_overwrite_is_refused(saved):
    config, folder = changed(saved), Path(saved["run"]["dir"])
    plan = make_plan(config.plan, ("embed", "block_0", "head"))
    folder.mkdir()
    for name in OUTPUTS:
        (folder / name).write_text("mine")
        with pytest.raises(InputError, match=f"run.dir: expected a new or empty folder, found '{name}' in "):
            RunFolder(settings_of(config), plan)
        assert contents(folder) == {name: b"mine"}
        (folder / name).unlink()


def test_a_run_is_written_where_its_path_leads_and_resumes_there(saved, tmp_path, monkeypatch, capsys):
    """The path has `..`, a linked parent, a space, letters outside ASCII and a slash at the end."""
    for folder in ("here", "real place/deep"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "here" / "läufe").symlink_to(tmp_path / "real place" / "deep")
    monkeypatch.chdir(tmp_path / "here")
    run_dir = "../here/läufe/../日本 run/"
    summary = loop.main(changed(saved, run={"dir": run_dir}))
    assert summary.folder == tmp_path / "real place" / "日本 run"
    assert jpipe.checkpoints.steps(summary.folder) == [4]
    assert f"the run is in {summary.folder}" in capsys.readouterr().out.replace("\n", "")
    resumed = find(run_dir, "must", Team(None), print)
    assert (resumed.step, resumed.folder) == (4, summary.folder)
    write_file(ExportRequest(run_dir, "../out put.safetensors"), print)
    assert (tmp_path / "out put.safetensors").exists()


def test_a_name_that_is_not_utf8_is_refused_before_anything_is_created(saved, tmp_path, monkeypatch):
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    monkeypatch.chdir(folder)
    for run_dir in (None, "run"):
        with pytest.raises(InputError, match=r"run.dir: expected a path in UTF-8"):
            loop.main(changed(saved, run={"dir": run_dir}))
    assert os.listdir(folder) == []


def test_text_files_whose_names_are_not_utf8_are_read(tmp_path):
    (tmp_path / "text").mkdir()
    for name in (b"\xff.txt", b"b.txt"):
        with open(os.fsencode(tmp_path / "text") + b"/" + name, "wb") as file:
            file.write(b"hello " * 100)
    assert read_bytes(str(tmp_path / "text"), 0.2).train.size == 600
