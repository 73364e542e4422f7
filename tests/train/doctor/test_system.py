"""Limits of control groups are read in both versions, a folder is tried and left as it was, devices that do not start are reported."""

import os
import sys

import pytest

from jpipe_train.doctor import devices, local, system
from jpipe_train.doctor.judge import judge
from tests.train.doctor.recorded import recorded


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
    "sys/fs/cgroup/job/step/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/job/cpu.max": "max 100000\n",
}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096000\n",  # a container sees its own group at the top
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000000\n",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 1000000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize("files", [VERSION_2, VERSION_1])
def test_the_limits_of_control_groups_count(files, tmp_path):
    write(tmp_path, MACHINE | files)
    assert system.memory(tmp_path) == {"total": 4096000.0, "available": 2096000.0, "limit": 4096000.0}
    cores = system.cores(tmp_path)
    assert (cores["limit"], cores["machine"]) == (1.5, os.cpu_count())


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    ],
)
def test_without_limits_the_machine_counts(files, tmp_path):
    write(tmp_path, MACHINE | files)
    assert system.memory(tmp_path) == {"total": 8192000.0, "available": 6144000.0, "limit": None}
    assert system.cores(tmp_path)["limit"] is None


def test_a_folder_is_tried_and_left_as_it_was(tmp_path):
    write(tmp_path, {"root/proc/self/mounts": f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n"})
    found = system.writable(tmp_path / "runs" / "1", tmp_path / "root", size=2**20)
    assert (found["path"], found["existing"], found["exists"]) == (str(tmp_path / "runs" / "1"), str(tmp_path), False)
    assert found["filesystem"] == "nfs4"
    assert found["bytes_per_second"] > 0
    assert found["available"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert system.writable(tmp_path, size=2**20)["exists"]


def test_a_folder_that_cannot_be_written_raises(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        system.writable(tmp_path / "file" / "runs")


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
    variables = {"https_proxy": "http://me:word@proxy:1", "JPIPE_SECRET": "word", "JAX_X": "1", "HOME": "/"}
    assert local.environment(variables) == {"https_proxy": "http://proxy:1", "JAX_X": "1", "JPIPE_SECRET": "(set)"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("user:s3cret@proxy:3128", "proxy:3128"),
        ("http://u:p@s3cret2@proxy:3128", "http://proxy:3128"),
        ("http://u:s3/cr@et@proxy:3128/", "http://proxy:3128/"),
        ("s3cret://x@proxy", "proxy"),
        ("socks5h://s3cret@proxy", "socks5h://proxy"),
        ("http://proxy:3128", "http://proxy:3128"),
    ],
)
def test_proxies_are_shown_without_users_and_passwords_in_facts_and_findings(value, shown):
    environment = local.environment({"http_proxy": value, "XLA_FLAGS": "--a=http://u:s3/cr@et@host --b"})
    assert environment == {"http_proxy": shown, "XLA_FLAGS": "--a=http://host --b"}
    facts = recorded(process={"count": 2, "coordinator": "10.0.0.1"}, environment=environment)
    found = [finding.found for finding in judge([facts]) if "http_proxy" in finding.found]
    assert found == [f"http_proxy={shown} may catch the connection to the coordinator 10.0.0.1"]


def test_a_probe_that_fails_is_an_error_among_the_facts(monkeypatch, tmp_path):
    def fail():
        raise OSError("out of order")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(system, "memory", fail)
    monkeypatch.setattr(local.compile_cache, "use", lambda setting: None)
    facts = local.gather(None, None, lambda: {"kinds": 1 / 0})
    assert facts["memory"] == {"error": "out of order"}
    assert facts["devices"] == {"error": "ZeroDivisionError: division by zero"}
    assert facts["folder"]["path"] == str(tmp_path / "runs")
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert [name for name, value in facts.items() if "error" in value] == ["devices", "memory"]
