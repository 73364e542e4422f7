"""Limits of control groups are read, a folder is tried and left as it was, devices that do not start are reported."""

import sys

import pytest

from jpipe_train.doctor import devices, facts


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MACHINE = {"proc/meminfo": "MemTotal:       8000 kB\nMemFree:  100 kB\nMemAvailable:   6000 kB\n"}
VERSION_2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/memory.max": "4096000\n",
    "sys/fs/cgroup/job/memory.current": "3000000\n",
    "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 1000000\n",
}


def test_the_limits_of_control_groups_count(tmp_path):
    write(tmp_path, MACHINE | VERSION_2)
    assert facts.memory(tmp_path) == {"total": 4096000.0, "available": 2096000.0}


@pytest.mark.parametrize(
    "files", [{}, {"proc/self/cgroup": "0::/\n"}, {"proc/self/cgroup": "4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n"}]
)
def test_without_limits_the_machine_counts(files, tmp_path):
    write(tmp_path, MACHINE | files)
    assert facts.memory(tmp_path) == {"total": 8192000.0, "available": 6144000.0}


def test_a_folder_is_tried_and_left_as_it_was(tmp_path):
    found = facts.try_folder(tmp_path / "runs" / "1")
    assert (found["path"], found["existing"]) == (str(tmp_path / "runs" / "1"), str(tmp_path))
    assert found["bytes_per_second"] > 0
    assert found["available"] > 0
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_written_raises(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        facts.try_folder(tmp_path / "file" / "runs")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('first\\nlast: no devices\\n')", "last: no devices"),
        ("import os; os.kill(os.getpid(), 6)", "JAX was ended by signal 6 while it started its devices: without a message"),
        ("import time; time.sleep(60)", "JAX did not start its devices within 0.5 s"),
    ],
)
def test_devices_that_do_not_start_are_reported(program, message, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -c "{program}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(devices.sys, "executable", str(python))
    with pytest.raises(RuntimeError) as caught:
        devices.find(limit=0.5 if "sleep" in program else 60.0)
    assert str(caught.value) == message


def test_passwords_are_not_shown():
    variables = {
        "https_proxy": "http://me:word@proxy:1",
        "JPIPE_SECRET": "word",
        "XLA_FLAGS": "--a=http://u:s3/cr@et@host --b",
        "HOME": "/",
    }
    assert facts.environment(variables) == {"XLA_FLAGS": "--a=http://host --b", "https_proxy": "(set)", "JPIPE_SECRET": "(set)"}


def test_a_probe_that_fails_is_an_error_among_the_facts(monkeypatch, tmp_path):
    def fail():
        raise OSError("out of order")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(facts, "memory", fail)
    found = facts.gather(None, None, lambda: {"kinds": 1 / 0})
    assert found["memory"] == {"error": "out of order"}
    assert found["devices"] == {"error": "ZeroDivisionError: division by zero"}
    assert found["folder"]["path"] == str(tmp_path / "runs")
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert [name for name, value in found.items() if "error" in value] == ["devices", "memory"]
