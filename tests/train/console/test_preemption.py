"""SIGTERM: all processes of a run save at one step and exit; the resumed run equals an undisturbed one."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

import jpipe
import jpipe.checkpoints.writing
from jpipe_train.checkpoint import checkpoints
from jpipe_train.console.preemption import Preemption
from jpipe_train.report.metrics_log import RunStopped
from jpipe_train.run import loop
from tests.jpipe.running import check_equal
from tests.train.conftest import changed
from tests.train.launch.test_launch import launched, pids, wait_for_exit
from tests.train.launch.test_team import by_hand
from tests.train.run.test_loop import rows_of

ROOT = Path(__file__).parents[3]
LIMIT = 120  # seconds, for what takes ten
ENDLESS = 10**6  # steps, of a run that a signal ends


@pytest.fixture(autouse=True)
def ends_by_default():
    """Check that SIGTERM has its default action before and after a test."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def preempt():
    """Send SIGTERM to this process, as a scheduler does."""
    os.kill(os.getpid(), signal.SIGTERM)


def preempt_at(monkeypatch, step):
    """Let it do so in this step of a run."""
    real = checkpoints.Checkpoints.schedule_snapshot

    def schedule_snapshot(self, at):
        if at == step:
            preempt()
        real(self, at)

    monkeypatch.setattr(checkpoints.Checkpoints, "schedule_snapshot", schedule_snapshot)


class Mailbox(jpipe.processes.Processes):
    """Processes whose messages arrive at once; receiving a message before it is sent is an error."""

    def __init__(self, index, everyone):
        self.index, self._everyone, self._mail = index, everyone, {}
        everyone.append(self)

    def broadcast(self, name, data):
        for one in self._everyone:
            one._mail[name] = data

    def receive(self, name, on=None, what=None):
        return self._mail.pop(name)

    def has_message(self, name):
        return name in self._mail


@pytest.mark.parametrize("seed", range(20))
def test_all_processes_save_at_one_step_and_leave_at_one_step(seed):
    chance = random.Random(seed)
    everyone, orders, moment = [], ([], [], []), chance.randrange(30)
    preemptions = [Preemption(Mailbox(index, everyone), saves=True) for index in range(3)]
    for now in range(1000):
        # One of them gets the signal, later perhaps another one. Each may be steps ahead of the others, but process 0 one behind at most.
        for preemption in {moment: [chance.choice(preemptions)], moment + 20: [chance.choice(preemptions)]}.get(now, []):
            with preemption:
                preempt()
        steps = [len(process_orders) for process_orders in orders]
        able = [k for k in (1, 2) if steps[k] <= steps[0]] + ([0] if steps[0] < min(steps) + 3 else [])
        if left := [k for k in able if "leave" not in orders[k]]:
            k = chance.choice(left)
            orders[k].append(preemptions[k].decide(7 + steps[k], lambda: len(orders[0]) > 40))
    assert orders[0] == orders[1] == orders[2]
    assert [order for order in orders[0] if order != "continue"] == ["save", "leave"]
    assert {preemption.cut for preemption in preemptions} == {7 + orders[0].index("save") + 1}
    assert {preemption.signal for preemption in preemptions} == {signal.SIGTERM}


def test_only_a_run_that_saves_handles_sigterm():
    with Preemption(None, saves=False) as preemption:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert preemption.decide(0, bool) == "continue"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Preemption(None, saves=True) as preemption:
        preempt()
        assert preemption.decide(0, bool) == "continue"
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is signal.SIG_IGN


TWICE = """
import os, signal
from jpipe_train.console.preemption import Preemption
with Preemption(None, saves=True) as preemption:
    os.kill(os.getpid(), signal.SIGTERM)
    print(preemption.decide(3, bool), preemption.cut, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("lives on")
"""


def test_a_second_signal_ends_the_process_at_once():
    done = subprocess.run([sys.executable, "-c", TWICE], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "save 4\n", "")


IN_C = """
import ctypes, itertools, operator, signal
from jpipe_train.console.preemption import Preemption
c = ctypes.CDLL(None)
with Preemption(None, saves=True):
    calls = [(c["raise"], signal.SIGTERM), (c["raise"], signal.SIGTERM), (c.sleep, 600)]
    list(itertools.starmap(operator.call, calls))  # in which no handler of Python's is called
"""


def test_a_second_signal_ends_a_process_that_is_busy_outside_of_python():
    assert subprocess.run([sys.executable, "-c", IN_C], cwd=ROOT, timeout=LIMIT).returncode == 128 + signal.SIGTERM


FORKED = """
import os, signal, time
from jpipe_train.console.preemption import Preemption
reader, writer = os.pipe()
with Preemption(None, saves=True) as preemption:
    for _ in range(2):
        if (child := os.fork()) == 0:
            os.write(writer, b"!")
            time.sleep(600)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print(preemption.decide(3, bool), flush=True)
"""


def test_children_of_a_program_are_ended_by_their_own_signal_and_count_for_nothing():
    done = subprocess.run([sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (0, "-15\n-15\nsave\n"), done.stderr


def test_the_previous_wakeup_fd_is_restored():
    with socket.socket() as ours:
        ours.setblocking(False)
        before = signal.set_wakeup_fd(ours.fileno())
        with Preemption(None, saves=True):
            pass
        assert signal.set_wakeup_fd(before) == ours.fileno()
    for thread in threading.enumerate():
        if thread.name == "signals":
            thread.join(LIMIT)
            assert not thread.is_alive()


@pytest.fixture
def saved(tiny, monkeypatch):
    """Return a config that writes checkpoints only on SIGTERM and at the end."""
    monkeypatch.setattr(loop, "write_report", lambda config, pipe, folder, *_: (folder.path / "report.html").touch())  # takes seconds
    train = tiny["train"] | {"steps": 12, "eval_every": 4, "trace_batches": 0}
    plan = {"schedule": "pipedream", "num_stages": 2, "microbatches": 1}
    return tiny | {"checkpoint": {"every": 100}, "train": train, "plan": plan, "model": tiny["model"] | {"dropout": 0.3}}


def losses_of(folder) -> list[dict]:
    """Return the rows of a run without the distance of weight versions: how often that is computed depends on the number of steps."""
    return [{name: value for name, value in row.items() if name != "version_distance"} for row in rows_of(folder)]


@pytest.mark.slow
def test_a_preempted_run_resumes_with_equal_results(saved, tmp_path, monkeypatch, capsys):
    whole = loop.main(changed(saved, run={"dir": str(tmp_path / "whole")}))
    with monkeypatch.context() as patched:
        preempt_at(patched, 2)
        first = loop.main(changed(saved, train={"steps": ENDLESS}))  # however long the checkpoint takes
    assert (first.steps, first.val_loss_after) == (4, None)
    assert jpipe.checkpoints.steps(first.folder) == [4]
    assert f"stopped by SIGTERM; the checkpoint of step 4 is written, and the same command with --set run.dir={first.folder}" in " ".join(
        capsys.readouterr().out.split()
    )
    assert not (first.folder / "report.html").exists(), "there is no time for it"
    with monkeypatch.context() as patched:
        preempt_at(patched, 10)  # too late for another checkpoint than that of the end
        parts = loop.main(changed(saved))
    assert "resumes at step 4" in capsys.readouterr().out
    assert losses_of(parts.folder) == losses_of(whole.folder)
    assert (parts.folder / "report.html").exists(), "the run came to its own end"
    assert (parts.steps, parts.val_loss_before, parts.val_loss_after) == (12, whole.val_loss_before, whole.val_loss_after)
    assert jpipe.checkpoints.steps(parts.folder) == [4, 12]
    actual, expected = (jpipe.checkpoints.Checkpoint(summary.folder, 12).read() for summary in (parts, whole))
    check_equal(actual, expected)


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_saved_is_not_a_success(saved, monkeypatch):
    def write(folder, step, layers, process):
        raise OSError(28, "No space left on device")

    preempt_at(monkeypatch, 1)
    monkeypatch.setattr(jpipe.checkpoints.writing, "write_layers", write)
    with pytest.raises(RunStopped, match="stopped by SIGTERM; the checkpoint of step 3 could not be written"):
        loop.main(changed(saved, checkpoint={"on_full_disk": "train"}, train={"steps": ENDLESS}))


def test_a_launcher_that_gets_sigterm_exits_like_its_processes():
    program = "signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))\nready()\ntime.sleep(60)"
    for code, expected in ("0", 0), ("me", 128 + signal.SIGTERM):
        with launched(2, program.replace("{code}", code), restarts=5) as process:
            numbers = pids(process, 2)
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=LIMIT)
            wait_for_exit(numbers)
        assert (process.returncode, err) == (expected, "jpipe: SIGTERM received; the processes are not restarted\n" if expected else "")


@pytest.mark.slow
def test_where_one_process_gets_the_signal_all_save_at_one_step(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = changed(saved, train={"steps": ENDLESS, "eval_every": ENDLESS})
    Path("config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    metrics = Path(saved["run"]["dir"]) / "metrics.jsonl"
    with by_hand(*[["train", "config.yaml"]] * 2) as processes:
        deadline = time.monotonic() + LIMIT
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        processes[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    step = int(re.search(r"stopped by SIGTERM; the checkpoint of step (\d+) is written", outputs[0][0])[1])
    assert jpipe.checkpoints.steps(metrics.parent) == [step]
    more = {"steps": step + 3, "eval_every": ENDLESS}
    parts = loop.main(changed(saved, train=more), resume="must")
    whole = loop.main(changed(saved, train=more, run={"dir": str(tmp_path / "whole")}))
    assert losses_of(parts.folder) == losses_of(whole.folder)
    assert rows_of(whole.folder)[-1]["step"] == step + 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("saves", [False, True])
def test_all_processes_trace_the_step_that_process_0_decides(seed, saves):
    chance, everyone, decisions = random.Random(seed), [], ([], [], [])
    wants = [lambda: len(decisions[0]) == 5, lambda: True, lambda: False]  # only what process 0 measures counts
    preemptions = [Preemption(Mailbox(index, everyone), saves=saves, traces=wants[index]) for index in range(3)]
    while unfinished := [k for k in range(3) if len(decisions[k]) < 10]:
        k = chance.choice([k for k in unfinished if len(decisions[k]) <= len(decisions[0]) + (k == 0)])
        decisions[k].append(preemptions[k].decide(7 + len(decisions[k]), lambda: False))
    assert decisions[0] == decisions[1] == decisions[2] == [*["continue"] * 6, "trace", *["continue"] * 3]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("saves", [False, True])
def test_all_processes_end_after_the_step_that_process_0_decides(seed, saves):
    chance, everyone, decisions, asked = random.Random(seed), [], ([], [], []), []
    stops = [lambda: bool(asked), lambda: True, lambda: False]  # only what the callbacks of process 0 say counts
    preemptions = [Preemption(Mailbox(index, everyone), saves=saves, stops=stops[index]) for index in range(3)]
    at = chance.randrange(20)
    for _ in range(1000):
        steps = [len(process_decisions) for process_decisions in decisions]
        if not (unfinished := [k for k in range(3) if "last" not in decisions[k]]):
            break
        k = chance.choice([k for k in unfinished if steps[k] <= steps[0] + (k == 0)])
        if k == 0 and steps[0] == at:
            asked.append(True)
        decisions[k].append(preemptions[k].decide(7 + steps[k], lambda: False))
    assert decisions[0] == decisions[1] == decisions[2] == [*["continue"] * (at + 1), "last"]
