"""Processes find each other or report why not: first by sockets in threads, then with JAX in separate processes."""

import contextlib
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
import yaml

from jpipe import InputError, PeerLost, join_processes
from jpipe.processes import Address, Processes, Rendezvous, _rendezvous
from jpipe_train.cli import main
from jpipe_train.console.options import ALONE, Process
from jpipe_train.launch import distributed
from jpipe_train.launch.distributed import Membership, membership
from jpipe_train.run import loop

ROOT = Path(__file__).parents[3]
LIMIT = 60.0  # seconds, for what should take one
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[07-09],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """Remove the variables of the cluster that these tests may run in."""
    of_launchers = {name for names in distributed._LAUNCHERS.values() for name in names}
    prefixes = "SLURM_", "OMPI_", "KUBERNETES_", "JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL"
    for name in os.environ:
        if name in of_launchers or name.startswith(prefixes):
            monkeypatch.delenv(name)


@pytest.fixture
def address() -> Address:
    """Return an address of this machine where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Address("127.0.0.1", listener.getsockname()[1])


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("host:1", None, None), "--num-processes, --process-id: missing; each of several processes needs all of"),
        ((None, 2, 1), "--coordinator: missing; each of several processes needs all of"),
        (("host:1", 1, None), "--process-id: missing;"),
        (("host:1", 2, 2), "--process-id: expected a number from 0 to 1, for 2 processes, found 2"),
        (("host:1", 2, -1), "--process-id: expected a number from 0 to 1, for 2 processes, found -1"),
        (("host:1", 0, 0), "--num-processes: expected 1 or more, found 0"),
        (("host", 2, 0), "--coordinator: expected HOST:PORT of process 0, such as 10.0.0.1:9876, found 'host'"),
        (("http://host:1", 2, 0), "--coordinator: expected HOST:PORT"),
        (("::1:80", 2, 0), "--coordinator: expected HOST:PORT"),
        (("host:٣", 2, 0), "--coordinator: expected HOST:PORT"),
        (("host:0", 2, 0), "--coordinator: expected a port from 1 to 65535, found 0 in 'host:0'"),
        (("host:65536", 2, 0), "--coordinator: expected a port from 1 to 65535, found 65536 in"),
        ((f"host:{'9' * 9999}", 2, 0), "--coordinator: expected a port from 1 to 65535, found 99"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        distributed.start(Process(*flags))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_limit_is_refused(limit):
    with pytest.raises(InputError, match=f"--connect-limit: expected seconds, more than 0, found {limit:g}"):
        distributed.start(Process("host:1", 2, 0, limit))


def test_an_invalid_wait_limit_is_refused_before_any_wait(tiny, tmp_path, capsys):
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(tiny))
    assert main(["train", str(config), "--wait-limit", "0", "--coordinator", "host:1", "--num-processes", "2", "--process-id", "1"]) == 2
    assert capsys.readouterr().err == "jpipe: --wait-limit: expected seconds, more than 0, found 0\n"


@pytest.mark.parametrize(
    ("text", "address"),
    [("10.0.0.1:80", ("10.0.0.1", 80)), ("a-b.c_d:65535", ("a-b.c_d", 65535)), ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1))],
)
def test_an_address_is_read_and_written(text, address):
    assert Address.parse(text, "here") == address
    assert str(Address.parse(text, "here")) == text


def test_flags_set_the_process_id():
    assert membership(Process("host:1", 3, 2)) == Membership(Address("host", 1), 3, 2, None)


@pytest.mark.oldest
def test_a_single_process_waits_for_nobody(monkeypatch):
    distributed.start(ALONE)
    assert membership(ALONE) is None
    set_all(monkeypatch, SLURM)
    assert membership(Process(num_processes=1)) is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert membership(Process(num_processes=1)) is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    distributed.start(ALONE)
    distributed.stop()


@pytest.mark.oldest
def test_the_environment_sets_the_process_id(monkeypatch):
    set_all(monkeypatch, SLURM)
    assert membership(ALONE) == Membership(Address("node07", 61441), 4, 3, [1])
    assert membership(Process("host:1", 3, 2)) == Membership(Address("host", 1), 3, 2, None), "flags say it all"
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0,1")
    assert membership(ALONE).devices is None, "JAX reads the variable"
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "head:7")
    assert membership(ALONE) == Membership(Address("head", 7), 4, 3, None)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "8")
    monkeypatch.setenv("JAX_PROCESS_ID", "7")
    assert membership(ALONE) == Membership(Address("head", 7), 8, 7, None)


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID: missing; each of several processes needs all of"),
        ({"JAX_PROCESS_ID": "x"}, "JAX_PROCESS_ID: expected a whole number, found 'x'"),
        (SLURM | {"SLURM_PROCID": "?"}, "JAX detects a cluster, but cannot read this process from its settings: invalid literal for int()"),
        (SLURM | {"SLURM_PROCID": "4"}, "JAX_PROCESS_ID: expected a number from 0 to 3, for 4 processes, found 4"),
        *(
            (
                {count: "4", number: "0"},
                f"{count} and {number}: {launcher} has started 4 processes, but the address of process 0 is unknown",
            )
            for launcher, (count, number) in distributed._LAUNCHERS.items()
        ),
        ({"JAX_COORDINATOR_ADDRESS": "x", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "JAX_COORDINATOR_ADDRESS: expected HOST:PORT"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(variables, message, monkeypatch):
    set_all(monkeypatch, variables)
    with pytest.raises(InputError, match=re.escape(message)):
        distributed.start(ALONE)


SECRET = b"of these processes"


def meet(address, *members, num_processes: int = 3, limit: float = LIMIT, host_limit: float | None = None) -> list:
    """Connect process 0 and `others`, each (process_id, num_processes), and return the processes or the error message of each."""
    with ThreadPoolExecutor() as pool:
        outcomes = [
            pool.submit(
                Processes.join, rendezvous=Rendezvous(address, *member), limit=host_limit or limit if index == 0 else limit, secret=SECRET
            )
            for index, member in enumerate([(0, num_processes), *members])
        ]
    return [str(error) if (error := outcome.exception()) else outcome.result() for outcome in outcomes]


def leave(everyone):
    with ThreadPoolExecutor() as pool:
        list(pool.map(Processes.close, everyone))


def test_a_port_is_free_after_the_rendezvous(address):
    for _ in range(2):
        everyone = meet(address, (1, 2), num_processes=2)
        socket.create_server((address.host, address.port)).close()  # JAX's coordinator listens there, while they are connected
        leave(everyone)


def test_process_0_leaves_last(address):
    everyone, order = meet(address, (2, 3), (1, 3)), []

    def leave(one):
        time.sleep(0.2 if one.index else 0.0)
        order.append(one.index)

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.close(lambda: leave(one)), everyone))
    assert sorted(order[:2]) == [1, 2]
    assert order[2] == 0


def test_processes_that_do_not_join_are_named_by_all_others(address):
    results = meet(address, (2, 4), num_processes=4, host_limit=0.5)
    assert set(results) == {
        f"processes 1, 3 of 4 did not connect to {address} within 0.5 s; check that they were started, with the same coordinator, "
        "and can reach it; to wait longer, raise --connect-limit, or limit in Python"
    }


def test_a_process_0_with_a_longer_limit_is_not_mistaken_for_another_program(address, monkeypatch):
    monkeypatch.setattr(_rendezvous, "ANSWER_LIMIT", 0.1)
    results = meet(address, (1, 3), limit=1.0, host_limit=2.0)
    assert results[0].startswith(f"processes 1, 2 of 3 did not connect to {address} within 2 s; ")
    assert results[1] == (
        f"process 1 had no answer from {address} within 1.1 s; if process 0 runs there, it still waits for other processes: give all the "
        "same --connect-limit; if another program uses that port, choose another one"
    )


def test_two_processes_with_one_number_are_refused(address):
    results = meet(address, (1, 3), (1, 3))
    assert set(results) == {"--process-id: two processes were started with 1; give each its own, from 0 to 2"}


def test_counts_that_differ_are_refused(address):
    results = meet(address, (1, 4))
    assert set(results) == {"--num-processes: process 1 was started with 4, process 0 with 3; give all the same"}


def test_a_missing_coordinator_cannot_be_reached(address):
    with pytest.raises(InputError) as caught:
        distributed.start(Process(str(address), 2, 1, 0.3))
    assert str(caught.value) == (
        f"process 1 cannot reach the coordinator, process 0, at {address} within 0.3 s (connection refused); check that process 0 "
        "was started there, that the address is right and that no firewall is between; to wait longer, raise --connect-limit, or limit "
        "in Python"
    )


def test_an_invalid_host_is_reported():
    with pytest.raises(InputError, match=re.escape("at no-such-host.invalid:1 within 0.1 s (")):
        distributed.start(Process("no-such-host.invalid:1", 2, 1, 0.1))


def test_another_program_at_the_port_is_reported_by_both_sides():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])

        def answer():
            caller, _ = listener.accept()
            with caller:
                caller.recv(100)
                caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n\x1b[2J")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(InputError, match=f"{address}: expected process 0 of this run, found another program at that port"):
            distributed.start(Process(str(address), 2, 1, LIMIT))
        thread.join(LIMIT)
        with pytest.raises(InputError, match=f"process 0 cannot listen at port {address.port} of {address}: another program uses it"):
            distributed.start(Process(str(address), 2, 0, LIMIT))


def test_the_command_reports_an_internal_error_in_one_line_and_exits_with_1(address, tiny, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tiny))
    flags = ["--coordinator", str(address), "--num-processes", "2", "--connect-limit", "0.2", "--process-id"]
    assert main(["train", str(config), *flags, "1"]) == 1
    assert re.fullmatch(f"jpipe: process 1 cannot reach the coordinator, process 0, at {address} [^\n]*\n", capsys.readouterr().err)
    assert main(["train", str(config), *flags, "0"]) == 1
    assert re.fullmatch(
        f"jpipe: process 1 of 2 did not connect to {address} within 0.2 s; check that it was [^\n]*\n", capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_the_limit_includes_joining_and_no_device_is_queried_before(tiny, tmp_path, capsys, monkeypatch):
    def join(*, limit, **_):
        raise PeerLost(f"nobody came within {limit:g} s")

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(Processes, "join", join)
    monkeypatch.setattr(distributed, "start", lambda *_: 2)
    monkeypatch.setattr(distributed, "leave_at_once", lambda code: None)
    for name in ("devices", "local_devices", "process_count", "process_index"):
        monkeypatch.setattr(jax, name, None)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tiny))
    assert main(["train", str(config), "--connect-limit", "7"]) == 1
    assert capsys.readouterr().err == "jpipe: nobody came within 7 s\n"


PROGRAM = """
import os, signal, sys, time
from jpipe_train.console.options import Process
from jpipe_train.launch import distributed
me = int(sys.argv[2])
distributed.start(Process(sys.argv[1], 3, me, 60.0))
import jax, jpipe
from jax.experimental import multihost_utils
import numpy as np
shared = multihost_utils.process_allgather(np.int32(me + 1))
print(jax.process_index(), jax.process_count(), shared.tolist(), flush=True)
if me == 1:
    time.sleep(100)  # until the test ends it
    sys.exit("SIGTERM was not heard")
if me == 2:
    time.sleep(1)
    print("later than process 0", flush=True)
if me == 0:
    sys.stdin.read()
try:
    members = jpipe.join_processes()
    while True:  # the loss is noticed a moment later
        members.check()
        time.sleep(0.01)
except jpipe.PeerLost as lost:
    print(str(lost).partition(":")[0], flush=True)
distributed.stop()
print("left", flush=True)
"""


@pytest.mark.slow
@pytest.mark.oldest
def test_jax_runs_across_processes_and_survives_one(address):
    """SIGTERM ends one process at once, as without JAX; the others learn it, and exit in any order without a message of JAX."""
    command = [sys.executable, "-c", PROGRAM, str(address)]
    with contextlib.ExitStack() as stack:
        processes = []
        for i in range(3):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
            processes.append(stack.enter_context(subprocess.Popen([*command, str(i)], cwd=ROOT, env=environment, text=True, **pipes)))
            stack.callback(processes[i].kill)
        for i, process in enumerate(processes):
            lines = iter(process.stdout.readline, f"{i} 3 [1, 2, 3]\n")
            assert all(line.startswith("[Gloo]") for line in lines), process.stderr.read()
        processes[1].send_signal(signal.SIGTERM)
        assert processes[1].wait(LIMIT) == -signal.SIGTERM
        outputs = [process.communicate("", timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [1, -signal.SIGTERM, 1]
    lost = "process 1 disconnected unexpectedly"
    assert outputs == [(f"{lost}\nleft\n", ""), ("", ""), (f"later than process 0\n{lost}\nleft\n", "")]


CACHED = """
import sys
import jax, jax.numpy as jnp
from jpipe_train.assemble.compile_cache import CacheCount, use
from jpipe_train.console.options import Process
from jpipe_train.launch import distributed
me = int(sys.argv[2])
distributed.start(Process(sys.argv[1], 2, me, 60.0))
use(sys.argv[3])
count = CacheCount()
jax.jit(lambda x: x * (2 + me))(jnp.ones(3)).block_until_ready()
distributed.stop()
print(f"count:{count}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.oldest
def test_every_process_keeps_its_programs_for_the_next_start(tmp_path):
    counts = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-c", CACHED, address]
        with contextlib.ExitStack() as stack:
            pipes = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
            processes = [stack.enter_context(subprocess.Popen([*command, str(i), str(tmp_path / "kept")], **pipes)) for i in range(2)]
            for process in processes:
                stack.callback(process.kill)
            outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
        counts.append([line for output in outputs for line in output.splitlines() if line.startswith("count:")])
    assert counts == [["count:", "count:"], ["count: (from the cache)", "count: (from the cache)"]]


@pytest.mark.parametrize("waits", [loop.main, Process, join_processes])
def test_processes_wait_for_each_other_as_long_as_jax_does(waits):
    parameters = inspect.signature(waits).parameters
    assert parameters.get("connect_limit", parameters.get("limit")).default == 300
