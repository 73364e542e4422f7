"""Let the processes of a run meet before JAX connects them, so that each reports a problem in one line.

JAX's own runtime also waits for all processes, but if one does not connect, JAX ends the process by SIGABRT, with a C++ stack trace and
without naming the missing one. Process 0 listens on the address of JAX's coordinator; the other processes send their numbers and
authenticate (`jpipe.processes.handshake`). The answer is `go` or `no REASON`. Connections of strangers are dropped and counted.
"""

import contextlib
import errno
import re
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from jpipe import InputError
from jpipe.processes import handshake
from jpipe.processes.addresses import listen_everywhere
from jpipe.processes.handshake import Caller, Door

_PURPOSE = "meeting"  # the purpose of these connections in the handshake
_ANSWER_LIMIT = 5.0  # seconds that process 0 may take to answer after its own limit
_RETRY = 0.2
_DID_NOT_CONNECT = "did not connect to"


class NotConnected(InputError):
    """Processes have not connected, perhaps because some were late."""

    may_pass = True  # if all are restarted


class Address(NamedTuple):
    """Host and port of process 0, written `host:port`, with an IPv6 host in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, where: str) -> "Address":
        """Parse an address.

        Raises:
            InputError: `text` is not an address; the message begins with `where`.
        """
        match = re.fullmatch(r"(?:\[([\w:.%]+)\]|([\w.-]+)):(\d+)", text, re.ASCII)
        if not match:
            raise InputError(f"{where}: expected HOST:PORT of process 0, such as 10.0.0.1:9876, found {text!r}")
        if not 1 <= (port := int(match[3][:6])) <= 65535:
            raise InputError(f"{where}: expected a port from 1 to 65535, found {match[3]} in {text!r}")
        return cls(match[1] or match[2], port)


class Meeting(NamedTuple):
    """The result of the rendezvous in process 0.

    Attributes:
        links: an open connection to each other process, which ends when that process ends.
        dropped: the number of dropped connections and the reasons, as text; empty if there were none.
    """

    links: list[socket.socket]
    dropped: str


def host(
    address: Address,
    num_processes: int,
    limit: float,
    secret: bytes | None = None,
    listen: Address | None = None,
    certificates: bool = False,
) -> Meeting:
    """As process 0, wait until all other processes have connected, and let them continue.

    Args:
        address: the address to which the other processes connect.
        num_processes: the number of processes, including this one.
        limit: seconds to wait.
        secret: the secret of all processes. Without one anybody can pose as one of the other processes.
        listen: the address on which this process listens; by default the port of `address`, on every network of this machine.
        certificates: whether JAX's connections use certificates; processes with a different setting fail.

    Raises:
        InputError: the port is in use; processes did not connect (the message names them); with a secret also: two have the same number,
            or counts differ.
    """
    present: dict[int, Caller] = {}
    deadline = time.monotonic() + limit
    with Door(_listen(address, listen), handshake.key(secret), _PURPOSE) as door:
        try:
            while len(present) < num_processes - 1:
                if time.monotonic() > deadline:
                    missing = _describe_missing(set(range(1, num_processes)) - set(present), address, num_processes, limit)
                    _reject_all(present.values(), "; ".join(filter(None, [missing, door.summary()])))
                for caller in door.poll(_RETRY):
                    if (problem := _problem(caller, num_processes, present)) is None:
                        present[caller.index] = caller
                    elif secret is not None:  # a mistake of the user, not of a stranger
                        _reject_all([*present.values(), caller], problem)
                    else:
                        caller.answer(f"no {problem}")
                        caller.link.close()
                        door.dropped[f"as process {caller.index} of {caller.count}"] += 1
                present = {number: caller for number, caller in present.items() if _is_waiting(caller.link)}
        except BaseException:
            for caller in present.values():
                caller.link.close()
            raise
    for caller in present.values():
        caller.link.setblocking(True)
        caller.answer(_go(certificates))
    return Meeting([caller.link for caller in present.values()], door.summary())


def join(
    address: Address, process_id: int, num_processes: int, limit: float, secret: bytes | None = None, certificates: bool = False
) -> socket.socket:
    """As another process, connect to process 0 and wait until all have connected.

    Args:
        address: the address of process 0; this tries again until it listens.
        process_id: the number of this process, from 1.
        num_processes: the number of processes.
        limit: seconds to try.
        secret: the secret of all processes.
        certificates: whether JAX's connections use certificates here.

    Returns:
        An open connection to process 0, which ends when process 0 ends.

    Raises:
        InputError: nobody listens there, or another program does, process 0 has another secret or does not answer; or what `host` raises
            in process 0.
    """
    deadline = time.monotonic() + limit
    reason = "no answer"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            link = socket.create_connection((address.host, address.port), timeout=min(remaining, _ANSWER_LIMIT))
        except OSError as error:
            reason = (error.strerror or str(error) or type(error).__name__).lower()
            time.sleep(_RETRY)
            continue
        answer = _ask(link, address, process_id, num_processes, limit, secret)
        if answer == _go(certificates):
            link.settimeout(None)
            return link
        link.close()
        if answer == _go(not certificates):
            local, first = ("certificates", "none") if certificates else ("no certificates", "some")
            raise InputError(
                f"process {process_id} has {local}, process 0 has {first}; "
                "set JAX_MTLS_CERT_FILE, JAX_MTLS_KEY_FILE and JAX_MTLS_CA_FILE for all processes, or for none"
            )
        if answer is not None:
            raise (NotConnected if _DID_NOT_CONNECT in answer else InputError)(answer.removeprefix("no "))
        reason = "it closed the connection"
        time.sleep(_RETRY)
    raise NotConnected(
        f"process {process_id} cannot reach the coordinator, process 0, at {address} within {limit:g} s ({reason}); check that process 0 "
        "was started there, that the address is right and that no firewall is between; --connect-limit waits longer"
    )


def wait_until_closed(links: Iterable[socket.socket], limit: float) -> None:
    """Wait at most `limit` seconds until the other processes have closed their connections, and close this end."""
    deadline = time.monotonic() + limit
    for link in links:
        with link, contextlib.suppress(OSError):
            link.settimeout(max(deadline - time.monotonic(), 0.001))
            link.recv(64)


def _go(certificates: bool) -> str:
    """Return the answer that lets a process continue."""
    return "go with certificates" if certificates else "go"


def _listen(address: Address, listen: Address | None) -> socket.socket:
    """Listen on one address, or on all networks, as JAX's coordinator does."""
    host, port = listen or ("::", address.port)
    try:
        if host == "::":
            return listen_everywhere(port)
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = "another program uses it" if error.errno == errno.EADDRINUSE else (error.strerror or str(error)).lower()
        raise InputError(
            f"process 0 cannot listen at port {port} of {address}: {reason}; choose another port, the same for all processes"
        ) from None


def _problem(caller: Caller, num_processes: int, present: dict[int, Caller]) -> str | None:
    """Return why a caller is rejected, or None."""
    if caller.count != num_processes:
        return f"--num-processes: process {caller.index} was started with {caller.count}, process 0 with {num_processes}; give all the same"
    if caller.index in present or not 0 < caller.index < num_processes:
        return f"--process-id: two processes were started with {caller.index}; give each its own, from 0 to {num_processes - 1}"
    return None


def _is_waiting(link: socket.socket) -> bool:
    """Return whether a caller still waits for the answer; if it ended, it may have been restarted."""
    try:
        link.recv(1)  # the end of the connection, or data that no process of a run sends
    except BlockingIOError:
        return True
    except OSError:
        pass
    link.close()
    return False


def _describe_missing(missing: set[int], address: Address, num_processes: int, limit: float) -> str:
    named = f"{', '.join(map(str, sorted(missing)[:8]))}{', …' if len(missing) > 8 else ''}"
    single = len(missing) == 1
    return (
        f"process{'' if single else 'es'} {named} of {num_processes} {_DID_NOT_CONNECT} {address} within {limit:g} s; check that "
        f"{'it was' if single else 'they were'} started, with the same coordinator, and can reach it; --connect-limit waits longer"
    )


def _reject_all(callers: Iterable[Caller], reason: str) -> NoReturn:
    for caller in callers:
        caller.answer(f"no {reason}")
        caller.link.close()
    raise (NotConnected if _DID_NOT_CONNECT in reason else InputError)(reason)


def _ask(link: socket.socket, address: Address, process_id: int, num_processes: int, limit: float, secret: bytes | None) -> str | None:
    """Return the rejection of process 0, or None if it lets this process continue."""
    try:
        return handshake.call(link, handshake.key(secret), _PURPOSE, process_id, num_processes, limit + _ANSWER_LIMIT)
    except TimeoutError:
        problem = (
            f"process {process_id} had no answer from {address} within {limit + _ANSWER_LIMIT:g} s; if process 0 runs there, it still "
            "waits for other processes: give all the same --connect-limit; if another program uses that port, choose another one"
        )
    except handshake.UnknownHere:
        problem = (
            f"process {process_id} and process 0 at {address} have different secrets; give all processes of the run the same "
            f"{handshake.VARIABLE} or --secret-file, or none of them any"
        )
    except handshake.NotOfThisRun:
        problem = f"{address}: expected process 0 of this run, found another program at that port; choose another port, or end that program"
    except BaseException:
        link.close()
        raise
    link.close()
    raise InputError(problem)
