"""Runs that stop and resume have the same losses and weights as undisturbed ones, or report why they cannot."""

import fcntl
import json
import os
import stat
from pathlib import Path

import jax
import pytest
import yaml
from safetensors.numpy import load_file

import jpipe
import jpipe.checkpoints.writing
from jpipe import InputError
from jpipe_train import cli
from jpipe_train.checkpoint import checkpoints
from jpipe_train.checkpoint.resume import Facts, Resumed
from jpipe_train.checkpoint.run_folder import RunFolder, write_atomically
from jpipe_train.config.config import Config
from jpipe_train.config.config_file import record, to_yaml
from jpipe_train.launch.local.launch import JOB
from jpipe_train.launch.numeric_settings import numeric_settings
from jpipe_train.launch.team import Team
from jpipe_train.report.metrics_log import RunStopped
from jpipe_train.run import loop
from jpipe_train.run.settings import settings_of
from jpipe_train.run.starting import check_shared
from tests.jpipe.running import check_equal
from tests.train.checkpoint.written import FACTS
from tests.train.run.test_loop import changed, rows_of


class Killed(Exception):
    """An error in place of a kill, which ends the run between two steps."""


def stop_before(monkeypatch, step):
    """Let the next run end before it feeds this batch, once all checkpoints begun are written."""
    real = checkpoints.Checkpoints.schedule_snapshot

    def schedule_snapshot(self, at):
        if at == step:
            self.finish()
            raise Killed
        real(self, at)

    monkeypatch.setattr(checkpoints.Checkpoints, "schedule_snapshot", schedule_snapshot)


def run_in_two(config, monkeypatch, step, **later):
    """Stop before a step, and go on."""
    with monkeypatch.context() as patched:
        stop_before(patched, step)
        with pytest.raises(Killed):
            loop.main(changed(config))
    return loop.main(changed(config, **later))


def weights_of(folder: Path):
    """Return the layers of a run's last checkpoint."""
    return jpipe.checkpoints.Checkpoint(folder, jpipe.checkpoints.steps(folder)[-1]).read()


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Skip the report, which takes longer than the run."""
    monkeypatch.setattr(loop, "write_report", lambda *_: None)


@pytest.fixture
def saved(tiny):
    """Return a config that writes checkpoints."""
    return tiny | {"checkpoint": {"every": 2}, "train": tiny["train"] | {"steps": 7, "eval_every": 2}}


def without(row, names):
    """Return a row of metrics without these."""
    return {name: value for name, value in row.items() if name not in names}


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(
    "plan",
    [
        {"schedule": "pipedream_2bw", "num_stages": 2},
        pytest.param({"schedule": "pipedream_2bw", "num_stages": 2, "slices": [5, 3]}, marks=pytest.mark.slow),
        pytest.param({"schedule": "gpipe", "num_stages": 2}, marks=pytest.mark.slow),
        pytest.param({"schedule": "pipedream", "num_stages": 3, "vertical_sync": True, "microbatches": 1}, marks=pytest.mark.slow),
        {"schedule": "pipedream", "num_stages": 2, "replicas": [2, 1]},
        pytest.param(  # the checkpoint is between the begin of an agreement and its application
            {"schedule": "pipedream_flush", "num_stages": 2, "replicas": 2, "agree": {"every": 4, "delay": 2}}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda plan: plan["schedule"],
)
def test_a_run_that_was_stopped_resumes_with_equal_results(plan, saved, tmp_path, monkeypatch):
    config = saved | {"plan": plan, "model": saved["model"] | {"dropout": 0.3}, "eval": {"metrics": {"accuracy": "accuracy"}}}
    config["plan"].setdefault("microbatches", 2)
    whole = loop.main(changed(config, run={"dir": str(tmp_path / "whole")}))
    parts = run_in_two(config, monkeypatch, 6)
    # PipeDream's first stage makes its updates some steps later if it was not stopped, so its two newest versions are others then.
    left_out = {"version_distance"} if plan["schedule"] == "pipedream" else set()
    rows, expected = ([without(row, left_out) for row in rows_of(folder)] for folder in (parts.folder, whole.folder))
    assert rows == expected
    assert (parts.val_loss_before, parts.val_loss_after) == (whole.val_loss_before, whole.val_loss_after)
    check_equal(weights_of(parts.folder), weights_of(whole.folder))
    assert jpipe.checkpoints.steps(parts.folder) == [4, 6, 7]  # the last three


def test_bottlenecks_stay_where_they_are_and_are_exported(saved, monkeypatch, tmp_path, capsys):
    def plan(stages, **bottleneck):
        return {"schedule": "gpipe", "num_stages": stages, "microbatches": 2, "links": {"bottleneck": {"width": 2, **bottleneck}}}

    kept = r"\{width: 2, after: \[embed, block_0\]\} as in the checkpoint of step 4, because .*, found \{width: 2, after: \[block_0\]\};"
    config = saved | {"plan": plan(3)}
    with pytest.raises(InputError, match=rf"^plan\.links\.bottleneck: expected {kept} set it as in the checkpoint"):
        run_in_two(config, monkeypatch, 5, plan=plan(2))
    summary = loop.main(changed(config, plan=plan(2, after=["embed", "block_0"])))
    assert jpipe.checkpoints.steps(summary.folder)[-1] == 7
    out = str(tmp_path / "model.safetensors")
    assert cli.main(["export", str(summary.folder), "--out", out]) == 0
    arrays = load_file(out)
    assert arrays["bottleneck.embed.down/kernel"].shape[::-1] == arrays["bottleneck.embed.up/kernel"].shape == (2, 8)
    capsys.readouterr()
    assert cli.main(["export", str(summary.folder), "--layout", "huggingface", "--out", str(tmp_path / "folder")]) == 2
    assert "Hugging Face's layout has no place for the layer 'bottleneck.embed.down' of the run" in capsys.readouterr().err
    assert cli.main(["generate", str(summary.folder), "--prompt", "a"]) == 2
    assert "generate: cannot apply the layer 'bottleneck.embed.down' of the run" in capsys.readouterr().err


@pytest.mark.slow
def test_another_plan_resumes_with_the_same_weights(saved, monkeypatch, capsys):
    summary = run_in_two(saved, monkeypatch, 5, plan={"schedule": "gpipe", "num_stages": 3}, train={"steps": 8})
    assert [row["step"] for row in rows_of(summary.folder)] == list(range(8))
    assert "resumes at step 4, with changed values of plan, train.steps" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_run_resumes_on_another_mesh(saved, tmp_path, monkeypatch, capsys):
    whole = loop.main(changed(saved, run={"dir": str(tmp_path / "whole")}))
    on_mesh = saved | {"plan": saved["plan"] | {"mesh": {"data": 2}, "fsdp": True}}
    parts = run_in_two(on_mesh, monkeypatch, 5, plan={"mesh": [{"model": 2}, {}], "fsdp": False})
    assert "meshes: (data 2, fsdp) in the checkpoint, (model 2), one device now" in capsys.readouterr().out
    losses = [[row["loss"] for row in rows_of(summary.folder)] for summary in (parts, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(saved, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        stop_before(patched, 6)
        with pytest.raises(Killed):
            loop.main(changed(saved))
    folder = Path(saved["run"]["dir"])
    assert jpipe.checkpoints.steps(folder) == [2, 4]
    damaged = max((folder / "checkpoints" / "4").rglob("d/*"), key=lambda file: file.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    summary = loop.main(changed(saved))
    output = " ".join(capsys.readouterr().out.split())
    assert damaged.name in output
    assert "resumes at step 2" in output
    assert [row["step"] for row in rows_of(summary.folder)] == list(range(7))


@pytest.mark.slow
def test_the_user_decides_whether_to_resume(saved, capsys):
    with pytest.raises(InputError, match="--resume must: expected checkpoints in"):
        loop.main(changed(saved), resume="must")
    with pytest.raises(InputError, match=r"--resume must: expected a run\.dir"):
        loop.main(changed(saved, run={"dir": None}), resume="must")
    folder = loop.main(changed(saved, train={"steps": 2})).folder
    with pytest.raises(InputError, match="found another run in"):
        loop.main(changed(saved), resume="never")
    before = rows_of(folder)
    assert loop.main(changed(saved, train={"steps": 2})).val_loss_after is None
    assert "nothing is left to train" in capsys.readouterr().out
    assert rows_of(folder) == before
    assert loop.main(changed(saved, train={"steps": 3}), resume="must").steps == 3
    (folder / "checkpoints" / "3" / "checkpoint.json").write_text("{}")
    (folder / "checkpoints" / "2" / "checkpoint.json").write_text("{}")
    with pytest.raises(InputError, match="none of the checkpoints in"):
        loop.main(changed(saved))


def files_of(folder):
    """Return all files of a run except its pictures and its lock."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "tensorboard" not in path.parts}


@pytest.mark.exhaustive
def test_another_model_is_refused_by_its_first_difference(saved):
    folder = loop.main(changed(saved, train={"steps": 4}, model={"depth": 2})).folder
    newest = folder / "checkpoints" / "4"
    (newest / "checkpoint.json").write_text("damaged")
    before = files_of(folder)
    with pytest.raises(InputError, match=r"layer 'embed', parameters: expected .* as in the model, float32\[.*\], found float32\[.*\]"):
        loop.main(changed(saved, model={"depth": 2, "width": 16}))
    with pytest.raises(InputError, match="the checkpoint of step 2 lacks layer 'block_2'"):
        loop.main(changed(saved, model={"depth": 3}))
    with pytest.raises(InputError, match="the model lacks layer 'block_1' of the checkpoint of step 2"):
        loop.main(changed(saved, model={"depth": 1}))
    assert files_of(folder) == before  # nothing was lost by that


@pytest.mark.slow
def test_another_optimizer_is_refused_unless_its_state_may_be_fresh(saved):
    loop.main(changed(saved, train={"steps": 2}))
    with pytest.raises(InputError, match=r"layer .embed., optimizer state: .*; is it of another optimizer or .*resume.optimizer: reset\)"):
        loop.main(changed(saved, optimizer={"name": "sgd"}))
    assert loop.main(changed(saved, optimizer={"name": "sgd"}, resume={"optimizer": "reset"})).steps == 7


@pytest.mark.parametrize("policy", ["stop", "train"])
def test_a_full_disk_ends_the_run_only_if_configured(policy, saved, monkeypatch, capsys):
    real = jpipe.checkpoints.writing.write_layers

    def write(folder, step, layers, process):
        if step == 4:
            raise OSError(28, "No space left on device")
        return real(folder, step, layers, process)

    monkeypatch.setattr(jpipe.checkpoints.writing, "write_layers", write)
    config = changed(saved, checkpoint={"on_full_disk": policy})
    if policy == "stop":
        with pytest.raises(
            RunStopped, match="a checkpoint could not be written: No space left on device; the last complete checkpoint is of step 2"
        ):
            loop.main(config)
    else:
        folder = loop.main(config).folder
        assert "the run continues, the last complete checkpoint is of step 2" in " ".join(capsys.readouterr().out.split())
        assert jpipe.checkpoints.steps(folder) == [2, 6, 7]


class AlmostFull:
    """A file with room for a few more bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, content):
        if self.room == 0:
            raise OSError(28, "No space left on device")
        count = self.file.write(content[: self.room])
        self.room -= count
        return count

    def fileno(self):
        return self.file.fileno()

    def close(self):
        self.file.close()


@pytest.mark.slow
def test_rows_are_written_later_when_the_disk_is_full(saved, monkeypatch, capsys):
    """The disk has room for half of row 3 until row 6; the checkpoint of step 4 is written in between."""
    log = RunFolder.log

    def fuller(self, *rows):
        if rows and rows[0]["step"] == 3:
            self._metrics = AlmostFull(self._metrics, 20)
        if rows and rows[0]["step"] == 6:
            self._metrics.room = 10**6
        log(self, *rows)

    def fills(self, rows):
        go_on(self, rows)
        self._metrics = AlmostFull(self._metrics, 0)

    go_on = RunFolder.go_on
    monkeypatch.setattr(RunFolder, "log", fuller)
    folder = loop.main(changed(saved, checkpoint={"on_full_disk": "train"})).folder
    assert [row["step"] for row in rows_of(folder)] == list(range(7))
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("cannot be written: No space left on device; the run continues, and keeps the rows in memory") == 1
    assert output.count("has all rows again") == 1
    assert [json.loads(line)["step"] for line in jpipe.checkpoints.Checkpoint(folder, 4).rows().splitlines()][:4] == [0, 1, 2, 3]
    monkeypatch.setattr(RunFolder, "log", log)
    monkeypatch.setattr(RunFolder, "go_on", fills)
    with pytest.raises(RunStopped, match=r"metrics\.jsonl' lacks its last rows, because the disk"):
        loop.main(changed(saved, train={"steps": 9}, checkpoint={"on_full_disk": "train"}))
    monkeypatch.setattr(RunFolder, "log", fuller)
    with pytest.raises(RunStopped, match="the run folder cannot be written: No space left on device"):
        loop.main(changed(saved, run={"dir": str(folder.with_name("another"))}))


@pytest.mark.slow
def test_concurrent_writes_of_another_process_are_not_lost(saved, monkeypatch):
    """Another process trains in the folder and exits after this one has looked for the checkpoint."""
    folder = loop.main(changed(saved, train={"steps": 4})).folder

    def another_trains(*arguments):
        monkeypatch.undo()
        loop.main(changed(saved, train={"steps": 6}))
        before.append(files_of(folder))
        return report_resumed(*arguments)

    before: list = []
    report_resumed = loop.report_resumed
    monkeypatch.setattr(loop, "report_resumed", another_trains)
    with pytest.raises(InputError, match=rf"another process has trained in '{folder}' meanwhile; now its last checkpoint is of step 6;"):
        loop.main(changed(saved))
    assert files_of(folder) == before[0]
    assert loop.main(changed(saved)).steps == 7


@pytest.mark.slow
def test_a_checkpoint_completed_while_the_previous_one_is_read_is_not_lost(saved, monkeypatch):
    folder = loop.main(changed(saved, train={"steps": 4})).folder
    marker = folder / "checkpoints" / "4" / "checkpoint.json"
    content = marker.read_bytes()
    marker.unlink()
    newest = jpipe.checkpoints.newest

    def slowly(*arguments):
        found = newest(*arguments)
        marker.write_bytes(content)
        return found

    monkeypatch.setattr(jpipe.checkpoints, "newest", slowly)
    with pytest.raises(InputError, match=rf"another process has trained in '{folder}' meanwhile; now its last checkpoint is of step 4;"):
        loop.main(changed(saved))
    assert jpipe.checkpoints.steps(folder) == [2, 4]


def test_unfinished_checkpoints_are_removed_before_anything_is_written(saved, monkeypatch):
    folder = loop.main(changed(saved, train={"steps": 4})).folder
    unfinished = folder / "checkpoints" / "6"
    unfinished.mkdir()
    go_on, existed = RunFolder.go_on, []
    monkeypatch.setattr(RunFolder, "go_on", lambda self, rows: existed.append(unfinished.exists()) or go_on(self, rows))
    loop.main(changed(saved))
    assert existed == [False]


def test_checkpoints_that_may_not_be_read_are_reported(saved, monkeypatch):
    folder = loop.main(changed(saved, train={"steps": 2})).folder

    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", forbidden)
    with pytest.raises(InputError, match=rf"run\.dir: cannot read '{folder}/checkpoints': Permission denied; make it readable"):
        loop.main(changed(saved))


def test_a_folder_that_not_all_processes_see_is_refused(saved, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    config = Config.model_validate(saved)
    check_shared(settings_of(config), tmp_path, Team(None), limit=0.0)
    with pytest.raises(InputError, match=rf"process 0 does not find '{tmp_path}/none/checkpoints', .*; choose a folder that all"):
        check_shared(settings_of(config), tmp_path / "none", Team(None), limit=0.0)
    check_shared(settings_of(changed(saved, checkpoint={"every": None})), tmp_path / "none", Team(None), limit=0.0)


@pytest.mark.parametrize("damage", ["cut off", "not text", "gone"])
def test_rows_are_restored_from_the_checkpoint_even_if_their_file_was_damaged(damage, saved, monkeypatch):
    with monkeypatch.context() as patched:
        stop_before(patched, 5)
        with pytest.raises(Killed):
            loop.main(changed(saved))
    metrics = Path(saved["run"]["dir"]) / "metrics.jsonl"
    before = rows_of(metrics.parent)[:4]
    match damage:
        case "cut off":
            metrics.write_text(metrics.read_text() + '{"step": 4, "lo')
        case "not text":
            metrics.write_bytes(metrics.read_bytes().replace(b"step", b"st\xffp", 1))
        case "gone":
            metrics.unlink()
    rows = rows_of(loop.main(changed(saved, train={"steps": 5})).folder)
    assert [row["step"] for row in rows] == list(range(5))
    assert rows[:4] == before


def test_a_run_that_ended_before_its_first_checkpoint_starts_from_step_0(saved, monkeypatch, capsys):
    config = saved | {"checkpoint": {"every": 4}, "train": saved["train"] | {"steps": 4}}
    with monkeypatch.context() as patched:
        stop_before(patched, 2)
        with pytest.raises(Killed):
            loop.main(changed(config))
    folder = Path(config["run"]["dir"])
    before = files_of(folder)
    for other, resume in (
        (changed(config, train={"log_every": 2}), "auto"),
        (changed(config), "never"),
        (changed(config, checkpoint={"every": None}), "auto"),
    ):
        with pytest.raises(InputError, match=r"run\.dir: expected a new or empty folder, found another run"):
            loop.main(other, resume=resume)
    with pytest.raises(InputError, match="--resume must"):
        loop.main(changed(config), resume="must")
    assert files_of(folder) == before
    assert [row["step"] for row in rows_of(loop.main(changed(config)).folder)] == list(range(4))
    assert "ended before its first checkpoint, so it starts again" in " ".join(capsys.readouterr().out.split())


def test_without_file_locks_a_new_run_is_still_alone(saved, tmp_path, monkeypatch):
    plan = jpipe.Plan.even(("embed", "block_0", "head"), 2, "gpipe", 2)

    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(Path, "exists", lambda path: path.name == ".lock" or path.is_dir())  # as the other one looked a moment ago
    with RunFolder(settings_of(changed(saved)), plan), pytest.raises(InputError, match="found another run in"):
        RunFolder(settings_of(changed(saved)), plan)


def test_a_file_in_the_place_of_the_checkpoints_leaves_nothing_of_the_run(saved):
    folder = Path(saved["run"]["dir"])
    folder.mkdir(parents=True)
    (folder / "checkpoints").touch()
    with pytest.raises(InputError, match="checkpoints: checkpoints cannot be written there"):
        loop.main(changed(saved))
    assert [path.name for path in folder.iterdir()] == ["checkpoints"]


def test_files_of_other_versions_are_reported(tmp_path):
    versions = {"JAX": "0.1", "jpipe": jpipe.__version__, "a library of later": "1.0"}
    facts = Facts(**FACTS, versions=versions)
    assert Resumed(tmp_path, 3, facts, (3,)).other_versions() == [f"JAX 0.1, now {jax.__version__}"]


def test_changed_settings_that_affect_numbers_are_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    facts = Facts(**FACTS, versions=numeric_settings())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with jax.default_prng_impl("rbg"):
        changes = Resumed(tmp_path, 3, facts, (3,)).other_versions()
    assert changes == ["jax_default_prng_impl threefry2x32, now rbg", "XLA_FLAGS unset, now --xla_cpu_enable_fast_math=true"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace

    def noted(number):
        done.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file")
        sync(number)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("name") or replace(*paths))
    write_atomically(tmp_path / "text", "words")
    assert done == ["file", "name", "folder"]
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_two_runs_do_not_train_in_one_folder(saved):
    folder = loop.main(changed(saved, train={"steps": 2})).folder
    before = files_of(folder)
    with (folder / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=rf"run\.dir: another process is training in '{folder}'; wait for it"):
            loop.main(changed(saved))
    assert files_of(folder) == before


def test_a_restarted_job_with_resume_never_resumes_its_own_run(saved, monkeypatch, capsys):
    monkeypatch.setenv(JOB, "this one")
    with monkeypatch.context() as patched:
        stop_before(patched, 5)
        with pytest.raises(Killed):
            loop.main(changed(saved), resume="never")
    assert loop.main(changed(saved), resume="never").steps == 7
    assert "resumes at step 4" in capsys.readouterr().out
    monkeypatch.setenv(JOB, "another")
    with pytest.raises(InputError, match="found another run in"):
        loop.main(changed(saved), resume="never")


@pytest.mark.slow
def test_a_plan_is_searched_once(saved, monkeypatch):
    plan = jpipe.Plan.even(("embed", "block_0", "head"), 3, "pipedream", 2)
    calls = []
    monkeypatch.setattr(loop, "find_plan", lambda *_: calls.append(1) or plan)
    summary = run_in_two(saved | {"plan": {"file": "auto"}}, monkeypatch, 5)
    assert calls == [1]
    assert json.loads((summary.folder / "plan.json").read_text())["schedule"] == "pipedream"


def test_a_null_that_version_0_4_wrote_is_no_change(tiny, tmp_path):
    config = changed(tiny, plan={"links": {"activations": "int8"}})
    text = to_yaml(config)
    before = yaml.safe_load(text)
    before["plan"]["links"]["rows"] = None
    resumed = Resumed(tmp_path, 3, Facts(**FACTS | {"config": yaml.safe_dump(before)}), (3,))
    assert resumed.changes(record(config)) == []
    assert resumed.changes(record(changed(tiny, plan={"links": {"activations": "fp8"}}))) == ["plan"]
    assert resumed.changes(record(changed(tiny))) == ["plan"]
