"""Signals in every phase of a process, also as process 1 of a container, and output that is closed."""

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jpipe.checkpoints
from jpipe import Plan
from jpipe.processes import Address
from jpipe_train import cli
from jpipe_train.checkpoint import checkpoints
from jpipe_train.config.config_file import to_yaml
from jpipe_train.console import interrupt, output
from jpipe_train.console.preemption import Preemption
from jpipe_train.launch import distributed
from jpipe_train.launch.local import process_group
from jpipe_train.run import loop
from tests.train.conftest import changed

ROOT = Path(__file__).parents[3]
LIMIT = 120  # seconds, for what takes one


@pytest.fixture
def saving(tiny, monkeypatch):
    """Return the config of a run with checkpoints that only a signal ends."""
    monkeypatch.setattr(loop, "write_report", lambda *_: None)
    return tiny | {"checkpoint": {"every": 100}, "train": tiny["train"] | {"steps": 10**6, "eval_every": 10**6, "trace_batches": 0}}


def raise_at(monkeypatch, number, step):
    """Let the run get this signal in this step."""
    real = checkpoints.Checkpoints.schedule_snapshot

    def schedule_snapshot(self, at):
        if at == step:
            signal.raise_signal(number)
        real(self, at)

    monkeypatch.setattr(checkpoints.Checkpoints, "schedule_snapshot", schedule_snapshot)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGHUP, 0, "SIGHUP"), (signal.SIGINT, 130, "Ctrl-C")])
def test_a_dropped_connection_and_ctrl_c_save(saving, tmp_path, monkeypatch, capsys, interruptible, number, code, name):
    raise_at(monkeypatch, number, 1)
    (tmp_path / "run.yaml").write_text(to_yaml(changed(saving)))
    assert cli.main(["train", str(tmp_path / "run.yaml")]) == code
    out, err = capsys.readouterr()
    folder = Path(saving["run"]["dir"])
    (step,) = jpipe.checkpoints.steps(folder)
    assert f"stopped by {name}; the checkpoint of step {step} is written, and the same command with --set run.dir={folder}" in out
    assert err == ""


def test_where_sighup_is_ignored_it_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with Preemption(None, saves=True) as one:
            signal.raise_signal(signal.SIGHUP)
            assert one.decide(0, bool) == "continue"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_hangup_is_not_a_second_signal_and_launch_ignores_second_signals(monkeypatch):
    exits = []
    monkeypatch.setattr(interrupt, "leave", exits.append)
    with Preemption(None, saves=True) as one:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        assert one.signal == signal.SIGHUP
    monkeypatch.setenv(
        interrupt.LAUNCHER, str(os.getppid())
    )  # systemd, SLURM: all processes of the job get it, and the launcher passes it on
    with Preemption(None, saves=True) as one:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert one.decide(0, bool) == "save"
    assert exits == []


def test_the_launcher_marks_its_processes_and_counts_hangups_as_one_signal():
    assert process_group._environment(0, one_thread=False)[interrupt.LAUNCHER] == str(os.getpid())
    with interrupt.recorded() as received:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
    assert received == [signal.SIGHUP, signal.SIGTERM]


WAITS = """
import ctypes, os
from jpipe_train.console import interrupt
with interrupt.default_in_process_1():
    assert os.getpid() == 1
    ctypes.CDLL(None)["raise"](NUMBER)
    ctypes.CDLL(None).sleep(5)  # in which no handler of Python's is called
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_process_1_ends_by_signals_before_it_trains(number):
    alone = ["unshare", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True, timeout=LIMIT).returncode:
        pytest.skip("no rights to make a process 1")
    command = [*alone, sys.executable, "-c", WAITS.replace("NUMBER", str(int(number)))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (128 + number, "")


def test_as_process_1_no_signal_is_left_to_the_kernel(monkeypatch, interruptible):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert [interrupt.usual(number) for number in (signal.SIGINT, signal.SIGTERM)] == [interrupt.leave] * 2
    with interrupt.default_in_process_1(), interrupt.watched():
        assert signal.getsignal(signal.SIGTERM) is interrupt.leave
        with Preemption(None, saves=True) as one:
            signal.raise_signal(signal.SIGTERM)
            assert one.decide(0, bool) == "save"
            assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is interrupt.leave, "for a second one"
        assert signal.getsignal(signal.SIGTERM) is interrupt.leave
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


PRINTS = """
import sys
from jpipe_train.console import output
with output.steady(ends=ENDS):
    for i in range(100_000):
        print("x" * 80)
        print("y" * 80, file=sys.stderr)
open(sys.argv[1], "x").close()
sys.exit(7)
"""


@pytest.mark.parametrize(("ends", "code"), [(False, 7), (True, 141)])
def test_a_closed_pipe_ends_printing_commands_but_not_training(tmp_path, ends, code):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", PRINTS.replace("ENDS", str(ends)), str(tmp_path / "done")]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=writer if not ends else subprocess.PIPE, timeout=LIMIT)
    os.close(writer)
    assert done.returncode == code
    assert (tmp_path / "done").exists() == (not ends)
    if ends:
        assert set(done.stderr) <= set(b"y\n"), "nothing is told"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", [pytest.param(["simulate", "plan.json"], marks=pytest.mark.exhaustive), ["--version"]])
def test_text_that_cannot_be_printed_is_reported(tmp_path, command):
    (tmp_path / "plan.json").write_text(Plan.even(["a", "b"], schedule="gpipe", num_stages=2, microbatches=2).to_json())
    with open("/dev/full", "w") as full:
        program = [sys.executable, "-c", "import sys; from jpipe_train import cli; sys.exit(cli.main(sys.argv[1:]))", *command]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(program, cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (1, f"jpipe: cannot write to standard output: {os.strerror(errno.ENOSPC)}\n")


def test_a_run_trains_on_when_its_output_goes_away(tiny, tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(to_yaml(changed(tiny)))

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(loop, "write_report", lambda *_: None)
    assert cli.main(["train", str(tmp_path / "run.yaml")]) == 0
    assert (Path(tiny["run"]["dir"]) / "metrics.jsonl").read_text().count("\n") == 5


def test_a_process_without_stdout_writes_to_devnull(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with output.steady(ends=False):
        print("nobody reads it")
        assert sys.stdout.fileno() > 2
    sys.stdout.close()


def test_the_heartbeat_timeout_covers_hours_of_suspension(monkeypatch):
    arguments = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: arguments.update(options))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    distributed._start_jax(distributed.Membership(Address("10.0.0.1", 9876), 2, 0), None, 60.0)
    assert arguments["heartbeat_timeout_seconds"] >= 12 * 3600
