"""`jpipe launch` in a process of its own, mostly with small programs in place of `jpipe train`."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults.runs import difference, end_of
from jpipe import InputError, Plan
from jpipe_train.checkpoint.run_folder import RunFolder, of_same_job
from jpipe_train.cli import main
from jpipe_train.config.config import Config
from jpipe_train.launch.local import child, launch
from jpipe_train.launch.local.launch_request import Request
from jpipe_train.launch.local.process_group import ProcessGroup
from jpipe_train.run import loop
from jpipe_train.run.settings import settings_of
from tests.train.conftest import changed

ROOT = Path(__file__).parents[3]
LIMIT = 60  # seconds, for what should take one

LAUNCH = """
import sys
from jpipe_train.launch.local import launch
from jpipe_train.launch.local.launch_request import Request
number, restarts, pause, grace, script, *more = sys.argv[1:]
request = Request(tuple(more), int(number), pin="--pin" in more, max_restarts=int(restarts))
code = launch.main(request, program=(sys.executable, "-c", script), pause=float(pause), grace=float(grace))
assert "jax" not in sys.modules, "to start processes JAX is not needed"
sys.exit(code)
"""

READY = """
import os, signal, subprocess, sys, time
me = int(sys.argv[-1])
def ready(): print("ready", os.getpid(), flush=True)
"""


@contextlib.contextmanager
def launched(
    number: int, script: str, *more: str, restarts: int = 0, pause: float = 0.0, grace: float = 30.0
) -> Iterator[subprocess.Popen]:
    """Start the launcher of `number` processes of `script`, and kill it on exit."""
    command = [sys.executable, "-c", LAUNCH, *map(str, (number, restarts, pause, grace)), READY + script, *more]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()  # on Linux they go with it; none of these scripts lives for long anywhere


def pids(process: subprocess.Popen, number: int) -> list[int]:
    """Return the ids of all processes once all are ready."""
    lines = [process.stdout.readline() for _ in range(number)]
    return [int(re.fullmatch(r"(?:\[\d+\] )?ready (\d+)\n", line)[1]) for line in lines]


def wait_for_exit(numbers: list[int]) -> None:
    """Wait until the processes are gone, which includes one whose parent has not asked for its exit code."""
    left, deadline = numbers, time.monotonic() + LIMIT
    while left := [number for number in left if is_alive(number)]:
        assert time.monotonic() < deadline, f"{left} live on"
        time.sleep(0.01)


def is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
        stat = Path(f"/proc/{number}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_every_process_has_its_number_and_the_same_coordinator():
    with launched(3, "print(*sys.argv[1:])", "train", "a config") as process:
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (0, "")
    lines = sorted(out.splitlines())
    (port,) = set(re.findall(r"127\.0\.0\.1:(\d+)", out))
    flags = f"train a config --coordinator 127.0.0.1:{port} --num-processes 3 --process-id"
    assert lines == [f"[1] {flags} 1", f"[2] {flags} 2", f"{flags} 0"]
    assert 1 <= int(port) <= 65535


def test_lines_stay_whole_and_say_where_they_come_from():
    script = """
for i in range(20):
    for piece in ("a", "b" * 1000, "c\\n"):
        os.write(1, piece.encode())
        os.write(2, piece.encode())
os.write(1, b"no end")
"""
    with launched(3, script) as process:
        out, err = process.communicate(timeout=LIMIT)
    expected = [f"{prefix}a{'b' * 1000}c" for prefix in ("", "[1] ", "[2] ")] * 20
    assert sorted(err.splitlines()) == sorted(expected)
    assert sorted(out.splitlines()) == sorted([*expected, "no end", "[1] no end", "[2] no end"])


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("sys.exit(3)", 3, "process 1 ended with exit code 3; ending the other processes"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "process 1 was ended by SIGKILL; ending the other processes"),
    ],
)
def test_the_first_failure_ends_all_and_is_named(end, code, message, tmp_path):
    script = f"""
if me == 2: signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready()
while me == 1:
    if os.path.exists(sys.argv[1]): {end}
    time.sleep(0.01)
time.sleep({LIMIT})
"""
    with launched(3, script, str(tmp_path / "now"), grace=0.3) as process:
        numbers = pids(process, 3)
        (tmp_path / "now").touch()
        _, err = process.communicate(timeout=LIMIT)
        wait_for_exit(numbers)
    assert (process.returncode, err) == (code, f"jpipe: {message}\n")


BEGUN = """
from jpipe_train.launch.local import reported_progress as progress
if me == 0: progress.begin("runs/a b", {resumed}, saves={saves})
"""
AGAIN = "the same command with --set run.dir='runs/a b'"
SAVED = f"the checkpoint of step {{}} is written, and {AGAIN} resumes there"


@pytest.mark.parametrize(
    ("resumed", "saves", "end", "code", "words"),
    [
        ("None", True, "progress.report(40, 90); sys.exit(1)", 1, SAVED.format(40)),
        ("30", True, "os.kill(os.getpid(), signal.SIGKILL)", 137, f"{SAVED.format(30)}; see dmesg whether memory ran out"),
        ("30", True, "progress.report(40, 90); sys.exit(1)", 1, SAVED.format(40)),
        ("None", True, "sys.exit(1)", 1, f"there is no checkpoint, so {AGAIN} begins anew"),
        ("None", False, "sys.exit(1)", 1, "the run writes no checkpoints to resume from (checkpoint.every)"),
        ("30", True, "sys.exit(2)", 2, None),  # bad input
    ],
)
def test_after_a_failure_it_says_what_is_saved_and_how_to_go_on(resumed, saves, end, code, words):
    with launched(1, BEGUN.format(resumed=resumed, saves=saves) + end) as process:
        _, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err.splitlines()[1:]) == (code, [] if words is None else [f"jpipe: {words}"])


def test_a_signal_leaves_the_last_word_to_the_run():
    script = f"signal.signal(signal.SIGINT, lambda *_: sys.exit(130)); ready(); time.sleep({LIMIT})"
    with launched(1, BEGUN.format(resumed=None, saves=True) + script) as process:
        pids(process, 1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT / 2)
    assert (process.returncode, err) == (130, "")


def test_the_launcher_does_not_wait_for_a_detached_process():
    script = 'subprocess.Popen(["yes"], start_new_session=True)'  # ends when nobody reads what it prints
    with launched(1, script, grace=0.2) as process:
        out, err = process.communicate(timeout=LIMIT / 2)
    assert (process.returncode, err, set(out.splitlines())) == (0, "", {"y"})


def test_all_succeed_or_it_is_no_success():
    with launched(2, "sys.exit(5 if me else 0)") as process:
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 5
    assert "process 1 ended with exit code 5" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_whole_tree(number):
    script = f"""
signal.signal(signal.SIGINT, signal.SIG_DFL)
child = subprocess.Popen(["sleep", "{LIMIT}"])
print("ready", child.pid, flush=True)
ready()
time.sleep({LIMIT})
"""
    with launched(2, script) as process:
        numbers = pids(process, 4)
        process.send_signal(number)
        _, err = process.communicate(timeout=LIMIT / 2)
        wait_for_exit(numbers)
    assert (process.returncode, err) == (128 + number, "")


def test_a_second_signal_waits_for_nobody():
    deaf = f"signal.signal(signal.SIGINT, lambda *_: print('heard', flush=True)); ready(); time.sleep({LIMIT}); time.sleep({LIMIT})"
    with launched(2, deaf, grace=1000) as process:
        numbers = pids(process, 2)
        process.send_signal(signal.SIGINT)
        assert {process.stdout.readline(), process.stdout.readline()} == {"heard\n", "[1] heard\n"}
        assert all(map(is_alive, numbers))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT / 2)
        wait_for_exit(numbers)
    assert process.returncode == 130


ATTEMPT = """
count = len(os.listdir(sys.argv[1]))  # of the attempts before
port = sys.argv[sys.argv.index("--coordinator") + 1]
secret = os.environ["JPIPE_SECRET"]
assert len(secret) == 64 and secret not in " ".join(sys.argv)
print(port, os.environ["JPIPE_JOB"], secret, flush=True)
"""


def test_a_failed_job_is_started_again_as_often_as_allowed(tmp_path):
    script = f"""
{ATTEMPT}
if me == 0: signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()
open(sys.argv[1] + f"/{{count}}", "x").close()
if count == 0: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(7 + count)
"""
    with launched(2, script, str(tmp_path), restarts=2, grace=0.1) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert err.splitlines() == [
        "jpipe: process 1 was ended by SIGKILL; ending the other processes; starting all again in 0 s (1 of 2)",
        "jpipe: process 1 ended with exit code 8; ending the other processes; starting all again in 0 s (2 of 2)",
        "jpipe: process 1 ended with exit code 9; ending the other processes; --max-restarts 2 is used up",
    ]
    assert process.returncode == 9
    of_0 = [line.split() for line in out.splitlines() if not line.startswith("[1] ")]
    of_1 = [line.removeprefix("[1] ").split() for line in out.splitlines() if line.startswith("[1] ")]
    assert of_0 == of_1, "each attempt is one of both processes"
    ports, jobs, keys = zip(*of_0, strict=True)
    assert len(set(ports)) == 3, "each attempt has a port of its own"
    assert len(set(jobs)) == 1, "all are attempts of one job"
    assert len(set(keys)) == 1, "the processes of a job have one secret"


@pytest.mark.parametrize(("last", "message"), [(0, ""), (2, "jpipe: process 0 ended with exit code 2\n")])
def test_processes_that_succeeded_or_would_fail_again_are_not_restarted(last, message, tmp_path):
    script = f"""
{ATTEMPT}
open(sys.argv[1] + f"/{{count}}", "x").close()
sys.exit({last} if count else 1)
"""
    with launched(1, script, str(tmp_path), restarts=5) as process:
        _, err = process.communicate(timeout=LIMIT)
    assert err == f"jpipe: process 0 ended with exit code 1; starting all again in 0 s (1 of 5)\n{message}"
    assert (process.returncode, len(list(tmp_path.iterdir()))) == (last, 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_processes_ended_by_a_signal_are_not_restarted(number):
    with launched(2, f"signal.signal(signal.SIGINT, signal.SIG_DFL); ready(); time.sleep({LIMIT})", restarts=5) as process:
        numbers = pids(process, 2)
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT / 2)
        wait_for_exit(numbers)
    assert (process.returncode, out, err) == (128 + number, "", f"jpipe: {number.name} received; the processes are not restarted\n")


def test_a_signal_ends_the_wait_before_the_next_attempt():
    with launched(1, "sys.exit(1)", restarts=5, pause=1000) as process:
        assert "starting all again in 60 s (1 of 5)" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT / 2)
    assert (process.returncode, err) == (130, "jpipe: SIGINT received; the processes are not restarted\n")


def test_each_wait_is_twice_as_long_and_a_minute_at_most(monkeypatch):
    waits, messages = [], []
    monkeypatch.setattr(launch.Job, "is_stopped_within", lambda job, seconds: bool(waits.append(seconds)))
    monkeypatch.setattr(ProcessGroup, "start", lambda *arguments: None)
    monkeypatch.setattr(ProcessGroup, "watch", lambda tree, signals, again, stop: messages.append(again) or 1)
    assert launch.main(Request((), 1, max_restarts=4)) == 1
    assert waits == [1, 2, 4, 8]
    assert messages[2:] == ["starting all again in 4 s (3 of 4)", "starting all again in 8 s (4 of 4)", "--max-restarts 4 is used up"]
    waits.clear()
    assert launch.main(Request((), 1, max_restarts=4), pause=20.0) == 1
    assert waits == [20, 40, 60, 60]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process when its parent is killed")
def test_no_process_outlives_a_launcher_that_is_killed():
    deaf = f"[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; ready(); time.sleep({LIMIT})"
    with launched(2, deaf) as process:
        numbers = pids(process, 2)
        process.kill()
        process.wait(LIMIT)
        wait_for_exit(numbers)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process when its parent is killed")
def test_a_command_ends_with_the_process_that_started_it():
    parent = "import subprocess, sys; from jpipe_train.launch.local.child import command; "
    parent += "subprocess.run(command([sys.executable, *sys.argv[1:]]))"
    deaf = f"import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep({LIMIT})"
    with subprocess.Popen([sys.executable, "-c", parent, "-c", deaf], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        number = int(process.stdout.readline())
        process.kill()
        process.wait(LIMIT)
        wait_for_exit([number])
    words = [sys.executable, "-m", child.__name__, "1", sys.executable, "-c", "print(1)"]  # as if the parent had been killed before
    late = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (late.returncode, late.stdout, late.stderr) == (1, "", "")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot bind a process to a core")
def test_pinned_processes_have_one_core_by_turns():
    cores = sorted(os.sched_getaffinity(0))
    script = "print(me, os.sched_getaffinity(0), os.environ['XLA_FLAGS'], os.environ['JAX_LOCAL_DEVICE_IDS'])"
    with launched(3, script, "--pin") as process:
        out, _ = process.communicate(timeout=LIMIT)
    lines = sorted(line.removeprefix("[1] ").removeprefix("[2] ") for line in out.splitlines())
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    assert lines == [f"{i} {{{cores[i % len(cores)]}}} {flags} {i}" for i in range(3)]


@pytest.mark.parametrize("shared", [False, True])
def test_processes_that_share_a_gpu_are_hosts_of_their_own_for_nccl(shared, monkeypatch):
    for name in "JAX_LOCAL_DEVICE_IDS", "NCCL_HOSTID":
        monkeypatch.delenv(name, raising=False)
    if shared:
        monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0")
    with launched(2, "print(os.environ['JAX_LOCAL_DEVICE_IDS'], os.environ.get('NCCL_HOSTID'))") as process:
        out, _ = process.communicate(timeout=LIMIT)
    assert sorted(out.splitlines()) == (["0 slot-0", "[1] 0 slot-1"] if shared else ["0 None", "[1] 1 None"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-n 0 -- train x", "launch -n: expected 1 to 256 processes, found 0"),
        ("-n -1 -- train x", "launch -n: expected 1 to 256 processes, found -1"),
        ("-n 100000 -- train x", "launch -n: expected 1 to 256 processes, found 100000"),
        ("-n 2 --max-restarts -1 -- train x", "launch --max-restarts: expected 0 or more, found -1; 0 means no restart"),
        ("-n 2", "launch: expected a command after --, found none; such as jpipe launch -n 2 -- train CONFIG"),
        ("-n 2 --", "launch: expected a command after --, found none; such as jpipe launch -n 2 -- train CONFIG"),
        (
            "-n 2 -- rm x",
            "launch: expected `train CONFIG …` after --, found 'rm'; only train, plan, evaluate, generate and doctor run in several "
            "processes",
        ),
        (
            "-n 2 -- train x --process_id=1",
            "launch: --process-id after -- has no effect, because launch sets it for each process; leave it out",
        ),
    ],
)
def test_an_impossible_launch_is_refused_in_one_line(arguments, message, capsys):
    assert main(["launch", *arguments.split()]) == 2
    assert capsys.readouterr().err == f"jpipe: {message}\n"


@pytest.mark.exhaustive
def test_a_bad_config_is_refused_by_the_processes(tmp_path):
    command = [sys.executable, "-m", "jpipe_train.cli", "launch", "-n", "2", "--", "train", "missing.yaml"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    refusal = "jpipe: missing.yaml: cannot read the config: No such file or directory; give a YAML file such as configs/gpt-bytes.yaml"
    assert {line.removeprefix("[1] ") for line in lines if "ended with exit code 2" not in line} == {refusal}
    assert len(lines) >= 2


def test_the_next_attempt_of_a_job_reuses_its_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan, numbered = Plan.even("ab", num_stages=2, schedule="gpipe", microbatches=2), changed(tiny, run={"dir": None})
    assert of_same_job(numbered) == numbered, "a run by itself takes the next number"
    for job in "one", "two":
        monkeypatch.setenv(launch.JOB, job)
        assert of_same_job(numbered) == numbered, "a first attempt as well"
        with RunFolder(settings_of(numbered), plan) as folder:
            folder.log({"step": 0})
    monkeypatch.setenv(launch.JOB, "one")
    next_attempt = of_same_job(numbered)
    assert next_attempt == changed(tiny, run={"dir": "runs/0001"})
    with RunFolder(settings_of(next_attempt), plan) as folder:
        assert folder.rows() == []
        folder.log({"step": 1})
    assert of_same_job(next_attempt) == next_attempt
    with pytest.raises(InputError, match="found another run in 'runs/0002'"):
        RunFolder(settings_of(changed(tiny, run={"dir": "runs/0002"})), plan)
    monkeypatch.delenv(launch.JOB)
    Path("runs/0001/.job").write_text("")
    with pytest.raises(InputError, match="found another run in 'runs/0001'"):
        RunFolder(settings_of(next_attempt), plan)
    assert [json.loads(path.read_text()) for path in sorted(Path("runs").glob("*/metrics.jsonl"))] == [{"step": 1}, {"step": 0}]


PARTS = """
import os, pathlib, signal, time
import jax, jax.numpy as jnp, numpy as np
import jpipe
from flax import nnx

dead, saved = pathlib.Path("dead"), pathlib.Path("runs/0001/checkpoints/2/checkpoint.json")


def model():
    return jpipe.LayerStack({"a": lambda rngs: nnx.Linear(2, 2, rngs=rngs), "b": jnp.tanh})


class Batches(list):
    def __getitem__(self, t):
        if t == 5 and jax.process_index() == 1 and not dead.exists():
            dead.touch()
            while not saved.exists():  # once it is, the run has something to go on from
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(t)


def batches(seed, batch_size):
    ones = np.ones((batch_size, 2), np.float32)
    return Batches([(ones, ones)] * 6), Batches([(ones, ones)])


def squares(outputs, labels):
    return ((outputs - labels) ** 2).sum(), labels.size
"""


@pytest.fixture(scope="module")
def restarted(tmp_path_factory) -> types.SimpleNamespace:
    """Launch a run that loses a process, and return its folder, config and command, and what it printed."""
    folder = tmp_path_factory.mktemp("restarted")
    (folder / "parts.py").write_text(PARTS)
    config = {
        **{section: {"target": f"parts:{name}"} for section, name in (("model", "model"), ("data", "batches"), ("loss", "squares"))},
        "train": {"steps": 6, "batch_size": 4, "eval_every": 10, "trace_batches": 0},
        "optimizer": {"name": "sgd", "arguments": {"momentum": 0.9}},
        "checkpoint": {"every": 2},
        "plan": {"num_stages": 2, "microbatches": 2},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    arguments = ["launch", "-n", "2", "--max-restarts", "1", "--", "train", "config.yaml", "--allow-code"]
    command = [sys.executable, "-m", "jpipe_train.cli", *arguments]
    return types.SimpleNamespace(folder=folder, config=config, command=command, done=run(command, folder))


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    environment, limit = os.environ | {"PYTHONPATH": str(ROOT)}, float(os.environ.get("JPIPE_CHECK_LIMIT", 3 * LIMIT))
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{error}\n{error.stdout}\n{error.stderr}")


@pytest.mark.slow
def test_a_run_that_loses_a_process_ends_with_the_results_of_an_undisturbed_run(restarted, monkeypatch):
    done, folder = restarted.done, restarted.folder
    assert done.returncode == 0, done.stderr
    assert (
        "jpipe: process 1 was ended by SIGKILL; ending the other processes; starting all again in 1 s (1 of 1)" in done.stderr.splitlines()
    )
    assert [path.name for path in (folder / "runs").iterdir()] == ["0001"]
    assert re.search(r"^resumes at step [24]$", done.stdout, re.MULTILINE)
    monkeypatch.chdir(folder)
    try:
        alone = loop.main(Config.model_validate(restarted.config | {"run": {"dir": "alone"}})).folder
    finally:
        sys.modules.pop("parts", None)
    resumed = end_of(folder / "runs" / "0001")
    assert [row["step"] for row in resumed.rows] == [0, 1, 2, 3, 4, 5]
    assert difference(resumed, end_of(alone)) is None


@pytest.mark.slow
def test_slices_of_rows_go_from_process_to_process(tiny, tmp_path, monkeypatch):
    plan = {"schedule": "pipedream_flush", "num_stages": 2, "microbatches": 2, "slices": [5, 3]}
    config = tiny | {"plan": plan, "train": tiny["train"] | {"trace_batches": 0}}
    (tmp_path / "config.yaml").write_text(json.dumps(config | {"run": {"dir": "several"}}))
    done = run([sys.executable, "-m", "jpipe_train.cli", "launch", "-n", "2", "--", "train", "config.yaml"], tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    folders = "several", loop.main(changed(config)).folder
    several, alone = ([json.loads(row)["loss"] for row in Path(folder, "metrics.jsonl").read_text().splitlines()] for folder in folders)
    assert several == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
def test_bad_input_of_one_process_is_not_started_again(restarted, tmp_path):
    """Only process 0 has a layer that is another one now."""
    folder = shutil.copytree(restarted.folder, tmp_path / "copy")
    shutil.rmtree(folder / "runs" / "0001" / "checkpoints" / "6")
    (folder / "parts.py").write_text(PARTS.replace("Linear(2, 2,", "Linear(2, 2, use_bias=False,"))
    done = run([*restarted.command, "--set", "run.dir=runs/0001"], folder)
    assert done.returncode == 2, done.stderr
    assert "layer 'a', parameters: 'bias' is not in the model" in done.stderr
    assert "starting all again" not in done.stderr
