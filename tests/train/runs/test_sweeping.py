"""Sweeps: combinations of values, what is trained and what is skipped, failures, and signals."""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from jpipe import InputError
from jpipe_train.cli import main
from jpipe_train.runs import sweeping
from jpipe_train.runs.grid import combinations
from jpipe_train.runs.sweep_request import Request
from tests.train.runs.folders import rows_of, write_run

RATES = "optimizer.learning_rate=1e-3,3e-3"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write a config of 4 steps, and go to its folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"train": {"steps": 4, "batch_size": 4}}))
    return "tiny.yaml"


@pytest.fixture
def trained(monkeypatch):
    """Write complete runs in place of training; the names in the second list fail. Gives both lists."""
    names, failing = [], []

    def train(request, run, signals):
        names.append(run.combination.name)
        if run.combination.name in failing:
            return 1
        sections = run.config.model_dump()
        write_run(run.path, rows_of(4), **{key: sections[key] for key in ("optimizer", "train", "seed", "run")})
        return 0

    monkeypatch.setattr(sweeping, "_train", train)
    return names, failing


@pytest.fixture
def not_compared(monkeypatch):
    """Skip the comparison at the end of a sweep, which takes longer than all else there; two tests have it."""
    monkeypatch.setattr(sweeping.comparing, "compare", lambda *_: None)


def names_of(*grid: str) -> list[str]:
    return [combination.name for combination in combinations(Request("tiny.yaml", grid))]


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        ((RATES,), ["learning_rate=0.001", "learning_rate=0.003"]),
        (("optimizer.learning_rate=0.001,1e-3",), ["learning_rate=0.001"]),
        (("a.x=1,2", "b.y=p,q"), ["x=1,y=p", "x=1,y=q", "x=2,y=p", "x=2,y=q"]),
        (("a.x=1", "b.x=true,null"), ["a.x=1,b.x=true", "a.x=1,b.x=null"]),
        (('loss.chunk="auto",null',), ["chunk=auto", "chunk=null"]),
    ],
)
def test_a_run_is_named_after_its_values(grid, names):
    assert names_of(*grid) == names


def test_values_may_have_commas_and_any_character():
    one, other = combinations(Request("c", ("a.arguments={b: [1, 2], c: 3},'x/../y, z'",)))
    assert (one.values, other.values) == ({"a.arguments": '{"b": [1, 2], "c": 3}'}, {"a.arguments": '"x/../y, z"'})
    for combination in (one, other):
        assert "/" not in combination.name
        assert len(combination.name) <= 140
    assert len(names_of("a.x=" + "y" * 500 + "," + "y" * 501)) == 2


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ((), "sweep: expected at least one --grid KEY=VALUE,VALUE, such as "),
        (("train.steps",), "--grid train.steps: expected KEY=VALUE,VALUE, such as "),
        (("train.steps=1,,2",), "write null for no value"),
        (("train.steps=1", "train.steps=2"), "the key occurs twice; put all its values into one --grid, with commas"),
        (("run.dir=a,b",), "a sweep chooses the folder of each run; remove run.dir, or name the folder of the sweep with --dir"),
        (("a=[1",), "--grid a=[1, line 1, column 5: this YAML cannot be read"),
        (("a=.inf",), "--grid a=.inf: expected values of a config, found .inf"),
        (tuple(f"{key}={','.join(map(str, range(30)))}" for key in "abc"), "found a grid of 27,000; give fewer values"),
    ],
)
def test_a_grid_that_cannot_be_read_is_reported(grid, message):
    with pytest.raises(InputError) as raised:
        names_of(*grid)
    assert message in str(raised.value)


def test_a_sweep_trains_every_run_compares_them_and_skips_them_the_next_time(config, trained, tmp_path, capsys):
    names, _ = trained
    assert main(["sweep", config, "--grid", RATES]) == 0
    assert names == ["learning_rate=0.001", "learning_rate=0.003"]
    assert "learning_rate=0.003" in (tmp_path / "sweeps" / "tiny" / "compare.html").read_text()
    assert main(["sweep", config, "--grid", "optimizer.learning_rate=1e-3,3e-3,1e-2"]) == 0
    assert names[2:] == ["learning_rate=0.01"]
    assert "sweep: 3 runs in sweeps/tiny, 2 complete\nrun 1 of 1: learning_rate=0.01\n" in capsys.readouterr().out


@pytest.mark.usefixtures("not_compared")
def test_runs_that_ended_early_or_have_more_steps_now_are_trained_again(config, trained, tmp_path, monkeypatch):
    names, _ = trained
    assert main(["sweep", config, "--grid", RATES]) == 0
    rows = tmp_path / "sweeps" / "tiny" / "learning_rate=0.003" / "metrics.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    monkeypatch.setattr(sweeping, "_train", lambda request, run, signals: names.append(run.combination.name))
    assert main(["sweep", config, "--grid", RATES]) == 0
    assert names[2:] == ["learning_rate=0.003"]
    for path in (tmp_path / "sweeps" / "tiny").glob("learning_rate=*"):
        (path / "checkpoints" / "4").mkdir(parents=True)
        (path / "checkpoints" / "4" / "checkpoint.json").touch()
    assert main(["sweep", config, "--grid", RATES, "--set", "train.steps=9"]) == 0
    assert names[3:] == ["learning_rate=0.001", "learning_rate=0.003"]


@pytest.mark.usefixtures("not_compared")
def test_a_finished_run_without_a_checkpoint_is_not_trained_anew(config, trained, tmp_path, capsys):
    assert main(["sweep", config, "--grid", RATES]) == 0
    for change in ("train.steps=9", "train.epochs=3"):
        assert main(["sweep", config, "--grid", RATES, "--set", change]) == 2
        assert "learning_rate=0.001' has ended and has no checkpoint to continue from; choose another --dir" in (capsys.readouterr().err)
    assert len(trained[0]) == 2


@pytest.mark.usefixtures("not_compared")
@pytest.mark.parametrize("damaged", ["plan.json", "config.yaml", "metrics.jsonl"])
def test_a_damaged_run_is_an_error_and_is_not_replaced(config, trained, tmp_path, damaged, capsys):
    assert main(["sweep", config, "--grid", RATES]) == 0
    folder = tmp_path / "sweeps" / "tiny" / "learning_rate=0.003"
    (folder.parent / "learning_rate=0.001").rename(tmp_path / "away")
    (folder / damaged).unlink()
    (folder / damaged).mkdir() if damaged == "metrics.jsonl" else (folder / damaged).write_text("{")
    assert main(["sweep", config, "--grid", RATES, "--set", "seed=7"]) == 2
    words = "the run in 'sweeps/tiny/learning_rate=0.003' cannot be read; restore its files, move it away, or choose another --dir: "
    assert words in capsys.readouterr().err
    assert len(trained[0]) == 2


@pytest.mark.usefixtures("not_compared")
@pytest.mark.parametrize("left", [(), ("metrics.jsonl",), ("metrics.jsonl", "config.yaml")])
def test_what_a_start_that_was_killed_has_left_is_trained_again(config, trained, tmp_path, monkeypatch, left):
    folder = tmp_path / "sweeps" / "tiny"
    (folder / "learning_rate=0.001").mkdir(parents=True)
    (folder / "sweep.json").touch()
    for name in left:
        (folder / "learning_rate=0.001" / name).touch()
    monkeypatch.setattr(sweeping, "_train", lambda request, run, signals: trained[0].append(run.combination.name))
    assert main(["sweep", config, "--grid", RATES]) == 0
    assert trained[0] == ["learning_rate=0.001", "learning_rate=0.003"]


@pytest.mark.parametrize("rows", [[], rows_of(4)])
def test_a_run_that_another_process_trains_is_an_error_from_its_start_on(config, trained, tmp_path, rows, capsys):
    path = tmp_path / "sweeps" / "tiny" / "seed=3"
    write_run(path, rows, train={"steps": 4, "batch_size": 4}, seed=3, run={"dir": str(path)})
    (path.parent / "sweep.json").touch()
    with open(path / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["sweep", config, "--grid", "seed=3"]) == 2
    assert "sweep: another process is training in 'sweeps/tiny/seed=3'; wait until it ends, or stop it" in capsys.readouterr().err
    assert trained[0] == []


@pytest.mark.parametrize(
    ("end", "changes", "pending"),
    [
        ((4, 4, None), ("train.epochs=2",), 0),
        ((4, 4, None), ("train.epochs=1.5",), 0),
        ((4, 4, None), ("train.epochs=3",), 1),
        ((4, 4, None), ("train.steps=4",), 0),
        ((4, 9, "at step 4: why"), ("train.epochs=3",), 0),
        (None, ("train.epochs=2",), 1),
    ],
)
def test_runs_of_epochs_and_runs_that_stopped_early_are_complete_by_their_mark(config, trained, tmp_path, end, changes, pending):
    path = tmp_path / "sweeps" / "tiny" / "seed=3"
    write_run(path, rows_of(4), saved=(4,), end=end, train={"epochs": 2, "batch_size": 4}, seed=3, run={"dir": str(path)})
    (path.parent / "sweep.json").touch()
    request = Request(config, ("seed=3",), overrides=changes)
    (combination,) = combinations(request)
    assert sweeping._is_pending(sweeping._run(request, sweeping._folder(request), combination)) == bool(pending)


def test_many_tasks_may_begin_a_sweep_at_once(config, tmp_path):
    """Each claims the folder and begins its run there at once, as the tasks of a job array do."""
    for attempt in range(10):
        request, barrier = Request(config, ("seed=3",), folder=str(tmp_path / f"sweep {attempt}")), threading.Barrier(6)

        def task(number, request=request, barrier=barrier):
            barrier.wait(30)
            sweeping._claim(sweeping._folder(request), request)
            (sweeping._folder(request) / f"run {number}").mkdir()

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(task, range(6)))


def test_a_folder_that_is_being_claimed_is_that_of_a_sweep(config, tmp_path, monkeypatch):
    request = Request(config, ("seed=3",), folder=str(tmp_path / "sweep"))
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / ".jpipe-0123.tmp").touch()
    sweeping._claim(tmp_path / "sweep", request)
    (tmp_path / "sweep" / "run").mkdir()
    mark = tmp_path / "sweep" / "sweep.json"
    before = mark.stat()
    looks = iter([False, True])  # another task writes the mark between two looks
    monkeypatch.setattr(sweeping.Path, "is_file", lambda path: next(looks))
    sweeping._claim(tmp_path / "sweep", request)
    assert mark.stat().st_size == before.st_size


@pytest.mark.usefixtures("not_compared")
def test_a_run_that_fails_does_not_end_the_sweep(config, trained, capsys):
    names, failing = trained
    failing.append("learning_rate=0.001")
    assert main(["sweep", config, "--grid", RATES]) == 1
    assert len(names) == 2
    printed = capsys.readouterr().out
    assert "run learning_rate=0.001 failed with exit code 1; the sweep goes on\n" in printed
    assert printed.endswith("sweep: learning_rate=0.001 failed; the same command tries it again\n")


def test_a_task_trains_one_run_and_compares_nothing(config, trained, tmp_path):
    assert main(["sweep", config, "--grid", RATES, "--task", "1"]) == 0
    assert trained[0] == ["learning_rate=0.003"]
    assert not (tmp_path / "sweeps" / "tiny" / "compare.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "optimizer.learning_rate=1,-1"], "optimizer.learning_rate: expected greater than 0, found -1"),
        (["--grid", "optimizer.rate=1"], "unknown key 'optimizer.rate'"),
        (["--grid", RATES, "--set", "optimizer.learning_rate=1"], "expected each key once"),
        (["--grid", "optimizer.learning_rate=1,-1", "--slurm"], "optimizer.learning_rate: expected greater than 0, found -1"),
        (["--grid", RATES, "--task", "2"], "--task: expected 0 to 1, one of the 2 runs, found 2"),
        (["--grid", RATES, "--slurm", "--task", "0"], "sweep: expected --slurm or --task, found both"),
        (["--grid", RATES, "--dir", "."], "sweep --dir: expected a new or empty folder, or the folder of a sweep, found other files in "),
        (["--grid", "model.target=a:b"], "expected built-in parts only, found functions"),
    ],
)
def test_mistakes_are_reported_before_a_run_begins(config, trained, arguments, message, capsys):
    assert main(["sweep", config, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert trained[0] == []


@pytest.mark.usefixtures("not_compared")
def test_a_run_of_another_config_is_not_taken_for_one_of_the_sweep(config, trained, capsys):
    assert main(["sweep", config, "--grid", RATES]) == 0
    assert main(["sweep", config, "--grid", RATES, "--set", "seed=5"]) == 2
    assert "with other values for seed; choose another --dir, or restore the config" in capsys.readouterr().err


def options_of(words: list[str]) -> list[list[str]]:
    """Return the options of a command line with their values, sorted."""
    pairs = sorted(words[i : i + 2] for i in range(len(words)) if words[i].startswith("--"))
    return [pair[:1] if pair[0] == "--allow-code" else pair for pair in pairs]


def test_the_job_array_has_a_task_for_each_run(config, capsys):
    arguments = ["sweep", config, "--grid", RATES, "--grid", "optimizer.arguments={b2: 0.9},{b2: 0.95}", "--set", "seed=3", "--allow-code"]
    assert main([*arguments, "--slurm"]) == 0
    script = capsys.readouterr().out
    assert "\n#SBATCH --array=0-3\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False).stderr == ""
    *words, task, index = shlex.split(script.splitlines()[-1])
    assert words[:3] == ["jpipe", "sweep", config]
    assert options_of(words) == options_of(arguments)
    assert (task, index) == ("--task", "$SLURM_ARRAY_TASK_ID")


def run_program(code: str, config: str, monkeypatch, signals=()) -> int:
    """Train a run of a sweep with a Python program in place of jpipe."""
    monkeypatch.setattr(sweeping, "JPIPE", (sys.executable, "-c", code))
    request = Request(config, ("seed=3",), overrides=("train.steps=5",))
    (combination,) = combinations(request)
    return sweeping._train(request, sweeping._run(request, sweeping._folder(request), combination), signals)


def test_a_run_gets_the_config_its_values_its_folder_and_its_job(config, monkeypatch, tmp_path):
    code = "import json, os, sys; json.dump([sys.argv[1:], os.environ['JPIPE_JOB']], open('seen', 'w')); sys.exit(7)"
    assert run_program(code, config, monkeypatch) == 7
    words, job = json.loads((tmp_path / "seen").read_text())
    assert words == ["train", config, "--set", "train.steps=5", "--set", "seed=3", "--set", 'run.dir="sweeps/tiny/seed=3"']
    assert job == "sweep seed=3"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process when its parent is killed")
def test_a_run_ends_with_a_sweep_that_is_killed(config, monkeypatch):
    code = "import ctypes, sys; number = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(number)); sys.exit(number.value)"
    assert run_program(code, config, monkeypatch) == signal.SIGKILL  # prctl(PR_GET_PDEATHSIG): the signal at the death of the parent


@pytest.mark.parametrize(
    ("handler", "received", "code"),
    [("lambda *_: sys.exit(9)", [signal.SIGTERM], 9), ("signal.SIG_IGN", [signal.SIGTERM, signal.SIGTERM], 128 + signal.SIGKILL)],
)
def test_the_first_signal_is_passed_on_and_the_second_kills_the_run(config, monkeypatch, tmp_path, handler, received, code):
    signals: list[int] = []

    def press():
        for number in received:
            end = time.monotonic() + 30
            while not (tmp_path / "ready").exists() and time.monotonic() < end:
                time.sleep(0.02)
            signals.append(number)
            time.sleep(0.3)

    thread = threading.Thread(target=press)
    thread.start()
    program = f"import signal, sys, time; signal.signal(signal.SIGTERM, {handler}); open('ready', 'w'); time.sleep(60)"
    assert run_program(program, config, monkeypatch, signals) == code
    thread.join()


def test_a_signal_ends_the_sweep_and_its_line_says_how_to_go_on(config, trained, monkeypatch, capsys):
    monkeypatch.setattr(sweeping, "_train", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert main(["sweep", config, "--grid", RATES]) == 128 + signal.SIGTERM
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "run 1 of 2: learning_rate=0.001",
        "sweep: stopped by SIGTERM; the same command continues with the incomplete runs",
    ]


@pytest.mark.slow
def test_a_real_sweep_trains_resumes_and_compares(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    del tiny["run"]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    arguments = ["sweep", "tiny.yaml", "--grid", "seed=1,2", "--set", "log=[]"]
    assert main([*arguments, "--set", "train.steps=3"]) == 0
    folder = tmp_path / "sweeps" / "tiny" / "seed=2"
    rows = folder / "metrics.jsonl"
    assert json.loads((folder / "end.json").read_text()) == {
        "format": "jpipe-end/1",
        "steps": 3,
        "length": 3,
        "stopped_early": None,
        "stopped_by": None,
    }
    (folder / "end.json").unlink()
    rows.write_text(rows.read_text().splitlines()[0] + "\n")  # as after a failure, without a checkpoint
    assert main([*arguments, "--set", "train.steps=3"]) == 0
    assert len(rows.read_text().splitlines()) == 3
    assert "run 1 of 1: seed=2\n" in capsys.readouterr().out
