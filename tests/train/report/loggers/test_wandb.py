"""Weights & Biases: rows arrive in its files, a resumed run continues the same one, and its failures never stop a run."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jpipe import InputError
from jpipe_train.report import logs
from jpipe_train.report.loggers import sender
from jpipe_train.report.loggers.sender import Sender
from jpipe_train.run import loop
from tests.train.conftest import changed


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Turn off the network and remove any login."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "NETRC": str(tmp_path / "none")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sender, "_late", [])
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID", "WANDB_DIR", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it reads the environment once


@pytest.fixture
def messages() -> list[str]:
    return []


def records(file: Path) -> list:
    """Return the records of a wandb file: protocol buffers in a LevelDB log with blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts, result = file.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            result.append(Record.FromString(parts))
            parts = b""
    return result


def read_runs(folder: Path) -> list[dict]:
    """Return what each part of a run wrote to disk, in order: its id, names, config, rows by step and exit codes."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # as where Python ends: until then rows may wait in wandb's process
    runs = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        file_records = records(file)
        (run,) = [record.run for record in file_records if record.HasField("run")]
        config = {item.key: json.loads(item.value_json) for item in run.config.update if item.key != "_wandb"}
        rows = {}
        for history in (record.history for record in file_records if record.HasField("history")):
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in history.item}
            rows[history.step.num] = {name: value for name, value in row.items() if not name.startswith("_")}
        codes = [record.exit.exit_code for record in file_records if record.HasField("exit")]
        runs.append({"id": run.run_id, "project": run.project, "name": run.display_name, "config": config, "rows": rows, "codes": codes})
    return runs


@pytest.mark.slow
def test_a_run_leaves_its_rows_and_its_config(tiny, capsys):
    config = changed(tiny | {"log": ["wandb"]}, train={"steps": 3})
    folder = loop.main(config).folder
    (run,) = read_runs(folder)
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [{"step": step} | row for step, row in run["rows"].items()] == logged
    assert (run["project"], run["name"], run["codes"]) == ("jpipe", folder.name, [0])
    assert run["config"]["model"] == config.model_dump()["model"]
    assert not (folder / "tensorboard").exists()
    assert "wandb: offline; the rows are kept on disk; wandb sync " in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_continues_the_same_wandb_run(tmp_path, messages, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.delenv("WANDB_MODE")  # nobody is logged in
    for code, steps in ((1, range(3)), (0, range(2, 5))):
        log = Sender("wandb", tmp_path, {"seed": 7, "model": {"width": 8}}, messages.append)
        for step in steps:
            log.write(step, {"loss": 5.0 - step, "val_loss": 0.1})
        log.close(code)
        time.sleep(1.1)  # a part has a folder that is named by the second in which it begins
    parts = read_runs(tmp_path)
    assert [part["rows"] for part in parts] == [{t: {"loss": 5.0 - t, "val_loss": 0.1} for t in steps} for steps in (range(3), range(2, 5))]
    assert [part["codes"] for part in parts] == [[1], [0]]
    assert {part["id"] for part in parts} == {(tmp_path / "wandb" / "id.txt").read_text().strip()}
    assert parts[1]["project"] == "mine"
    assert parts[1]["config"] == {"seed": 7, "model": {"width": 8}}
    assert len(messages) == 2
    assert "wandb: No API key configured. Use `wandb login` to log in; the rows are kept on disk; wandb sync " in messages[1]


@pytest.mark.slow
def test_a_server_that_never_answers_leaves_the_rows_on_disk(tmp_path, messages, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name, value in {
            "WANDB_MODE": "online",
            "WANDB_API_KEY": "a" * 40,
            "WANDB_BASE_URL": address,
            "WANDB_INIT_TIMEOUT": "3",
        }.items():
            monkeypatch.setenv(name, value)
        with Sender("wandb", tmp_path, {"seed": 7}, messages.append) as log:
            log.write(0, {"loss": 1.0})
    assert [(part["rows"], part["codes"]) for part in read_runs(tmp_path)] == [({0: {"loss": 1.0}}, [0])]
    assert len(messages) == 1
    assert "; the rows are kept on disk; wandb sync " in messages[0]


@pytest.mark.slow
def test_a_run_for_which_wandb_is_disabled_is_reported(tmp_path, messages, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with Sender("wandb", tmp_path, {}, messages.append) as log:
        log.write(0, {"loss": 1.0})
    assert messages == ["wandb: wandb is disabled, for example by WANDB_MODE; the run continues without it"]


KILLED = """
import os, pathlib, signal, time
from jpipe_train.report.loggers.sender import Sender
log = Sender("wandb", pathlib.Path.cwd(), {}, print)
for step in range(1000):  # wandb writes blocks of 32 KiB
    log.write(step, {"loss": 1.0})
while not log._rows.empty():
    time.sleep(0.1)
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_its_rows_but_the_last_on_disk_and_no_process(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    # wandb's own process holds the pipes: they are closed when it has ended.
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (part,) = read_runs(tmp_path)
    assert len(part["rows"]) > 100
    assert list(part["rows"].items()) == [(step, {"loss": 1.0}) for step in range(len(part["rows"]))]


class Recorded:
    """A run in a service of its own."""

    step = 0

    def __init__(self):
        self.calls = []

    def log(self, row, step, commit):
        self.calls.append((step, row))

    def finish(self, exit_code):
        self.calls.append(exit_code)


def served(begin, tmp_path, messages, limit=30.0) -> Sender:
    """Return a wandb logger that begins its run with this function."""
    return Sender("wandb", tmp_path, {}, messages.append, begin, limit)


@pytest.fixture
def hanging():
    """Return a function that hangs until the test ends."""
    end = threading.Event()
    yield lambda about, tell: end.wait(60)
    end.set()


def test_a_service_that_hangs_holds_up_nothing(tmp_path, messages, hanging):
    began = time.monotonic()
    log = served(hanging, tmp_path, messages, limit=0.2)
    for step in range(2000):
        log.write(step, {"loss": 1.0, "a metric with a long name": 2.0})
    log.close()
    assert time.monotonic() < began + 5
    assert messages == [f"wandb: some rows could not be sent within 0.2 s; wandb sync {tmp_path / 'wandb'} sends the rows kept there"]
    assert sender.some_are_late()


LATE = """
import atexit, sys, time
from jpipe_train.report.loggers import sender
from jpipe_train.console.options import Process
from jpipe_train.run import job

def begin(about, tell):
    atexit.register(time.sleep, 1e6)  # as a library may
    time.sleep(1e6)

def work(connect):
    with sender.Sender("wandb", __import__("pathlib").Path.cwd(), {}, print, begin, limit=0.2):
        pass
    return 3

sys.exit(job.run_process(work, Process()))
"""


@pytest.mark.slow
def test_a_library_that_hangs_does_not_hold_the_end_of_a_command(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run([sys.executable, "-c", LATE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")


def test_rows_that_are_never_sent_are_dropped_eventually(tmp_path, messages, monkeypatch, hanging):
    monkeypatch.setattr(sender, "_MOST_QUEUED", 3)
    with served(hanging, tmp_path, messages, limit=0.1) as log:
        for step in range(2000):
            log.write(step, {"loss": 1.0, "a metric with a long name": 2.0})
        assert log._rows.qsize() <= 4
    assert messages[0] == "wandb: 3 rows are waiting to be sent; the run continues, but sends no more rows"


@pytest.mark.parametrize("error", [RuntimeError("no room\x07\nmore"), SystemExit("no room\x07"), KeyboardInterrupt("no room\x07")])
@pytest.mark.parametrize("when", ["begin", "log", "finish"])
def test_a_failure_is_reported_once_and_the_run_continues(tmp_path, messages, error, when):
    def fail(*_, **__):
        raise error

    run = Recorded()
    setattr(run, when, fail)
    with served(fail if when == "begin" else lambda about, tell: run, tmp_path, messages) as log:
        for step in range(100):
            log.write(step, {"loss": 1.0})
    assert messages == ["wandb: no room\x07; the run continues without it"]


def test_what_the_service_says_is_printed_and_the_exit_code_is_that_of_the_run(tmp_path, messages):
    run, abouts = Recorded(), []

    def begin(about, tell):
        abouts.append(about)
        tell("https://there/run")
        return run

    with contextlib.suppress(KeyboardInterrupt), served(begin, tmp_path, messages) as log:
        log.write(3, {"loss": 1.5})
        raise KeyboardInterrupt
    assert messages == ["wandb: https://there/run"]
    assert abouts[0].id == (tmp_path / "wandb" / "id.txt").read_text().strip()
    assert run.calls == [(3, {"loss": 1.5}), 1]


def test_a_folder_that_cannot_be_used_is_reported(tmp_path, messages):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "wandb").symlink_to(tmp_path / "elsewhere")
    with Sender("wandb", tmp_path, {}, messages.append) as log:
        log.write(0, {"loss": 1.0})
    assert len(messages) == 1
    assert messages[0].endswith("it is a symbolic link, which jpipe does not follow there; the run continues without it")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_missing_library_is_reported_before_the_run_starts(tiny, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *arguments: None if name == "wandb" else find(name, *arguments))
    with pytest.raises(InputError, match=r"log: wandb is not installed; install it with pip install wandb, or remove"):
        loop.main(changed(tiny | {"log": ["tensorboard", "wandb"]}))
    assert not Path(tiny["run"]["dir"]).exists()
    logs.check(changed(tiny).log)


@pytest.mark.slow
def test_no_log_but_the_file_of_rows(tiny):
    folder = loop.main(changed(tiny | {"log": []}, train={"steps": 1})).folder
    assert not {"tensorboard", "wandb"} & {path.name for path in folder.iterdir()}
