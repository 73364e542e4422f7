"""Where processes meet before JAX connects them, so that whatever is wrong is said in one line by every one of them.

JAX's own runtime waits for all processes too, but when one does not come it ends the process by SIGABRT, with a stack trace of C++ and
without saying which. Process 0 listens at the address at which JAX's coordinator will be; the others tell it who they are. The message is
one line of text each way, `jpipe PROCESS OF` and `go` or `no REASON`; a stranger who calls is not answered.
"""

import contextlib
import errno
import re
import selectors
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from jpipe import InputError

_HELLO = re.compile(rb"jpipe (\d{1,9}) (\d{1,9})\n")
_LONGEST_ANSWER = 4096
_PATIENCE = 5.0  # seconds that process 0 may take to answer once its own limit is over
_RETRY = 0.2


class Address(NamedTuple):
    """Host and port of process 0, written `host:port`, an IPv6 host in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, where: str) -> "Address":
        """The address in `text`.

        Raises:
            InputError: anything else; the message begins with `where`.
        """
        match = re.fullmatch(r"(?:\[([\w:.%]+)\]|([\w.-]+)):(\d+)", text, re.ASCII)
        if not match:
            raise InputError(f"{where}: expected HOST:PORT of process 0, such as 10.0.0.1:9876, found {text!r}")
        if not 1 <= (port := int(match[3][:6])) <= 65535:
            raise InputError(f"{where}: expected a port from 1 to 65535, found {match[3]} in {text!r}")
        return cls(match[1] or match[2], port)


def host(address: Address, num_processes: int, limit: float) -> list[socket.socket]:
    """As process 0, wait until all others are there, and let them go on.

    Args:
        address: where the others look for this process; it listens at the port, on every network of this machine.
        num_processes: how many there are, this one included.
        limit: seconds to wait.

    Returns:
        An open connection to each of the others: it ends when that process does.

    Raises:
        InputError: the port is in use; some did not come, which are named; two have one number; their counts differ.
    """
    present: dict[int, socket.socket] = {}
    deadline = time.monotonic() + limit
    with _listen(address) as listener, selectors.DefaultSelector() as ready:
        ready.register(listener, selectors.EVENT_READ)
        try:
            while len(present) < num_processes - 1:
                if time.monotonic() > deadline:
                    _refuse(present.values(), _absent(set(range(1, num_processes)) - set(present), address, num_processes, limit))
                for key, _ in ready.select(_RETRY):
                    if key.fileobj is listener:
                        caller, _ = listener.accept()
                        caller.setblocking(False)
                        ready.register(caller, selectors.EVENT_READ, data=caller)
                    elif match := _HELLO.fullmatch(_read(key.data)):
                        _admit(key.data, int(match[1]), int(match[2]), num_processes, present)
                    else:  # a stranger, or a process that is gone, which may be started again
                        ready.unregister(key.data)
                        key.data.close()
                        present = {number: link for number, link in present.items() if link is not key.data}
        except BaseException:
            present = {}
            raise
        finally:
            for key in list(ready.get_map().values()):
                if key.data is not None and key.data not in present.values():
                    key.data.close()
    for link in present.values():
        link.setblocking(True)
        _send(link, "go")
    return list(present.values())


def join(address: Address, process_id: int, num_processes: int, limit: float) -> socket.socket:
    """As any other process, find process 0 and wait until it says that all are there.

    Args:
        address: where process 0 listens; until it does, this tries again and again.
        process_id: the number of this process, from 1.
        num_processes: how many there are.
        limit: seconds to try.

    Returns:
        An open connection to process 0: it ends when process 0 does.

    Raises:
        InputError: nobody listens there, or somebody else, or nothing is answered; what `host` raises in process 0.
    """
    deadline = time.monotonic() + limit
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            link = socket.create_connection((address.host, address.port), timeout=min(left, _PATIENCE))
        except OSError as error:
            reason = (error.strerror or str(error) or type(error).__name__).lower()
            time.sleep(_RETRY)
            continue
        try:
            answer = _ask(link, f"jpipe {process_id} {num_processes}\n", limit + _PATIENCE)
            if answer == "go":
                link.settimeout(None)
                return link
        except TimeoutError:
            link.close()
            raise InputError(
                f"process {process_id} had no answer from {address} within {limit + _PATIENCE:g} s; if process 0 is there, it still waits "
                "for others: give all the same --connect-limit; if another program uses that port, choose another one"
            ) from None
        except BaseException:
            link.close()
            raise
        link.close()
        if answer.startswith("no "):
            raise InputError(answer.removeprefix("no "))
        if answer:
            raise InputError(
                f"{address}: expected process 0 of this run, found another program at that port; choose another port, or end that program"
            )
        reason = "it closed the connection"
        time.sleep(_RETRY)
    raise InputError(
        f"process {process_id} cannot reach the coordinator, process 0, at {address} within {limit:g} s ({reason}); check that process 0 "
        "was started there, that the address is right and that no firewall is between; --connect-limit waits longer"
    )


def wait_until_closed(links: Iterable[socket.socket], limit: float) -> None:
    """Wait until the processes at the other ends closed their connections, at most `limit` seconds, and close ours."""
    deadline = time.monotonic() + limit
    for link in links:
        with link:
            link.settimeout(max(deadline - time.monotonic(), 0.001))
            _read(link)


def _listen(address: Address) -> socket.socket:
    """On all networks, as JAX's coordinator does, IPv4 and IPv6 where there is both."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", address.port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", address.port))
    except OSError as error:
        reason = "another program uses it" if error.errno == errno.EADDRINUSE else (error.strerror or str(error)).lower()
        raise InputError(
            f"process 0 cannot listen at port {address.port} of {address}: {reason}; choose another port, the same for all processes"
        ) from None


def _admit(caller: socket.socket, number: int, count: int, num_processes: int, present: dict[int, socket.socket]) -> None:
    """Count the process in, or refuse everybody."""
    everybody = [*present.values(), caller]
    if count != num_processes:
        _refuse(everybody, f"--num-processes: process {number} was started with {count}, process 0 with {num_processes}; give all the same")
    if number in present or number == 0:
        _refuse(everybody, f"--process-id: two processes were started with {number}; give each its own, from 0 to {num_processes - 1}")
    present[number] = caller


def _absent(missing: set[int], address: Address, num_processes: int, limit: float) -> str:
    named = f"{', '.join(map(str, sorted(missing)[:8]))}{', …' if len(missing) > 8 else ''}"
    one = len(missing) == 1
    return (
        f"process{'' if one else 'es'} {named} of {num_processes} did not come to {address} within {limit:g} s; check that "
        f"{'it was' if one else 'they were'} started, with the same coordinator, and can reach it; --connect-limit waits longer"
    )


def _refuse(everybody: Iterable[socket.socket], reason: str) -> NoReturn:
    for link in everybody:
        _send(link, f"no {reason}")
    raise InputError(reason)


def _ask(link: socket.socket, question: str, limit: float) -> str:
    """The one line that comes back; nothing if the other end goes. TimeoutError if it says nothing."""
    try:
        link.settimeout(limit)
        link.sendall(question.encode())
        with link.makefile("rb") as answers:
            return answers.readline(_LONGEST_ANSWER).decode(errors="replace").removesuffix("\n")
    except TimeoutError:  # an OSError too, but one that the caller tells apart
        raise
    except OSError:
        return ""


def _send(link: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # whoever went away in this moment is missed soon enough
        link.sendall(f"{line}\n".encode())


def _read(link: socket.socket) -> bytes:
    try:
        return link.recv(64)
    except OSError:
        return b""
