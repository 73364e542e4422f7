"""`jpipe launch --elastic`: with small programs in place of `jpipe train`, and runs that lose processes and get them back."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jpipe.checkpoints
from benchmarks.faults.runs import difference, end_of
from jpipe_train.checkpoint.history import RunPart, changes_of_plan
from jpipe_train.cli import main
from jpipe_train.config.config import Config
from jpipe_train.run import loop
from tests.train.conftest import changed
from tests.train.report.test_report import Page

ROOT = Path(__file__).parents[3]
LIMIT = 60  # seconds, for what should take one or two

LAUNCH = """
import json, sys
from jpipe_train.launch.local import elastic
from jpipe_train.launch.local.launch_request import Request
limits, script, *more = sys.argv[1:]
code = elastic.main(Request(tuple(more), **json.loads(limits)), program=(sys.executable, "-c", script), grace=0.5, pause=0.0)
assert "jax" not in sys.modules, "to start processes JAX is not needed"
sys.exit(code)
"""

READY = """
import os, signal, sys, time
from pathlib import Path
from jpipe_train.launch.local import reported_progress
me, count, slot = int(sys.argv[-1]), int(sys.argv[-3]), int(os.environ["JAX_LOCAL_DEVICE_IDS"])
assert sys.argv[-8] == "--elastic"
print("ready", count, slot, flush=True)

def save(step):
    if me == 0:
        reported_progress.report(step, 10)

def save_at_signal(step):
    def handle(number, frame):
        save(step)
        sys.exit(0)
    signal.signal(signal.SIGTERM, handle)

def attempt():  # of this slot, from 0
    file = Path(sys.argv[1]) / str(slot)
    number = len(file.read_text()) if file.exists() else 0
    file.write_text("x" * (number + 1))
    return number

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def die_after_slot_0():
    while not (Path(sys.argv[1]) / "0").exists(): time.sleep(0.01)
    die()

def wait():
    time.sleep(60)
"""


@contextlib.contextmanager
def launched(script: str, *more: str, minimum: int, maximum: int, **limits: float) -> Iterator[subprocess.Popen]:
    """Start the launcher of processes of `script`, and kill it on exit."""
    command = [sys.executable, "-c", LAUNCH, json.dumps(limits | {"elastic": f"{minimum}:{maximum}"}), READY + script, *more]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()  # on Linux they go with it; none of these scripts lives for long anywhere


def outcome(script: str, *more: str, **limits: float) -> tuple[int, list[str], list[str]]:
    """Return the exit code of the launcher, the processes that were started, as "count slot", and the launcher's lines."""
    with launched(script, *more, **limits) as process:
        out, err = process.communicate(timeout=LIMIT)
    return process.returncode, sorted(line.rpartition("ready ")[2] for line in out.splitlines()), err.splitlines()


def test_processes_that_are_lost_for_good_are_left_out():
    script = """
if (count, slot) in ((4, 1), (3, 3)): die()
if count > 2: wait()
save(10)
"""
    code, started, lines = outcome(script, minimum=2, maximum=4, max_failures=1, retry_after=1000)
    assert code == 0
    assert [line for line in started if line.startswith("2 ")] == ["2 0", "2 2"]
    assert lines == [
        "jpipe: process 1 was ended by SIGKILL; ending the other processes",
        "jpipe: slot 1 has failed once without a new checkpoint; it is left out for 1000 s",
        "jpipe: starting 3 of 4 processes, without slot 1",
        "jpipe: process 2 was ended by SIGKILL; ending the other processes",
        "jpipe: slot 3 has failed once without a new checkpoint; it is left out for 1000 s",
        "jpipe: starting 2 of 4 processes, without slots 1, 3",
    ]


def test_a_process_that_returns_takes_part_from_a_checkpoint_on(tmp_path):
    script = """
number = attempt()
if slot == 1 and number == 0: die_after_slot_0()
if count == 1: save_at_signal(6); save(4)
if count == 1 or number == 0: wait()
save(10)
"""
    code, started, lines = outcome(script, str(tmp_path), minimum=1, maximum=2, max_failures=1, retry_after=0.2)
    assert (code, set(started)) == (0, {"1 0", "2 0", "2 1"})
    assert lines[2:] == [
        "jpipe: starting 1 of 2 processes, without slot 1",
        "jpipe: slot 1 can be used again: the run saves, and goes on with 2 of 2 processes",
        "jpipe: starting 2 of 2 processes",
    ]


SHORT = """
number = attempt()
if slot == 1 and number == 0: die_after_slot_0()
if number == 0: wait()
save(10)
"""


def test_too_few_processes_wait_for_another(tmp_path):
    code, _, lines = outcome(SHORT, str(tmp_path), minimum=2, maximum=2, max_failures=1, retry_after=0.3)
    assert code == 0
    assert lines[2:] == [
        "jpipe: 1 of the required 2 processes can be started; waiting 0 s for another one",
        "jpipe: starting 2 of 2 processes",
    ]


def test_too_few_processes_give_up_after_a_limit(tmp_path):
    code, _, lines = outcome(SHORT, str(tmp_path), minimum=2, maximum=2, max_failures=1, retry_after=1000, shortage_limit=5)
    assert code == 137
    limit = "no more within 5 s (--shortage-limit)"
    assert lines[2:] == [f"jpipe: 1 of the required 2 processes can be started, and {limit}; giving up"]


def test_a_process_that_hangs_is_the_one_to_blame(tmp_path):
    script = """
deaf = Path(sys.argv[1]) / "deaf"
if count == 2 and slot == 1: signal.signal(signal.SIGTERM, signal.SIG_IGN); deaf.touch(); wait()
while not deaf.exists(): time.sleep(0.01)
if count == 2: sys.exit(1)
save(10)
"""
    code, started, lines = outcome(script, str(tmp_path), minimum=1, maximum=2, max_failures=1)
    assert (code, started) == (0, ["1 0", "2 0", "2 1"])
    assert lines[0] == "jpipe: process 0 ended with exit code 1; ending the other processes"
    assert lines[1].startswith("jpipe: slot 1 has failed once")


GROUP = """
import contextlib, sys
from jpipe_train.launch.local.process_group import ProcessGroup
with contextlib.closing(ProcessGroup(60.0, {})) as group:
    for number, script in enumerate(sys.argv[1:]):
        group.start([sys.executable, "-c", script], number, None, number)
    print(group.watch([]), group.to_blame)
"""


def test_a_killed_process_is_to_blame_even_if_another_is_seen_to_end_first(tmp_path):
    """A process that is killed closes its connections before it can be seen to have ended.

    The group is in a process of its own: it forks, which no process may in which JAX has threads.
    """
    file, ready = tmp_path / "process 0", tmp_path / "ready"
    first = f"""
import os, pathlib, sys, time
while not pathlib.Path({str(ready)!r}).exists(): time.sleep(0.01)
pathlib.Path({str(file)!r}).write_text(str(os.getpid()))
sys.exit(1)
"""
    second = f"""
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = pathlib.Path({str(file)!r})
pathlib.Path({str(ready)!r}).touch()
while not file.exists() or not file.read_text(): time.sleep(0.01)
try:
    while True: os.kill(int(file.read_text()), 0); time.sleep(0.01)
except ProcessLookupError:  # the launcher has seen its end
    os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", GROUP, first, second]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout) == (0, "1 [1]\n"), done.stderr
    assert "process 0 ended with exit code 1" in done.stderr


def test_failures_are_forgiven_after_a_checkpoint(tmp_path):
    """Of two failures in a row one is allowed; the run gets on between them."""
    script = """
number = attempt()
save(number + 7)
if number < 3: die()
"""
    code, started, lines = outcome(script, str(tmp_path), minimum=1, maximum=1, max_failures=2)
    assert (code, started) == (0, ["1 0"] * 4)
    assert lines[1::2] == ["jpipe: starting 1 of 1 processes"] * 3


@pytest.mark.parametrize(("end", "code", "started"), [("save(5)", 0, 2), ("save(10)", 0, 1), ("pass", 0, 1), ("sys.exit(2)", 2, 1)])
def test_only_a_run_that_is_saved_and_not_complete_goes_on(end, code, started, tmp_path):
    """A scheduler may have asked one of the processes to end; bad input would fail again."""
    script = f"""
if attempt(): save(10); sys.exit(0)
{end}
"""
    found, ready, _ = outcome(script, str(tmp_path), minimum=1, maximum=1)
    assert (found, len(ready)) == (code, started)


@pytest.mark.parametrize(("visible", "expected"), [("", "1"), ("4,GPU-7", "GPU-7")])
def test_the_last_process_uses_the_gpu_of_its_slot(visible, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    script = "if count == 2 and slot == 0: die()\nif count == 2: wait()\nprint('ready', os.environ['CUDA_VISIBLE_DEVICES'])\nsave(10)"
    code, printed, _ = outcome(script, str(tmp_path), minimum=1, maximum=2, max_failures=1)
    assert code == 0
    assert {expected, "1 1"} <= set(printed)


def test_a_signal_to_the_launcher_saves_and_starts_nothing():
    with launched("save_at_signal(5); print('armed', flush=True); wait()", minimum=1, maximum=1) as process:
        assert [process.stdout.readline(), process.stdout.readline()] == ["ready 1 0\n", "armed\n"]
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-- train x", "launch: expected -n N or --elastic MIN:MAX, found neither; such as jpipe launch -n 2 -- train CONFIG"),
        (
            "-n 2 --elastic 1:2 -- train x",
            "launch --elastic: expected neither -n nor --max-restarts beside it, found -n; leave out one of them",
        ),
        (
            "--elastic 1:2 --max-restarts 1 -- train x",
            "launch --elastic: expected neither -n nor --max-restarts beside it, found --max-restarts; leave out one of them",
        ),
        (
            "--elastic 1:2 -- plan x",
            "launch --elastic: expected `train CONFIG …` after --, found 'plan'; the other commands have no checkpoints",
        ),
        (
            "--elastic 1:2 -- train x --elastic 2",
            "launch: --elastic after -- has no effect, because launch sets it for each process; leave it out",
        ),
        *(
            (
                f"--elastic {words} -- train x",
                f"launch --elastic: expected MIN:MAX, the fewest and the most processes, such as 2:4, at most 256, found '{words}'",
            )
            for words in ("4", "0:2", "2:257", "2:x")
        ),
        (
            "--elastic 3:2 -- train x",
            "launch --elastic: expected MIN:MAX, found '3:2', in which MIN is larger than MAX; write 2:3",
        ),
        *(
            (f"-n 2 {option} 4 -- train x", f"launch {option} has no effect without --elastic MIN:MAX; remove the option")
            for option in ("--max-failures", "--retry-after", "--shortage-limit")
        ),
        ("--elastic 1:2 --max-failures 0 -- train x", "launch --max-failures: expected 1 or more, found 0"),
        ("--elastic 1:2 --retry-after nan -- train x", "launch --retry-after: expected seconds, 0 to 1e9, found nan"),
        ("--elastic 1:2 --shortage-limit -1 -- train x", "launch --shortage-limit: expected seconds, 0 to 1e9, found -1"),
    ],
)
def test_an_impossible_elastic_launch_is_an_error_of_one_line(arguments, message, capsys):
    assert main(["launch", *arguments.split()]) == 2
    assert capsys.readouterr().err == f"jpipe: {message}\n"


# A cluster -------------------------------------------------------------------------------------------------------------------

SRUN = """#!/bin/bash
echo "$*" >> attempts
case $(wc -l < attempts) in
    1) echo $'n1\\nn2\\nn4' > nodes; mkdir -p RUN/checkpoints/40; exit 1 ;;
    2) mkdir RUN/checkpoints/60; exit 0 ;;
    *) CODE ;;
esac
"""


@pytest.mark.parametrize(
    ("last", "code", "attempts"),
    [
        ("mkdir RUN/checkpoints/20000", 0, 3),
        ("exit 1", 1, 5),
        ("exit 2", 2, 3),
        ("echo n1 > nodes; mkdir RUN/checkpoints/80; exit 1", 1, 3),
    ],
)
def test_the_slurm_job_goes_on_with_the_nodes_that_are_left(last, code, attempts, tmp_path):
    script = (ROOT / "examples" / "clusters" / "elastic.sh").read_text()
    (tmp_path / "nodes").write_text("n1\nn2\nn3\nn4\n")
    programs = {"srun": SRUN.replace("CODE", last), "sinfo": "#!/bin/bash\ncat nodes\n", "openssl": "#!/bin/bash\necho secret\n"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text.replace("RUN", str(tmp_path / "gpt")))
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-4]", "PAUSE": "0"}
    text = script.replace("/shared/gpt", str(tmp_path / "gpt"))
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout == ("1 of 4 nodes are left\n" if "nodes" in last else "")
    lines = (tmp_path / "attempts").read_text().splitlines()
    words = f"jpipe train config.yaml --elastic 4 --set run.dir={tmp_path / 'gpt'} --set train.steps=20000"
    assert lines[:2] == [
        f"--nodes=4 --ntasks=4 --nodelist=n1,n2,n3,n4 --kill-on-bad-exit=1 {words}",
        f"--nodes=3 --ntasks=3 --nodelist=n1,n2,n4 --kill-on-bad-exit=1 {words}",
    ]
    assert len(lines) == attempts


# Runs ------------------------------------------------------------------------------------------------------------------------

PARTS = """
import os, pathlib, signal, time
import jax, jax.numpy as jnp, numpy as np
import jpipe
from flax import nnx


def model():
    layers = {f"linear {i}": lambda rngs: nnx.Linear(4, 4, rngs=rngs) for i in range(3)}
    return jpipe.LayerStack(layers | {"tanh": jnp.tanh})


class Batches(list):
    def __getitem__(self, t):
        if (deaths := DEATHS.get(jax.process_count())) is not None:
            self.die(t, *deaths)
        if t >= 6 and jax.process_count() == SLOW and "JPIPE_LAUNCHER" in os.environ:
            time.sleep(0.3)
        return super().__getitem__(t)

    def die(self, t, index, step):
        dead = pathlib.Path(f"dead of {jax.process_count()}")
        if t == step and jax.process_index() == index and not dead.exists():
            while not pathlib.Path(f"run/checkpoints/{t - 1}/checkpoint.json").exists():
                time.sleep(0.01)
            dead.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def batches(seed, batch_size):
    rng = np.random.default_rng(seed)
    inputs = [rng.normal(size=(batch_size, 4)).astype(np.float32) for _ in range(40)]
    pairs = [(x, np.roll(x, 1, axis=1)) for x in inputs]
    return Batches(pairs), Batches(pairs[:1])


def squares(outputs, labels):
    return ((outputs - labels) ** 2).sum(), labels.size
"""


def elastic_run(folder: Path, stages: int, steps: int, deaths: dict, slow: int, *options: str) -> tuple[dict, list[RunPart], list[str]]:
    """Launch a run whose processes die, and return its config, its parts and the lines that it printed."""
    parts = f"DEATHS, SLOW = {deaths}, {slow}\n{PARTS}"
    (folder / "parts.py").write_text(parts)
    config = {
        **{section: {"target": f"parts:{name}"} for section, name in (("model", "model"), ("data", "batches"), ("loss", "squares"))},
        "run": {"dir": "run"},
        "train": {"steps": steps, "batch_size": 8, "eval_every": 100, "trace_batches": 0},
        "optimizer": {"name": "sgd", "learning_rate": 0.01, "arguments": {"momentum": 0.9}},
        "checkpoint": {"every": 2},
        "plan": {"num_stages": stages, "microbatches": 4},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    arguments = ["launch", *options, "--max-failures", "1", "--", "train", "config.yaml", "--allow-code"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jpipe_train.cli", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=10 * LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    history = [RunPart(**part) for part in jpipe.checkpoints.Checkpoint(folder / "run", steps).facts["history"]]
    return config, history, [*done.stdout.splitlines(), *done.stderr.splitlines()]


@pytest.mark.slow
def test_a_run_resumes_with_the_plan_for_the_processes_that_are_there(tiny, no_report, capsys):
    """The launcher of a cluster starts the same command with fewer processes."""
    saved = tiny | {"checkpoint": {"every": 2}}
    loop.main(changed(saved, train={"steps": 2}))
    folder = loop.main(changed(saved, train={"steps": 4}), elastic=2).folder
    assert "plan for 1 of 2 processes: num_stages 1 instead of 2\n" in capsys.readouterr().out
    history = [RunPart(**part) for part in jpipe.checkpoints.Checkpoint(folder, 4).facts["history"]]
    assert changes_of_plan(history) == [(2, "1 stage")]
    assert history[1].pause > 0


def check_same_as_by_hand(folder: Path, config: dict, history: list[RunPart], monkeypatch) -> None:
    """Train again, changing the plan by hand at the same steps, in one process, and compare losses and final weights bit for bit."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(loop, "write_report", lambda *_: None)
    try:
        for part in history:
            train, plan = config["train"] | {"steps": part.end}, config["plan"] | {"num_stages": part.devices}
            loop.main(Config.model_validate(config | {"run": {"dir": "by hand"}, "train": train, "plan": plan}))
    finally:
        sys.modules.pop("parts", None)
    found, expected = end_of(folder / "run"), end_of(folder / "by hand")
    losses = [[row["loss"] for row in end.rows] for end in (found, expected)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == config["train"]["steps"]
    assert difference(found._replace(rows=[]), expected._replace(rows=[])) is None


@pytest.mark.slow
@pytest.mark.parametrize("most", [3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_run_that_loses_two_processes_ends_as_one_whose_plan_was_changed_by_hand(most, tmp_path, monkeypatch):
    fewer, fewest = most - 1, most - 2
    deaths = {most: (fewer, 5), fewer: (0, 9)}  # the last of all at step 5, the first of those that are left at step 9
    config, history, lines = elastic_run(tmp_path, most, 14, deaths, 0, "--elastic", f"{fewest}:{most}", "--retry-after", "10000")
    assert [(part.first, part.end, part.devices) for part in history] == [(0, 4, most), (4, 8, fewer), (8, 14, fewest)]
    assert changes_of_plan(history) == [(4, f"{fewer} stages"), (8, "1 stage" if fewest == 1 else f"{fewest} stages")]
    assert history[0].pause is history[0].repeated is None
    for part in history[1:]:
        assert part.pause > 0
        assert part.repeated in (0, 1)  # of the batch in which a process died the others know nothing
    for words in (
        f"jpipe: starting {fewer} of {most} processes, without slot {fewer}",
        f"plan for {fewer} of {most} processes: num_stages {fewer} instead of {most}",
        "resumes at step 4, with changed values of plan",
        f"jpipe: starting {fewest} of {most} processes, without slots 0, {fewer}",
        f"plan for {fewest} of {most} processes: num_stages {fewest} instead of {most}",
        "resumes at step 8, with changed values of plan",
    ):
        assert words in lines
    assert sum(" passed from step " in line for line in lines) == 2
    text = Page(tmp_path / "run" / "report.html").text
    assert "Dashed lines mark the steps at which the run continued with another plan." in text
    check_same_as_by_hand(tmp_path, config, history, monkeypatch)


@pytest.mark.slow
def test_a_run_grows_again_at_a_checkpoint(tmp_path, monkeypatch):
    config, history, lines = elastic_run(tmp_path, 2, 26, {2: (1, 5)}, 1, "--elastic", "1:2", "--retry-after", "1")
    assert [part.devices for part in history] == [2, 1, 2]
    first, smaller, larger = history
    assert (first.first, first.end, smaller.first, smaller.end, larger.end) == (0, 4, 4, larger.first, 26)
    assert larger.first > 6
    assert "jpipe: starting 2 of 2 processes" in lines
    assert f"resumes at step {larger.first}, with changed values of plan" in lines
    check_same_as_by_hand(tmp_path, config, history, monkeypatch)
