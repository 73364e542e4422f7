"""The list of runs: their states, and folders that are damaged or a stranger's."""

import fcntl
import json
import os

import pytest

import jpipe
from jpipe import InputError
from jpipe_train.cli import main
from jpipe_train.runs import listing, reading
from tests.train.runs.folders import rows_of, write_run

PIPEDREAM = jpipe.Plan.even("abcd", num_stages=2, schedule="pipedream_flush", microbatches=2, replicas=2)
EPOCHS = {"train": {"epochs": 2, "batch_size": 4}}
PLAN_WORDS = "pipedream_flush,", "2", "stages", "×", "2", "replicas"


def listed(folder, as_json=False, now=None) -> list[str]:
    lines: list[str] = []
    listing.main(str(folder), as_json, lines.append, *([] if now is None else [lambda: now]))
    return lines


def losses(steps: int) -> list[dict]:
    """Return the rows of a run without validations."""
    return [{"step": step, "loss": 5.0} for step in range(steps)]


@pytest.mark.parametrize(
    ("rows", "saved", "state", "why"),
    [
        (rows_of(4), (), "complete", "the row of the last step has the final validation"),
        (rows_of(4), (2, 4), "complete", "the checkpoint of its last step is saved"),
        (losses(4), (2, 4), "complete", "the checkpoint of its last step is saved"),
        (losses(2), (2,), "stopped", "everything up to step 2 is saved, where it resumes"),
        (rows_of(4), (2,), "unfinished", "it failed or was killed after 4 steps, and resumes at step 2"),
        (rows_of(4)[:2], (2,), "stopped", "everything up to step 2 is saved, where it resumes"),
        (rows_of(4)[:3], (2,), "unfinished", "it failed or was killed after 3 steps, and resumes at step 2"),
        ([], (), "unfinished", "it failed or was killed after 0 steps, and has no checkpoint"),
    ],
)
def test_the_state_is_read_from_rows_and_checkpoints(tmp_path, rows, saved, state, why):
    assert reading.read(write_run(tmp_path / "run", rows, saved, checkpoint={"every": 2}), whole=True).state == (state, why)


def test_a_run_that_a_signal_stopped_is_known_by_its_mark(tmp_path):
    path = write_run(tmp_path / "run", rows_of(4)[:3], (2,), end=(2, 9, None, "Ctrl-C"), **EPOCHS | {"checkpoint": {"every": 2}})
    run = reading.read(path, whole=False)
    assert (run.state, run.steps) == (("stopped", "Ctrl-C made it save step 2, where it resumes"), 9)
    (path / "checkpoints" / "2" / "checkpoint.json").unlink()
    assert reading.read(path, whole=False).state.name == "unfinished"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"format": "jpipe-length/1", "steps": 9}', "2/9"),
        ('{"format": "jpipe-length/1", "steps": 2}', "2/2"),
        ('{"format": "jpipe-length/1", "steps": -9}', "2/?"),
        ('{"format": "jpipe-length/1", "steps": "9"}', "2/?"),
        ('{"format": "other", "steps": 9}', "2/?"),
        ("[]", "2/?"),
        ("{", "2/?"),
    ],
)
def test_epochs_are_counted_in_steps_by_a_file_of_the_run(tmp_path, text, shown):
    path = write_run(tmp_path / "run", rows_of(4)[:2], (2,), **EPOCHS)
    (path / "length.json").write_text(text)
    assert f" {shown} " in listed(path)[1]
    assert reading.read(path, whole=False).state.name == ("complete" if shown == "2/2" else "stopped")


@pytest.mark.parametrize(
    ("rows", "saved", "end", "sections", "state", "steps"),
    [
        (rows_of(4), (4,), (4, 4, None), EPOCHS, ("complete", "end.json says that it has done all steps"), "4/4"),
        (rows_of(2), (2,), (2, 20, "at step 2: why"), {"train": {"steps": 20}}, ("stopped early", "at step 2: why"), "2/20"),
        (
            rows_of(2),
            (2,),
            None,
            {"train": {"steps": 20, "stop": {"patience": 1}}},
            ("stopped", "everything up to step 2 is saved"),
            "2/20",
        ),
        (
            rows_of(4)[:3],
            (2,),
            (4, 4, None),
            EPOCHS | {"checkpoint": {"every": 2}},
            ("unfinished", "it failed or was killed after 3 steps, and"),
            "3/?",
        ),
        (rows_of(4), (4,), (4, 4, 7), EPOCHS, ("stopped", "everything up to step 4 is saved"), "4/?"),
        (rows_of(4), (4,), (4, -1, None), EPOCHS, ("stopped", "everything up to step 4 is saved"), "4/?"),
    ],
)
def test_a_run_that_has_come_to_its_end_is_known_by_its_mark(tmp_path, rows, saved, end, sections, state, steps):
    path = write_run(tmp_path / "run", rows, saved, end=end, **sections)
    found = reading.read(path, whole=False).state
    assert (found.name, found.why.startswith(state[1])) == (state[0], True)
    assert f" {steps} " in listed(path)[1]
    with open(path / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert reading.read(path, whole=False).state.name == "running"


def test_a_run_whose_folder_is_locked_is_running(tmp_path):
    path = write_run(tmp_path / "run", rows_of(4)[:2], (2,))
    with open(path / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert reading.read(path, whole=False).state == ("running", "a process holds the lock of the folder")
    assert reading.read(path, whole=False).state.name == "stopped"


def test_runs_are_listed_by_number_and_other_folders_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("10", "9"):
        os.utime(write_run(tmp_path / "runs" / name, rows_of(4), runs=PIPEDREAM) / "metrics.jsonl", (1000, 1000))
    (tmp_path / "runs" / "empty").mkdir()
    (write_run(tmp_path / "runs" / "text", []) / "plan.json").write_text("no plan")
    (tmp_path / "runs" / "grid").mkdir()
    (tmp_path / "runs" / "grid" / "sweep.json").touch()
    (tmp_path / "runs" / "a file").touch()
    (tmp_path / "runs" / ".hidden").mkdir()
    head, *lines = listed("runs", now=1000 + 7200)
    assert head.split() == ["name", "state", "step", "loss", "val_loss", "plan", "time", "age"]
    assert [line.split() for line in lines[:2]] == [
        [name, "complete", "4/4", "4.25", "4.5", *PLAN_WORDS, "0:04", "2", "h"] for name in ("9", "10")
    ]
    assert lines[2] == "'runs/empty' is not a run folder: it has no config.yaml"
    assert lines[3] == "'runs/grid' is a sweep; jpipe runs runs/grid lists its runs"
    assert lines[4].startswith("'runs/text/plan.json': ")
    assert len(lines) == 5


def test_names_of_strangers_do_not_control_the_terminal(tmp_path):
    write_run(tmp_path / "a\x1b[2J\nb", rows_of(4))
    (tmp_path / "c\x1b[2J").mkdir()
    lines = listed(tmp_path)
    assert all(line.isprintable() for line in lines)
    assert r"a\x1b[2J\nb  complete" in lines[1]
    assert r"c\x1b[2J' is not a run folder" in lines[2]
    assert all(line.isprintable() for line in listed(tmp_path, as_json=True))


def test_lines_that_are_no_rows_are_left_out_and_counted(tmp_path):
    path = write_run(tmp_path / "run", [])
    good = '{"step": 0, "loss": 3.0, "note": "text", "flag": true}', '{"step": 2, "loss": 2.0}'
    bad = "{", "[" * 10**5, '{"step": -1}', '{"step": 1.5}', '{"step": 0, "loss": 1.0}', '{"step": ' + "9" * 5000 + "}", "\xff", "null"
    infinite = '{"step": 3, "loss": NaN, "val_loss": 1e999}'
    unfinished = '{"step": 4, "loss": 1.0'
    (path / "metrics.jsonl").write_bytes("\n".join([good[0], *bad, good[1], infinite, unfinished]).encode("latin-1"))
    run = reading.read(path, whole=True)
    assert (run.rows, run.damaged) == ([{"step": 0, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 3}], len(bad))
    assert listed(tmp_path)[-1].endswith("8 lines of metrics.jsonl cannot be read and were left out")


def test_of_a_long_run_only_the_last_rows_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_TAIL", 100)
    run = reading.read(write_run(tmp_path / "run", [{"step": step, "loss": 1.0} for step in range(50)]), whole=False)
    assert run.done == 50
    assert 1 < len(run.rows) < 5
    assert run.damaged == 0


def test_the_last_validation_is_found_further_back(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_TAIL", 100)
    rows = [{"step": step, "loss": 1.0} | ({"val_loss": 3.0 - step / 20} if step in (10, 20) else {}) for step in range(50)]
    path = write_run(tmp_path / "run", rows)
    run = reading.read(path, whole=False)
    assert (run.last("val_loss"), run.done, len(run.rows) < 6) == (2.0, 50, True)
    monkeypatch.setattr(reading, "_FAR", 500)
    assert reading.read(path, whole=False).last("val_loss") is None


def test_a_row_with_huge_numbers_does_not_widen_the_tables(tmp_path, capsys):
    rows = [*rows_of(4)[:3], {"step": 3, "loss": 1e90, "val_loss": 10**99, "seconds": 1e290, "more": 1}]
    paths = [str(write_run(tmp_path / name, rows)) for name in "ab"]
    assert max(map(len, listed(tmp_path))) < 120
    assert reading.read(tmp_path / "a", whole=True).last("seconds") == 3.0
    assert main(["compare", *paths, "--out", str(tmp_path / "c.html")]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines()[:-1])) < 120


def test_of_very_many_rows_the_lowest_losses_and_the_validations_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_MOST_IN_MEMORY", 64)
    rows = [{"step": step, "loss": 1.0 if step == 333 else 2.0} | ({"val_loss": 3.0} if step == 401 else {}) for step in range(1000)]
    run = reading.read(write_run(tmp_path / "run", rows), whole=True)
    assert len(run.rows) <= 65
    assert (run.done, run.rows[0]["step"], run.last("val_loss"), min(row["loss"] for row in run.rows)) == (1000, 0, 3.0, 1.0)
    many = [{"step": step, "loss": 2.0, "val_loss": 2.0, "more": 1} for step in range(1000)]
    run = reading.read(write_run(tmp_path / "many", many), whole=True)
    assert (len(run.rows) <= 65, run.done, set(run.rows[0])) == (True, 1000, {"step", "loss", "val_loss"})


def test_a_pipe_or_a_folder_in_place_of_a_file_holds_up_nothing(tmp_path):
    for name in ("config.yaml", "plan.json", "metrics.jsonl"):
        path = write_run(tmp_path / f"no {name}", rows_of(4))
        (path / name).unlink()
        os.mkfifo(path / name)
    (write_run(tmp_path / "folder", []) / "metrics.jsonl").unlink()
    (tmp_path / "folder" / "metrics.jsonl").mkdir()
    assert sum("cannot be read" in line for line in listed(tmp_path)) == 4


def test_each_folder_is_a_line_of_json(tmp_path, capsys):
    write_run(tmp_path / "1", rows_of(4))
    (tmp_path / "2").mkdir()
    assert main(["runs", str(tmp_path), "--json"]) == 0
    run, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert (run["name"], run["state"], run["step"], run["steps"], run["loss"]) == ("1", "complete", 4, 4, 4.25)
    assert other["problem"].endswith("is not a run folder: it has no config.yaml")


def test_one_run_and_a_folder_without_runs_are_listed(tmp_path):
    assert listed(write_run(tmp_path / "one", rows_of(4)))[1].split()[:2] == ["one", "complete"]
    (tmp_path / "none").mkdir()
    assert listed(tmp_path / "none") == [f"no runs in '{tmp_path / 'none'}'"]
    with pytest.raises(InputError, match=r"runs: cannot list '.*missing': No such file or directory; give a folder that contains"):
        listed(tmp_path / "missing")


@pytest.mark.parametrize(
    ("seconds", "words"), [(-3, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (2e5, "2 d")]
)
def test_an_age_is_in_the_largest_unit_of_which_there_are_two(seconds, words):
    assert listing.age(seconds) == words


def test_a_plan_with_uneven_replicas_names_those_of_each_stage():
    uneven = jpipe.Plan.even("abcd", num_stages=2, schedule="pipedream_flush", microbatches=2, replicas=[2, 1])
    assert reading.plan_words(uneven) == "pipedream_flush, 2 stages, replicas 2, 1"
    assert reading.plan_words(jpipe.Plan.even("abcd", 2, "gpipe", 2, slices=3)) == "gpipe, 3 slices, 2 stages"
