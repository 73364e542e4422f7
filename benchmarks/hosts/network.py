"""Hosts as network namespaces behind one switch, with links of limited bandwidth; needs Linux, root and iproute2.

The switch is also a namespace, with a bridge in it: nothing is set up outside the namespaces, so removing them removes everything.
"""

import fcntl
import os
import pathlib
import shutil
import socket
import subprocess
from collections.abc import Sequence
from typing import IO

PREFIX, SWITCH = "jpipe-bench-host", "jpipe-bench-switch"
_ETC, _LOCK = pathlib.Path("/etc/netns"), pathlib.Path("/run/jpipe-bench-hosts.lock")
_SECONDS = 20  # for one command of iproute2


class NoNetwork(Exception):
    """A requirement for hosts is missing; the message says what to do."""


class Network:
    """Hosts behind one switch, to use in a `with` statement: its end removes everything, with processes that still run in it.

    Namespaces that a killed run left behind are removed at the start.

    Args:
        hosts: how many.

    Raises:
        NoNetwork: no root, no iproute2, no right to make namespaces, or another run has them now.
    """

    def __init__(self, hosts: int) -> None:
        if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
            raise NoNetwork(f"expected the commands ip and tc, found no {missing[0]}; install iproute2 (a Linux package)")
        if os.geteuid() != 0:
            raise NoNetwork(f"expected root, who may make network namespaces, found user {os.geteuid()}; run it with sudo")
        self.hosts = range(hosts)
        self._lock = _take_lock()
        remove_all()
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        """Return the address of a host.

        Args:
            host: counted from 0.
        """
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command in a host.

        Args:
            host: counted from 0.
            command: what to run there.
        """
        return ["ip", "netns", "exec", _name(host), *command]

    def limit(self, bits_per_second: float | None) -> None:
        """Limit the bandwidth of all links, in each direction; None: no limit.

        Args:
            bits_per_second: bandwidth of each link between a host and the switch.
        """
        for host in self.hosts:
            for namespace, device in ((_name(host), "eth0"), (SWITCH, f"port{host}")):
                if bits_per_second is None:
                    _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root", check=False)
                else:
                    # The burst is small, but not smaller than the largest packet and the bytes of a clock tick.
                    burst = max(65_536, round(bits_per_second / 8 / 100))
                    shape = f"rate {round(bits_per_second)}bit burst {burst}b latency 100ms".split()
                    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *shape)

    def close(self) -> None:
        """Remove everything."""
        remove_all()
        self._lock.close()

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        _run("ip", "netns", "add", SWITCH)
        _run("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", SWITCH, "link", "set", "bridge", "up")
        for host in self.hosts:
            name, port = _name(host), f"port{host}"
            # JAX and gloo listen on the address that the host's name stands for: in each host its own.
            (_ETC / name).mkdir(parents=True)
            (_ETC / name / "hosts").write_text(f"127.0.0.1 localhost\n{self.address(host)} {socket.gethostname()}\n")
            _run("ip", "netns", "add", name)
            _run("ip", "-n", SWITCH, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", SWITCH, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")


def remove_all() -> None:
    """Remove the namespaces of this benchmark, of any run, with the processes in them."""
    listed = _run("ip", "netns", "list", check=False).split("\n")
    for name in (line.split()[0] for line in listed if line.strip()):
        if name == SWITCH or name.startswith(PREFIX):
            for process in _run("ip", "netns", "pids", name, check=False).split():
                _run("kill", "-KILL", process, check=False)
            _run("ip", "netns", "del", name)
    for folder in _ETC.glob(f"{PREFIX}*"):
        shutil.rmtree(folder)


def sent_bytes() -> int:
    """Return the bytes that the host of this process has sent so far, including headers."""
    for line in pathlib.Path("/proc/self/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == "eth0":
            return int(counters.split()[8])
    raise RuntimeError("this process runs in no host of the benchmark: there is no eth0")


def _name(host: int) -> str:
    return f"{PREFIX}{host}"


def _take_lock() -> IO[str]:
    """Take a lock that is held until it is closed or this process ends."""
    lock = _LOCK.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise NoNetwork("another run of this benchmark uses the hosts; wait for its end") from None
    return lock


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603 - ip, tc and kill
    if check and done.returncode:
        raise NoNetwork(f"expected '{' '.join(command)}' to work, found: {done.stderr.strip()}; are network namespaces allowed here?")
    return done.stdout
