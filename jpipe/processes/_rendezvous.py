"""How the processes of a run find each other: at the address of process 0, which all are given, or which it leaves in JAX's store."""

import asyncio
import errno
import ipaddress
import math
import os
import re
import secrets
import socket
import time
from asyncio import StreamReader, StreamWriter
from collections import Counter
from typing import Any, NamedTuple

from jpipe.errors import InputError
from jpipe.processes import handshake, jax_internals
from jpipe.processes._coordinator import named
from jpipe.processes.handshake import Caller

ANSWER_LIMIT = 5.0  # seconds that process 0's answer may take after its limit has passed
_RETRY = 0.2
_PATIENCE = 10.0  # seconds within which a caller must finish its proof
_MOST = 256  # the most callers at a time that lack a proof; of more, the oldest is dropped
_LONGEST_LINE, _LONGEST_ANSWER = 128, 4096  # bytes, of a caller before its proof and of process 0
_KEY = "jpipe/processes"  # of JAX's key-value store
_LONGER = "to wait longer, raise --connect-limit, or limit in Python"


class NotConnected(InputError):
    """Processes have not connected, perhaps because some were late."""

    may_pass = True  # joining may succeed if all processes are restarted


class Address(NamedTuple):
    """The `host` and the `port` where process 0 listens. The text form is `host:port`, with an IPv6 host in brackets."""

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
            raise InputError(where=where, expected="HOST:PORT of process 0, such as 10.0.0.1:9876", found=repr(text))
        if not 1 <= (port := int(match[3][:6])) <= 65535:
            raise InputError(where=where, expected="a port from 1 to 65535", found=f"{match[3]} in {text!r}")
        return cls(match[1] or match[2], port)

    @property
    def loopback(self) -> "Address | None":
        """This address if only its own machine can reach it, at `localhost` or a loopback address; else None. No other name is resolved."""
        host = "127.0.0.1" if self.host == "localhost" else self.host
        try:
            return Address(host, self.port) if ipaddress.ip_address(host).is_loopback else None
        except ValueError:
            return None


class Rendezvous:
    """The place where the processes of a run find each other.

    Args:
        address: the address of process 0; with a store, its port is not known yet.
        index: the number of this process.
        count: the number of processes.
        listen: the address on which process 0 listens; by default the port of `address`, on every network of its host.
        store: the client of JAX's key-value store, in which process 0 leaves its address and a token; None if all know the address.

    Attributes:
        token: a part of the key for proofs. In a run without a secret, every process that can read the token can prove to belong to the
            run.
    """

    def __init__(self, address: Address, index: int, count: int, listen: Address | None = None, store: Any = None) -> None:
        self.address, self.index, self.count, self._listen, self._store, self.token = address, index, count, listen, store, ""

    @classmethod
    def of_jax(cls, state: Any = None) -> "Rendezvous":
        """Return the rendezvous by the store of `jax.distributed`, on the host of JAX's coordinator, which all processes have reached."""
        state = jax_internals.distributed_state() if state is None else state
        address = Address((state.coordinator_address or "").rpartition(":")[0].strip("[]"), 0)
        return cls(address, state.process_id, state.num_processes, address.loopback, state.client)

    def open(self) -> socket.socket:
        """Listen; process 0 calls this.

        Raises:
            InputError: the port is in use, the host of process 0 does not have the address, or its address cannot be published.
        """
        host, port = self._listen or ("", self.address.port)
        everywhere = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if everywhere or ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, dualstack_ipv6=everywhere)
        except OSError as error:
            reason = "another program uses it" if error.errno == errno.EADDRINUSE else (error.strerror or str(error)).lower()
            raise InputError(
                f"process 0 cannot listen at port {port} of {self.address}: {reason}; choose another port, the same for all processes"
            ) from None
        if self._store is not None:
            self.address, self.token = Address(self.address.host, listener.getsockname()[1]), secrets.token_hex(16)
            try:
                self._store.key_value_set(_KEY, f"{self.address} {self.token}")
            except RuntimeError as error:
                listener.close()
                raise InputError(
                    f"process 0 cannot publish its address ({_status(error)}): the key exists already; "
                    "start the run again, on a network that strangers cannot reach"
                ) from None
        return listener

    def find(self, seconds: float) -> None:
        """Wait until `address` and `token` are known; the other processes call this.

        Raises:
            InputError: process 0 did not publish them in time, or somebody else did.
        """
        if self._store is None:
            return
        try:
            text = self._store.blocking_key_value_get(_KEY, math.ceil(seconds * 1000))
        except RuntimeError as error:
            raise InputError(
                f"process {self.index} did not get the address of process 0 within {seconds:g} s ({_status(error)}); see what "
                "process 0 says, and let all processes of a run join at the same place"
            ) from None
        address, _, self.token = text[:1000].partition(" ")
        self.address = Address.parse(address, f"JAX's store, key {_KEY}")


async def connect(at: Rendezvous, limit: float, secret: bytes | None) -> tuple[StreamReader, StreamWriter]:
    """Connect to process 0, and return when all processes have connected; processes other than process 0 call this.

    Raises:
        InputError: no program or another program listens at the address; or process 0 has another secret, does not answer, or refuses.
    """
    deadline, reason = time.monotonic() + limit, "no answer"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(min(remaining, ANSWER_LIMIT)):
                reader, writer = await asyncio.open_connection(*at.address, limit=_LONGEST_ANSWER)
        except OSError as error:
            known = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            reason = (known or str(error) or "no answer").lower()
        else:
            if await _may_go(at, reader, writer, limit, secret):
                return reader, writer
            reason = "it closed the connection"
        await asyncio.sleep(_RETRY)
    raise NotConnected(
        f"process {at.index} cannot reach the coordinator, process 0, at {at.address} within {limit:g} s ({reason}); check that "
        f"process 0 was started there, that the address is right and that no firewall is between; {_LONGER}"
    )


async def _may_go(at: Rendezvous, reader: StreamReader, writer: StreamWriter, limit: float, secret: bytes | None) -> bool:
    """Introduce this process to process 0, and return whether all have connected; False if the connection was closed."""
    answer = ""
    try:
        async with asyncio.timeout(limit + ANSWER_LIMIT):
            answer = await handshake.call(reader, writer, handshake.key(secret, at.token), at.index, at.count, at.address)
    except TimeoutError:
        raise InputError(
            f"process {at.index} had no answer from {at.address} within {limit + ANSWER_LIMIT:g} s; if process 0 runs there, it still "
            "waits for other processes: give all the same --connect-limit; if another program uses that port, choose another one"
        ) from None
    finally:
        if answer != "go":
            writer.close()
    word, _, refusal = answer.partition(" ")
    if refusal:
        raise (NotConnected if word == "late" else InputError)(refusal)
    return answer == "go"


class Host:
    """Process 0 while the other processes connect. It drops and counts strangers' connections, which do not disturb the processes.

    Without a secret anybody can pose as one of the other processes.
    """

    def __init__(self, at: Rendezvous, secret: bytes | None) -> None:
        self._at, self._secret, self._key = at, secret, b""
        self._connections: dict[asyncio.Task[None], bool] = {}  # in the order of arrival; whether it no longer waits for a proof
        self._dropped: Counter[str] = Counter()
        self._present: dict[int, Caller] = {}
        self._mistake = ""  # a user's mistake, which ends all processes
        self._changed = asyncio.Event()
        self._is_open = True

    async def gathered(self, limit: float) -> list[Caller]:
        """Listen until all other processes have connected, and return these processes; each waits for an answer.

        Raises:
            InputError: process 0 cannot listen; some processes did not connect; or, with a secret, two have the same number, or counts of
                processes differ. The processes that have connected get the same message.
        """
        listener = self._at.open()
        self._key = handshake.key(self._secret, self._at.token)
        server = await asyncio.start_server(self._receive, sock=listener, limit=_LONGEST_LINE)
        try:
            async with asyncio.timeout(limit):
                while len(self._present) < self._at.count - 1 and not self._mistake:
                    await self._changed.wait()
                    self._changed.clear()
            reason = InputError(self._mistake) if self._mistake else None
        except TimeoutError:
            reason = NotConnected("; ".join(filter(None, [self._missing(limit), self._summary()])))
        finally:
            self._is_open = False
            server.close()
            for connection in self._connections:
                connection.cancel("that said nothing in time")
            await asyncio.gather(*self._connections, return_exceptions=True)
        if reason is not None:
            for caller in self._present.values():
                caller.answer(f"{'late' if isinstance(reason, NotConnected) else 'no'} {reason}")
                caller.writer.close()
            raise reason
        if summary := self._summary():
            os.write(2, f"jpipe: {summary} while the processes connected\n".encode())
        return list(self._present.values())

    async def _receive(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Drop a stranger, or count a process as present until it disconnects, because it may be restarted."""
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = False
        task.add_done_callback(self._connections.pop)
        if len(unproved := [each for each, is_over in self._connections.items() if not is_over]) > _MOST:
            self._connections[unproved[0]] = True
            unproved[0].cancel("beyond the most at a time")
        try:
            async with asyncio.timeout(_PATIENCE if self._is_open else 0):
                caller = await handshake.hear(reader, writer, self._key)
            reason = ""
        except (handshake.Refused, asyncio.CancelledError) as refused:
            reason = str(refused)
        except TimeoutError:
            reason = "that said nothing in time"
        self._connections[task] = True
        if reason:
            self._dropped[reason] += 1
        elif mistake := self._mistake_of(caller):
            caller.answer(f"no {mistake}")
            if self._secret is None:
                self._dropped[f"as process {caller.index} of {caller.count}"] += 1
            else:
                self._mistake = mistake
        else:
            self._present[caller.index] = caller
            self._changed.set()
            try:
                await reader.read(1)  # returns if the other end closes; processes of a run send nothing
            except asyncio.CancelledError:  # all have connected
                return
            except OSError:
                pass
            del self._present[caller.index]
        self._changed.set()
        writer.close()

    def _mistake_of(self, caller: Caller) -> str:
        """Return a message if the index or the count of a process is wrong; otherwise an empty string."""
        count = self._at.count
        if caller.count != count:
            return f"--num-processes: process {caller.index} was started with {caller.count}, process 0 with {count}; give all the same"
        if caller.index in self._present or not 0 < caller.index < count:
            return f"--process-id: two processes were started with {caller.index}; give each its own, from 0 to {count - 1}"
        return ""

    def _summary(self) -> str:
        """Describe the dropped connections, or return an empty string."""
        if not (total := self._dropped.total()):
            return ""
        reasons = ", ".join(f"{number} {reason}" for reason, number in self._dropped.most_common())
        return f"{total} connection{'s were' if total > 1 else ' was'} dropped ({reasons})"

    def _missing(self, limit: float) -> str:
        absent = sorted({*range(1, self._at.count)} - self._present.keys())
        who, they = named(absent[:8]) + (", …" if len(absent) > 8 else ""), "it was" if len(absent) == 1 else "they were"
        return (
            f"{who} of {self._at.count} did not connect to {self._at.address} within {limit:g} s; "
            f"check that {they} started, with the same coordinator, and can reach it; {_LONGER}"
        )


def _status(error: RuntimeError) -> str:
    """Return the first words of an error of JAX, which name its kind."""
    return (str(error).splitlines() or [""])[0].partition(":")[0]
