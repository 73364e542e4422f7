"""Attacks on the ports of a run's processes are harmless."""

import asyncio
import contextlib
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from jax.extend import backend

from jpipe import InputError
from jpipe.processes import Address, Processes, Rendezvous, _rendezvous, handshake, jax_internals
from jpipe.processes._channel import Channel, Limits
from jpipe.processes._coordinator import Beat
from jpipe.processes._rendezvous import connect
from jpipe_train.console.options import Process
from jpipe_train.launch import distributed
from jpipe_train.launch.numeric_settings import _MAY_DIFFER, numeric_settings

LIMIT = 30.0  # seconds, for what should take a fraction of one
SECRET = b"known to the processes"
COUNT = 3

GARBAGE = (
    b"jpipe 1 4\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\n",
    b"\0\n",
    b"\xff" * 100_000,
    b'{"lost": "all"}\n',
    b"jpipe 1 3 \n",
    b"jpipe -1 3 " + b"0" * 32 + b"\n",
    b"jpipe 1 3 " + b"0" * 31 + b"\n",
    b"jpipe 9999999999 3 " + b"0" * 32 + b"\n",
)


class SharedStore:
    """What JAX's store does, for processes that are threads of this one."""

    value: str | None = None

    def key_value_set(self, key: str, value: str) -> None:
        self.value = value

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        return self.value

    def of(self, index: int) -> Rendezvous:
        """Return the place of a process."""
        return Rendezvous.of_jax(
            types.SimpleNamespace(process_id=index, num_processes=COUNT, coordinator_address="127.0.0.1:1", client=self)
        )


class Meeting:
    """Process 0 waits for the others, which are threads of this process."""

    def __init__(self, secret: bytes | None) -> None:
        self.pool, self.secret = ThreadPoolExecutor(), secret
        self.hosting = self.pool.submit(self.join, 0)
        self.listens()
        self.key = handshake.key(secret, self.token)

    def join(self, index: int) -> Channel:
        channel = Channel(index, COUNT, Limits(), lambda message: None, lambda: Beat(""))
        channel.open(self.place_of(index), LIMIT, self.secret)
        return channel

    def all_join(self, *numbers: int) -> None:
        """Let the other processes join, or only some of them, and leave."""
        joins = [self.pool.submit(self.join, number) for number in numbers or (1, 2)]
        channels = [self.hosting.result(LIMIT), *(join.result(LIMIT) for join in joins)]
        for channel in channels:
            channel.part()
        for channel in channels:
            channel.hang_up()
        self.pool.shutdown()


class AtAddress(Meeting):
    """They find each other at an address that all are told."""

    token = ""
    looked = 1  # connections that only look whether process 0 listens

    def place_of(self, index: int) -> Rendezvous:
        return Rendezvous(self.address, index, COUNT, self.address)

    def __init__(self, secret: bytes | None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.place = listener.getsockname()
        self.address = Address(*self.place)
        super().__init__(secret)

    def listens(self) -> None:
        while not self.hosting.done():
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(self.place, LIMIT) as look:
                look.shutdown(socket.SHUT_WR)
                assert look.recv(1) == b""
                break


class ByStore(Meeting):
    """They find each other by a store."""

    looked = 0

    def place_of(self, index: int) -> Rendezvous:
        return self.left.of(index)

    def __init__(self, secret: bytes | None) -> None:
        self.left = SharedStore()
        super().__init__(secret)

    def listens(self) -> None:
        while self.left.value is None:
            time.sleep(0.01)
        address, self.token = self.left.value.split()
        self.place = Address.parse(address, "")


def call(link: socket.socket, key: bytes, index: int, count: int) -> str:
    """Introduce a process to the listener at the other end of a connection, and return its answer."""

    async def introduce() -> str:
        reader, writer = await asyncio.open_connection(sock=link.dup())
        with contextlib.closing(writer):
            return await asyncio.wait_for(handshake.call(reader, writer, key, index, count), LIMIT)

    return asyncio.run(introduce())


def send_and_read(place, *texts: bytes) -> bytes:
    """Send these bytes from a foreign connection, and return the answer until the connection is dropped."""
    with socket.create_connection(place, LIMIT) as stranger:
        reply = b""
        with contextlib.suppress(ConnectionError):  # dropped while it still talks
            for text in texts:
                stranger.sendall(text)
            while data := stranger.recv(1000):
                reply += data
        return reply


def garbage(run):
    for text in GARBAGE:
        assert send_and_read(run.place, text) == b"", "nothing is said to a stranger"
    return {"without a hello of jpipe's": len(GARBAGE)}


def another_secret(run):
    for key in handshake.key(None), handshake.key(b"another"), handshake.key(None, "token"):
        with socket.create_connection(run.place, LIMIT) as link, pytest.raises(InputError, match="have different secrets"):
            call(link, key, 1, COUNT)
    return {"with another secret": 3}


def replay(run):
    """Replay on a new connection the messages with which another process proved that it knows the secret."""
    messages, nonce = [], b"0" * 32
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor() as pool:
        calling = pool.submit(call, theirs, run.key, 1, COUNT)
        messages.append(ours.recv(1000))
        ours.sendall(nonce + b"\n")
        messages.append(ours.recv(1000))
        ours.close()
        assert calling.result(LIMIT) == ""
    reply = send_in_turn(run.place, messages)
    assert reply.endswith(b"\nunknown\n")
    return {"with another secret": 1}


def send_in_turn(place, texts) -> bytes:
    reply = b""
    with socket.create_connection(place, LIMIT) as stranger:
        for text in texts:
            stranger.sendall(text)
            reply += stranger.recv(1000)
        return reply + stranger.recv(1000)


def slow(run):
    """Send a byte now and then on one connection, and nothing on another."""
    with socket.create_connection(run.place, LIMIT) as silent, socket.create_connection(run.place, LIMIT) as stranger:
        with contextlib.suppress(ConnectionError):
            for byte in b"jpipe 1 3 " + b"0" * 100:
                stranger.sendall(bytes([byte]))
                time.sleep(0.02)
        assert silent.recv(1) == b""
    return {"that said nothing in time": 2}


def many(run):
    """Open more connections than may wait at a time; the oldest ones are dropped."""
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(socket.create_connection(run.place, LIMIT)) for _ in range(12)]
        assert [link.recv(1) for link in links[:4]] == [b""] * 4
    return {"beyond the most at a time": 4}  # or more, if the next ones come before those that are gone are noticed


def leaves(run):
    """Disconnect in the middle of a hello, and by a reset."""
    socket.create_connection(run.place, LIMIT).close()
    with socket.create_connection(run.place, LIMIT) as link:
        link.sendall(b"jpipe 1")
    with socket.create_connection(run.place, LIMIT) as link:
        link.sendall(b"jpipe 1 3 " + b"0" * 32 + b"\n")
        link.recv(1000)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return {"that closed early": 3}


ATTACKS = [garbage, another_secret, replay, slow, many, leaves]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("place", [AtAddress, ByStore])
def test_foreign_connections_are_dropped_and_counted(place, attack, monkeypatch, capfd):
    monkeypatch.setattr(_rendezvous, "_MOST", 8)
    if attack is slow:
        monkeypatch.setattr(_rendezvous, "_PATIENCE", 0.3)
    run = place(SECRET)
    expected = attack(run)
    run.all_join()
    printed = capfd.readouterr().err
    if place is AtAddress:  # and the one that looked whether process 0 listens
        expected["that closed early"] = expected.get("that closed early", 0) + 1
    counts = {reason: int(number) for number, reason in re.findall(r"(\d+) ([^,()]+)[,)]", printed)}
    assert counts == expected or (attack is many and counts["beyond the most at a time"] >= 4)
    assert printed.count("\n") == 1, "told once"


@pytest.mark.parametrize("place", [AtAddress, ByStore])
def test_a_process_that_leaves_early_may_join_again(place):
    run = place(SECRET)
    ours = socket.create_connection(run.place, LIMIT)
    calling = run.pool.submit(call, ours, run.key, 1, COUNT)
    time.sleep(0.2)  # it is counted in, and waits
    ours.shutdown(socket.SHUT_RDWR)
    assert calling.result(LIMIT) == ""
    ours.close()
    time.sleep(0.1)
    run.all_join()


@pytest.mark.parametrize(("number", "count"), [(1, 4), (0, 3), (7, 3)])
def test_without_a_secret_a_forged_hello_ends_only_its_sender(number, count, capfd):
    run = AtAddress(None)
    with socket.create_connection(run.place, LIMIT) as link:
        assert call(link, run.key, number, count).startswith("no --")
    run.all_join()
    assert f"1 as process {number} of {count}" in capfd.readouterr().err


def test_without_a_secret_the_first_of_two_equal_process_ids_stays(capfd):
    run = AtAddress(None)
    with socket.create_connection(run.place, LIMIT) as second:
        first = run.pool.submit(run.join, 1)
        time.sleep(0.2)
        answer = call(second, run.key, 1, COUNT)
        assert answer == "no --process-id: two processes were started with 1; give each its own, from 0 to 2"
    channels = [run.join(2), first.result(LIMIT), run.hosting.result(LIMIT)]
    for channel in channels:
        channel.part()
    for channel in channels:
        channel.hang_up()
    assert "1 as process 1 of 3" in capfd.readouterr().err


@pytest.mark.parametrize("secret", [None, b"another of these"])
def test_a_process_with_another_secret_fails_at_once_and_the_others_continue(secret, capfd):
    run = AtAddress(SECRET)
    with pytest.raises(InputError) as caught:
        asyncio.run(connect(run.place_of(1), LIMIT, secret))
    assert str(caught.value) == (
        f"process 1 and process 0 at {run.address} have different secrets; give all processes of the run the same JPIPE_SECRET or "
        "--secret-file, or none of them any"
    )
    run.all_join()
    assert "1 with another secret" in capfd.readouterr().err


def test_a_timeout_reports_the_dropped_connections():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(*listener.getsockname())
    with ThreadPoolExecutor() as pool:
        hosting = pool.submit(Processes.join, rendezvous=Rendezvous(address, 0, 2), limit=0.5, secret=SECRET)
        with pytest.raises(InputError):
            asyncio.run(connect(Rendezvous(address, 1, 2), LIMIT, b"another of these"))
        assert str(hosting.exception(LIMIT)).endswith("or limit in Python; 1 connection was dropped (1 with another secret)")


@pytest.mark.parametrize("answer", [b"0" * 64 + b" go\n", b"go\n", b"no all is lost\n", b"%(proof)s go\n", b"x" * 10_000])
def test_nobody_else_can_be_process_0(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        address = Address(*listener.getsockname())

        def pretend():
            caller, _ = listener.accept()
            with caller, contextlib.suppress(ConnectionError):
                caller.recv(1000)
                caller.sendall(b"0" * 32 + b"\n")
                proof = caller.recv(1000).strip()
                caller.sendall(answer.replace(b"%(proof)s", proof))

        pretending = pool.submit(pretend)
        with pytest.raises(InputError, match="found another program at that port"):
            asyncio.run(connect(Rendezvous(address, 1, 2), LIMIT, SECRET))
        pretending.result(LIMIT)


def test_the_contents_of_jaxs_store_do_not_replace_the_secret():
    for secret, raises in (SECRET, pytest.raises(InputError, match="have different secrets")), (None, contextlib.nullcontext()):
        run = ByStore(secret)
        assert SECRET.decode() not in run.left.value
        with raises, socket.create_connection(run.place, LIMIT) as link:
            call(link, handshake.key(None, run.token), 7, COUNT)
        run.all_join()


@pytest.mark.parametrize("word", ['["127.0.0.1", 99999, "t"]', "[]", "{", '["h", "1", "t"]', "[" * 100_000])
def test_a_foreign_value_in_jaxs_store_is_reported(word):
    store = SharedStore()
    store.value = word
    with pytest.raises(InputError, match=r"JAX's store, key jpipe/processes: expected (HOST:PORT of process 0|a port)"):
        Channel(1, COUNT, Limits(), print, lambda: Beat("")).open(store.of(1), LIMIT)


def test_a_key_of_jaxs_store_that_is_in_use_is_reported():
    class FullClient:
        def key_value_set(self, key, value):
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS: Config key jpipe/processes/0 already exists.\nmore")

    state = types.SimpleNamespace(process_id=0, num_processes=2, coordinator_address="127.0.0.1:1", client=FullClient())
    with pytest.raises(InputError, match=r"process 0 cannot publish its address \(ALREADY_EXISTS\)"):
        Rendezvous.of_jax(state).open()


@pytest.mark.parametrize(
    ("coordinator", "bind", "listens"),
    [
        ("127.0.0.1:7", None, ("127.0.0.1", 7)),
        ("127.0.0.1:7", "0.0.0.0:9", ("127.0.0.1", 7)),
        ("localhost:7", None, ("127.0.0.1", 7)),
        ("[::1]:7", None, ("::1", 7)),
        ("10.0.0.1:7", None, None),
        ("node:7", None, None),
        ("node:7", "10.0.0.1:9", ("10.0.0.1", 9)),
    ],
)
def test_all_listen_at_a_loopback_address_where_the_coordinator_is_one(coordinator, bind, listens, monkeypatch, capsys):
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    monkeypatch.delenv(handshake.VARIABLE, raising=False)
    if bind is not None:
        monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", bind)
    calls = []
    calls = []

    class Joined(Processes):
        def __init__(self, place):
            calls.append(place._listen)

        def agree(self, facts):
            assert facts == {"JAX_MTLS_CERT_FILE, JAX_MTLS_KEY_FILE, JAX_MTLS_CA_FILE": "not set"}

    monkeypatch.setattr(distributed, "join_processes", lambda limit, wait, secret, place: Joined(place))
    monkeypatch.setattr(distributed, "_joined", None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **arguments: calls.append(arguments["coordinator_bind_address"]))
    monkeypatch.setattr(jax_internals, "keep_gloo_at", lambda host: calls.append(f"gloo at {host}"))
    for name in "jax_cpu_collectives_implementation", "jax_enable_preemption_service", "jax_enable_recoverability":
        monkeypatch.setitem(jax.config.values, name, jax.config.values[name])
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(distributed, "private_loopback", lambda: "127.7.7.7")
    distributed.start(Process(coordinator, 2, 0))
    local = coordinator[0] in "1l[" and not coordinator.startswith("10.")
    assert calls[0] == listens
    assert calls[1] == (None if listens is None else str(Address(*listens)))
    assert calls[2:] == ["gloo at 127.7.7.7"] * local
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (not local)
    assert all(line.startswith("jpipe: no secret is set: whoever reaches port 7 of this host") for line in lines)


def test_certificates_that_do_not_fit_are_refused_before_jax_aborts(tmp_path, monkeypatch):
    names = "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE"

    def set_certificates(*files):
        values = dict(zip(map(str.lower, names), files, strict=True))
        monkeypatch.setattr(distributed, "jax", types.SimpleNamespace(config=types.SimpleNamespace(values=values), __version__="0.12.0"))

    def refused(message):
        with pytest.raises(InputError, match=message):
            distributed.uses_certificates()

    set_certificates(None, None, None)
    assert not distributed.uses_certificates()
    set_certificates("chain", None, "authority")
    refused(
        "JAX_MTLS_CA_FILE: expected PEM files of a certificate, its key and its authority, found 'chain', '', 'authority': JAX needs all"
    )
    files = [tmp_path / name for name in ("chain", "key", "authority")]
    for text in None, "no certificate":
        for file in files if text else ():
            file.write_text(text)
        set_certificates(*map(str, files))
        refused("expected PEM files of a certificate, its key and its authority, found .*chain', .*key', .*authority': ")
    monkeypatch.setattr(ssl, "create_default_context", lambda cafile: types.SimpleNamespace(load_cert_chain=lambda *_, password: None))
    assert distributed.uses_certificates()
    monkeypatch.setattr(distributed, "jax", types.SimpleNamespace(config=types.SimpleNamespace(values={}), __version__="0.10.2"))
    assert not distributed.uses_certificates()
    monkeypatch.setenv(names[0], "chain")  # this JAX would go on without it
    refused("JAX 0.10.2 has no certificates, JAX 0.12 has; unset them, or install a newer JAX")


def test_certificates_may_differ_between_processes():
    names = "jax_mtls_cert_file", "jax_mtls_key_file", "jax_mtls_ca_file", "jax_mtls_peer_uri_prefix"
    assert all(_MAY_DIFFER.fullmatch(name) for name in (*names, "jax_distributed_verify_secure_credentials"))
    assert not {*names} & {*numeric_settings()}


def test_processes_with_and_without_certificates_do_not_start_jax(monkeypatch):
    class Joined(Processes):
        def __init__(self):
            self.reasons = []

        def agree(self, facts):
            raise InputError("JAX_MTLS_CERT_FILE differs")

        def stop(self, reason):
            self.reasons.append(reason)

    one = Joined()
    monkeypatch.setattr(distributed, "join_processes", lambda *_: one)
    monkeypatch.setattr(distributed, "_joined", None)
    monkeypatch.setattr(jax.distributed, "initialize", None)
    with pytest.raises(InputError, match="JAX_MTLS_CERT_FILE differs"):
        distributed.start(Process("127.0.0.1:7", 2, 0))
    assert one.reasons == ["JAX_MTLS_CERT_FILE differs"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_process_0_listens_where_it_is_told(host):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Rendezvous(Address("node", port), 0, 2, None if host == "::" else Address(host, port)).open() as listener:
        assert listener.getsockname()[:2] == (host, port)


def test_each_process_has_a_loopback_address_of_its_own_for_gloo(monkeypatch):
    address, other = distributed.private_loopback(), distributed.private_loopback()
    assert Address(address, 1).loopback
    assert Address(other, 1).loopback
    if sys.platform == "linux":
        assert len({address, other, "127.0.0.1"}) == 3
    with socket.create_server((address, 0)) as listener:
        assert listener.getsockname()[0] == address

    def refuses(address):
        raise OSError("Can't assign requested address")

    monkeypatch.setattr(socket, "create_server", refuses)
    assert distributed.private_loopback() == "127.0.0.1"


def test_gloo_listens_at_a_loopback_address(monkeypatch):
    from jax._src import xla_bridge
    from jaxlib import _jax

    registered, hostnames = {}, []
    monkeypatch.setattr(backend, "register_backend_factory", lambda name, make, **_: registered.update({name: make}))
    monkeypatch.setattr(_jax, "make_gloo_tcp_collectives", lambda **options: hostnames.append(options["hostname"]) or "gloo")
    monkeypatch.setattr(xla_bridge, "make_cpu_client", lambda collectives: collectives)
    jax_internals.keep_gloo_at("127.0.0.1")
    assert (registered["cpu"](), hostnames) == ("gloo", ["127.0.0.1"])


@pytest.mark.parametrize("process", [0, 1])
def test_programs_without_host_callbacks_are_kept_by_all_processes(process, monkeypatch):
    """JAX 0.10 passes the host callbacks of a program as well."""
    from jax._src import compilation_cache, compiler

    written = []
    monkeypatch.setattr(jax_internals, "distributed_state", lambda: types.SimpleNamespace(process_id=process))
    monkeypatch.setattr(compilation_cache, "put_executable_and_time", lambda key, *_: written.append(key))
    monkeypatch.setattr(compiler, "_cache_write", lambda key, *_: written.append(f"by JAX: {key}"))
    jax_internals.keep_programs_of_all()
    for key, more in ("new", ()), ("old", ([],)), ("calls back", ([print],)):
        compiler._cache_write(key, 9.0, "module", "backend", "executable", *more)
    assert written == (["new", "old"] if process else ["by JAX: new", "by JAX: old", "by JAX: calls back"])


DISTURBED = """
import pathlib, sys
import jax
from jpipe.processes import _connections
from jpipe_train import cli

def connect(self):
    raise jax.errors.JaxRuntimeError("Gloo context initialization failed: Connection closed by peer")

if sys.argv[-1] == "1" and not pathlib.Path("disturbed").exists():
    pathlib.Path("disturbed").touch()
    for kind in vars(_connections).values():
        if isinstance(kind, type) and hasattr(kind, "connect"):
            kind.connect = connect
sys.exit(cli.main(sys.argv[1:]))
"""

LAUNCHED = """
import sys
from jpipe_train.launch.local import launch
from jpipe_train.launch.local.launch_request import Request
request = Request(("train", "config.yaml"), 2, max_restarts=1)
sys.exit(launch.main(request, program=(sys.executable, "-c", sys.argv[1]), pause=0.0))
"""


@pytest.mark.slow
def test_a_start_in_which_gloo_is_disturbed_is_started_again(tmp_path):
    """In one process the connections fail at the first start, as they do when somebody else connects to gloo's ports."""
    (tmp_path / "text.txt").write_text("the quick brown fox " * 500)
    config = {
        "run": {"dir": "run"},
        "data": {"format": "bytes", "path": "text.txt"},
        "model": {"vocab_size": 256, "seq_len": 16, "width": 16, "depth": 2, "heads": 2},
        "train": {"steps": 2, "batch_size": 4, "eval_every": 2, "eval_batches": 1, "trace_batches": 0},
        "plan": {"num_stages": 2, "microbatches": 2},
        "log": [],
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    # The launcher forks, which no process may in which JAX has threads.
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHED, DISTURBED], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "the processes cannot be connected: Gloo context initialization failed" in printed
    assert "; start the run again" in printed
    assert re.search(r"process [01] ended with exit code 1; .*starting all again in 0 s \(1 of 1\)", printed)
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_a_secret_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(handshake.VARIABLE, raising=False)
    assert handshake.find_secret() is None
    monkeypatch.setenv(handshake.VARIABLE, "0123456789abcdef")
    assert handshake.find_secret() == b"0123456789abcdef"
    file, link = tmp_path / "secret", tmp_path / "link"
    file.write_bytes(b" of the file, of its owner\n")
    file.chmod(0o400)
    link.symlink_to(file)  # as Kubernetes mounts secrets
    assert handshake.find_secret(str(link)) == b"of the file, of its owner"


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"", 0o600, "expected a secret of 16 bytes or more, found 0; make one with: openssl rand -hex 32"),
        (b"fifteen bytes ..\n"[1:], 0o600, "expected a secret of 16 bytes or more, found 15; "),
        (b"x" * 20, 0o640, "expected a file that only its owner may read, found mode 0640; run chmod 600 on it, or give the secret by the"),
        (b"x" * 20, 0o604, "expected a file that only its owner may read, found mode 0604"),
        (b"x" * (2**20 + 1), 0o600, "cannot read it: it is larger than 1 MiB"),
        (None, 0, "cannot read it: No such file or directory"),
        ("folder", 0o700, "cannot read it: Is a directory; give a file that holds only the secret"),
        ("fifo", 0o600, "cannot read it: it is not a regular file; give a file that holds only the secret"),
    ],
)
def test_an_invalid_secret_file_is_refused(content, mode, message, tmp_path):
    file = tmp_path / "secret"
    if content == "folder":
        file.mkdir()
    elif content == "fifo":
        os.mkfifo(file)
    elif content is not None:
        file.write_bytes(content)
    if content is not None:
        file.chmod(mode)
    with pytest.raises(InputError) as caught:
        distributed.start(Process("127.0.0.1:1", 2, 1, 0.1, secret_file=str(file)))
    assert str(caught.value).startswith(f"secret file '{file}': {message}")


@pytest.mark.parametrize("value", ["", "short"])
def test_a_variable_that_holds_no_secret_is_refused(value, monkeypatch):
    monkeypatch.setenv(handshake.VARIABLE, value)
    with pytest.raises(InputError, match=f"JPIPE_SECRET: expected a secret of 16 bytes or more, found {len(value)}; "):
        distributed.start(Process("127.0.0.1:1", 2, 1, 0.1))
