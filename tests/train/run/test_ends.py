"""A run that lost something, or may be retried, exits with a message and code 1; code 2 is for mistakes of the user."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

import jpipe
import jpipe.checkpoints.writing
from jpipe import InputError
from jpipe.checkpoints.records import File, marker_text
from jpipe_lm.data import documents
from jpipe_train.checkpoint import checkpoints
from jpipe_train.checkpoint.run_folder import RunFolder
from jpipe_train.console.exit_codes import code_of
from jpipe_train.console.options import ALONE
from jpipe_train.data import data
from jpipe_train.launch.team import ReportedElsewhere
from jpipe_train.report.metrics_log import RunStopped
from jpipe_train.run import job, loop
from jpipe_train.run.requests import TrainRequest
from jpipe_train.run.settings import settings_of
from tests.train.conftest import SENTENCE, changed, tiny_of
from tests.train.run.test_loop import rows_of


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Skip the report, which takes longer than the run."""
    monkeypatch.setattr(loop, "write_report", lambda *_: None)


@pytest.fixture
def saved(tiny):
    """Return a config that writes checkpoints."""
    return tiny | {"checkpoint": {"every": 2}, "train": tiny["train"] | {"steps": 7, "eval_every": 9}, "log": []}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train six steps, and return the folder of the run and that of its data."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_bytes(SENTENCE * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "write_report", lambda *_: None)
        return loop.main(changed(six_steps(folder))).folder, folder


@pytest.fixture
def resumed(trained, tmp_path):
    """Return a copy of the run of six steps, as a config and its folder."""
    shutil.copytree(trained[0], tmp_path / "run")
    return six_steps(trained[1]) | {"run": {"dir": str(tmp_path / "run")}}, tmp_path / "run"


def six_steps(folder: Path) -> dict:
    saved = tiny_of(folder / "text.txt", folder / "run")
    return saved | {"checkpoint": {"every": 2}, "train": saved["train"] | {"steps": 6, "eval_every": 9}, "log": []}


def before(monkeypatch, step, action):
    """Do something before the run feeds a batch, once all checkpoints begun are written."""
    real = checkpoints.Checkpoints.schedule_snapshot

    def schedule_snapshot(self, at):
        if at == step:
            self.finish()
            action()
        real(self, at)

    monkeypatch.setattr(checkpoints.Checkpoints, "schedule_snapshot", schedule_snapshot)


def test_a_run_whose_losses_never_arrive_fails(saved, monkeypatch):
    step, drain = jpipe.Pipeline.step, jpipe.Pipeline.drain
    nothing = jpipe.Metrics.empty()
    monkeypatch.setattr(jpipe.Pipeline, "step", lambda *args, **options: (step(*args, **options)[0], nothing))
    monkeypatch.setattr(jpipe.Pipeline, "drain", lambda *args, **options: (drain(*args, **options)[0], nothing))
    with pytest.raises(RunStopped, match="the run ended without a loss for steps 0 to 6"):
        loop.main(changed(saved))


@pytest.mark.parametrize("cause", ["disk", "nobody knows"])
def test_a_run_without_its_last_checkpoint_fails(cause, saved, monkeypatch):
    write = jpipe.checkpoints.writing.write_layers

    def full(folder, step, layers, process):
        if step == 7:
            raise OSError(28, "No space left on device")
        return write(folder, step, layers, process)

    if cause == "disk":
        monkeypatch.setattr(jpipe.checkpoints.writing, "write_layers", full)
    else:
        schedule_snapshot = checkpoints.Checkpoints.schedule_snapshot
        monkeypatch.setattr(
            checkpoints.Checkpoints, "schedule_snapshot", lambda self, step: None if step == 6 else schedule_snapshot(self, step)
        )
    config = changed(saved, checkpoint={"on_full_disk": "train"})
    with pytest.raises(RunStopped, match="the checkpoint of step 7 could not be written; the last complete checkpoint is of step 6"):
        loop.main(config)
    monkeypatch.undo()
    assert loop.main(config).steps == 7, "it goes on from step 6"
    assert loop.main(config).steps == 7, "nothing is left to do, which is no failure"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param("removed", r"metrics\.jsonl' was moved or removed while the run was training", marks=pytest.mark.exhaustive),
        ("cut", r"metrics\.jsonl' was changed: expected [\d,]+ bytes, found 10, while the run was training"),
        pytest.param("replaced", r"metrics\.jsonl' was replaced by another file while", marks=pytest.mark.exhaustive),
        ("edited", r"the rows in '.*metrics\.jsonl' were changed while"),
        ("folder moved", r"/run' was moved or removed while"),
        pytest.param("folder copied", r"metrics\.jsonl' was replaced by another file while", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("policy", ["stop", pytest.param("train", marks=pytest.mark.exhaustive)])
def test_lost_rows_end_the_run(damage, message, policy, saved, tmp_path, monkeypatch):
    folder, elsewhere = Path(saved["run"]["dir"]), tmp_path / "elsewhere"
    rows = folder / "metrics.jsonl"

    def harm():
        match damage:
            case "removed":
                rows.unlink()
            case "cut":
                os.truncate(rows, 10)
            case "replaced":
                content = rows.read_bytes()
                rows.rename(elsewhere)
                rows.write_bytes(content)
            case "edited":
                rows.write_bytes(rows.read_bytes().replace(b"loss", b"lost", 1))
            case "folder moved":
                folder.rename(elsewhere)
            case "folder copied":
                folder.rename(elsewhere)
                shutil.copytree(elsewhere, folder)

    before(monkeypatch, 5, harm)
    with pytest.raises(RunStopped, match=message) as stopped:
        loop.main(changed(saved, checkpoint={"on_full_disk": policy}))
    if damage == "folder moved":
        assert not folder.exists(), "it is not made again"
        assert "no checkpoint is left there" in str(stopped.value)
        elsewhere.rename(folder)
    else:
        assert str(stopped.value).endswith("its newest checkpoint is of step 4; the run resumes from it")
    assert jpipe.checkpoints.steps(folder) == [2, 4]
    monkeypatch.undo()
    assert [row["step"] for row in rows_of(loop.main(changed(saved)).folder)] == list(range(7))


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("metrics.jsonl", r"was moved or removed while the run was training; its newest checkpoint is of step 7; the run resumes from it$"),
        ("checkpoints/7", r"the checkpoint of step 7 is not in the run folder any more; the last complete checkpoint is of step 6$"),
    ],
)
def test_losses_missing_at_the_end_are_noticed(lost, message, saved, monkeypatch):
    finish = checkpoints.Checkpoints.finish

    def then_moved(self):
        finish(self)
        if 7 in self.written:
            (Path(saved["run"]["dir"]) / lost).rename(Path(saved["run"]["dir"]) / "elsewhere")

    monkeypatch.setattr(checkpoints.Checkpoints, "finish", then_moved)
    with pytest.raises(RunStopped, match=message):
        loop.main(changed(saved))


def test_a_network_error_while_a_checkpoint_is_written_is_not_bad_input(saved, monkeypatch):
    real = Path.is_symlink

    def stale(self):
        if armed and self.name == "checkpoints":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))
        return real(self)

    armed: list = []
    monkeypatch.setattr(Path, "is_symlink", stale)
    before(monkeypatch, 3, lambda: armed.append(True))
    with pytest.raises(RunStopped, match=r"a checkpoint could not be written: .*Stale file handle"):
        loop.main(changed(saved))


def sealed(place: Path) -> None:
    """Make the hashes of a checkpoint fit what is left of it, as versions of jpipe have done that listed the files afterwards."""
    part, marker = (json.loads((place / name).read_text()) for name in ("process-0.json", "checkpoint.json"))
    part["files"] = {name: facts for name, facts in part["files"].items() if (place / name).exists()}
    index = {name: File(**facts) for name, facts in marker["index"].items() if (place / name).exists()}
    (place / "process-0.json").write_text(json.dumps(part))
    digest = hashlib.sha256((place / "process-0.json").read_bytes()).hexdigest()
    text = marker_text(marker["step"], {"process-0.json": digest}, marker["rows"], marker["facts"], index)
    (place / "checkpoint.json").write_text(text)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # TensorStore reports requests that are still running
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("lost", ["index", "arrays", "facts"])
def test_a_checkpoint_that_cannot_be_restored_is_skipped_with_a_message(lost, resumed, monkeypatch, capsys):
    config, folder = resumed
    place = folder / "checkpoints" / "6"
    losses = [row["loss"] for row in rows_of(folder)]
    if lost == "facts":
        marker = json.loads((place / "checkpoint.json").read_text())
        marker["facts"]["devices"] = "many"
        index = {name: File(**facts) for name, facts in marker["index"].items()}
        (place / "checkpoint.json").write_text(marker_text(6, marker["items"], marker["rows"], marker["facts"], index))
    else:
        sizes = {file: file.stat().st_size for file in (place / "default").rglob("d/*")}
        max((file for file in sizes if ("ocdbt.process_0" in str(file)) == (lost == "arrays")), key=sizes.__getitem__).unlink()
        sealed(place)
    if lost == "arrays":  # so that only who reads the arrays finds it out
        specs, before = jpipe.checkpoints.Checkpoint.specs, jpipe.checkpoints.Checkpoint(folder, 4)
        monkeypatch.setattr(jpipe.checkpoints.Checkpoint, "specs", lambda self: specs(before))
    assert loop.main(changed(config, train={"steps": 7})).steps == 7
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if line.startswith("checkpoint: ")]
    assert str(place.relative_to(folder)) in line or "step 6: facts: devices" in line
    assert line.endswith("; the previous checkpoint is tried")
    assert any(line.startswith("resumes at step 4") for line in lines)
    assert f"checkpoints of later steps are kept as 6.old in '{folder / 'checkpoints'}'" in lines
    assert jpipe.checkpoints.steps(folder) == [4, 6, 7]
    assert (folder / "checkpoints" / "6.old" / "checkpoint.json").exists(), "the damaged one is not removed"
    assert [row["loss"] for row in rows_of(folder)][:6] == losses


def test_a_run_resumes_from_the_named_checkpoint(resumed, capsys):
    config, folder = resumed
    whole = rows_of(folder)
    with pytest.raises(InputError, match=rf"--from-checkpoint: expected one of 2, 4, 6, the checkpoints in '{folder}', found 5"):
        loop.main(changed(config), from_checkpoint=5)
    with pytest.raises(InputError, match="--from-checkpoint has no effect with --resume never"):
        loop.main(changed(config), from_checkpoint=4, resume="never")
    with pytest.raises(InputError, match=r"--from-checkpoint: expected a run\.dir to resume in, found none"):
        loop.main(changed(config, run={"dir": None}), from_checkpoint=4)
    assert loop.main(changed(config), from_checkpoint=4).steps == 6
    assert "resumes at step 4" in capsys.readouterr().out
    assert rows_of(folder) == whole
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"2", "4", "6", "6.old"}


@pytest.mark.slow
def test_a_run_resumed_with_another_batch_size_reads_each_row_once(saved, monkeypatch, capsys):
    read, windows = documents.Documents.read, set()

    def noted(self, start, stop):
        if self.size == 3600:  # of the text to learn from
            windows.add(start)
        return read(self, start, stop)

    monkeypatch.setattr(documents.Documents, "read", noted)
    for steps, size in ((2, 8), (6, 4)):  # in microbatches of one size
        train = {"steps": steps, "batch_size": size, "eval_batches": 1}
        loop.main(changed(saved, train=train, plan={"microbatches": size // 2}))
    starts = windows.copy()
    windows.clear()
    inputs, _ = data.load(changed(saved, train={"batch_size": 32}, plan={"microbatches": 1})).train[0]
    inputs[:32]  # the first 32 rows, in one batch
    assert starts == windows
    assert len(starts) == 32
    output = capsys.readouterr().out
    assert "the training data continue at row 16" in output
    facts = jpipe.checkpoints.Checkpoint(Path(saved["run"]["dir"]), 6).facts["data"]
    assert facts["batch_size"] == 4
    assert facts["position"] == {"batch": 6, "rows": [32], "pieces": 8}
    assert facts["order"] == {"batch": 2, "rows": [16], "pieces": 8}


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
def test_data_that_cannot_be_read_in_mid_run_end_it_with_code_1(number, saved, monkeypatch, capsys):
    read = documents.Documents.read

    def fails(self, start, stop):
        if armed:
            try:
                raise OSError(number, os.strerror(number), "data.bin")
            except OSError as error:
                raise InputError(f"data.path: cannot read 'data.bin': {error.strerror}; give files that can be read") from None
        return read(self, start, stop)

    armed: list = []
    monkeypatch.setattr(documents.Documents, "read", fails)
    before(monkeypatch, 3, lambda: armed.append(True))
    with pytest.raises(RunStopped, match=rf"data\.path: cannot read 'data\.bin': {os.strerror(number)}"):
        loop.main(changed(saved))


def raised(number: int, kind: type[OSError] = OSError) -> InputError:
    try:
        try:
            raise kind(number, os.strerror(number))
        except OSError as error:
            raise InputError(f"data.path: cannot read: {error.strerror}") from None
    except InputError as error:
        return error


def test_the_exit_code_tells_whether_a_retry_may_help():
    passing = {"EIO", "ESTALE", "ETIMEDOUT", "ENOSPC", "EDQUOT", "ENOTCONN", "ECONNRESET", "EMFILE", "EAGAIN", "EBUSY", "EADDRINUSE"}
    lasting = {"ENOENT", "EACCES", "EPERM", "ENOTDIR", "EISDIR", "ELOOP", "ENAMETOOLONG", "EINVAL", "EROFS", "EEXIST", "EFBIG"}
    assert {name for name in passing | lasting if code_of(raised(getattr(errno, name))) == 1} == passing
    assert code_of(InputError("a mistake")) == 2
    assert ReportedElsewhere(1, "process 0", raised(errno.EIO)).code == 1
    assert ReportedElsewhere(1, "process 0", InputError("a mistake")).code == 2


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 1), (errno.ESTALE, 1), (errno.ENOENT, 2), (errno.EACCES, 2)])
def test_a_disk_error_at_the_start_exits_with_the_code_for_a_retry(number, code, saved, tmp_path, monkeypatch, capsys):
    config, text = tmp_path / "config.yaml", Path(saved["data"]["path"])
    config.write_text(json.dumps(saved))
    opened = os.open

    def fails(path, *arguments, **options):
        if str(path) == str(text):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", fails)
    assert job.train(TrainRequest(str(config)), ALONE) == code
    assert capsys.readouterr().err == f"jpipe: data.path: cannot read '{text}': {os.strerror(number)}; give files that can be read\n"
    assert not Path(saved["run"]["dir"]).exists()


def test_a_folder_in_use_by_another_run_exits_with_the_code_for_a_retry(saved):
    plan, settings = jpipe.Plan.even(("embed", "block_0", "head"), 2, "gpipe", 2), settings_of(changed(saved))
    with RunFolder(settings, plan), pytest.raises(InputError, match=r"run\.dir: another process is training in") as refused:
        RunFolder(settings, plan, resumes=True)
    assert code_of(refused.value) == 1
