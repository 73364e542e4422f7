"""How the processes of a run find each other: at an address that all are given, or at one that process 0 leaves in a store."""

import asyncio
import contextlib
import errno
import itertools
import json
import math
import os
import re
import secrets
import socket
import time
from collections import Counter
from typing import Any, NamedTuple

from jpipe.errors import InputError
from jpipe.processes import handshake, jax_internals
from jpipe.processes.addresses import is_loopback, listen_everywhere
from jpipe.processes.handshake import Caller

ANSWER_LIMIT = 5.0  # seconds that process 0's answer may take after its limit has passed
_RETRY = 0.2
_PATIENCE = 10.0  # seconds in which a caller must finish its proof
_MOST = 256  # callers at a time without a proof; if one more comes, the oldest is dropped
_LOOK = 0.01  # seconds until a listener that cannot accept tries again


class NotConnected(InputError):
    """Processes have not connected, perhaps because some were late."""

    may_pass = True  # if all processes are restarted


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


class Rendezvous:
    """The address of process 0, which all processes are given, to find each other there.

    Args:
        address: the address of process 0.
        index: the number of this process.
        count: the number of processes.
        listen: the address on which process 0 listens; by default the port of `address`, on every network of its host.

    Attributes:
        token: a part of the key for proofs. In a run without a secret, every process that can read the token can prove to belong to the
            run.
    """

    token = ""
    retries = True
    """Whether another process tries to connect again if process 0 does not listen yet."""
    longer = "--connect-limit waits longer"
    """What a user can do to let the processes wait longer for each other."""

    def __init__(self, address: Address, index: int, count: int, listen: Address | None = None) -> None:
        self.address, self.index, self.count, self._listen = address, index, count, listen

    def open(self) -> socket.socket:
        """Listen; process 0 calls this.

        Raises:
            InputError: the port is in use, or the host of process 0 does not have the address.
        """
        host, port = self._listen or ("::", self.address.port)
        try:
            if host == "::":
                return listen_everywhere(port)
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            reason = "another program uses it" if error.errno == errno.EADDRINUSE else (error.strerror or str(error)).lower()
            raise InputError(
                f"process 0 cannot listen at port {port} of {self.address}: {reason}; choose another port, the same for all processes"
            ) from None

    def find(self, seconds: float) -> None:
        """Wait until `address` and `token` are known; the other processes call this.

        Raises:
            InputError: process 0 did not publish them in time.
        """


class JaxStore(Rendezvous):
    """The key-value store of `jax.distributed`, in which process 0 leaves the address where it listens, and a token.

    The host in the address is the host of JAX's coordinator, which all other processes have already reached. All processes must create
    equally many stores, because these are numbered.

    Args:
        state: the state of `jax.distributed`.
    """

    retries = False
    longer = "let all processes join at the same place, or with a longer limit"
    _joins = itertools.count()

    def __init__(self, state: Any = None) -> None:
        state = jax_internals.distributed_state() if state is None else state
        host = (state.coordinator_address or "").rpartition(":")[0].strip("[]")
        listen = Address("127.0.0.1" if host == "localhost" else host, 0) if is_loopback(host) else None
        super().__init__(Address(host, 0), state.process_id, state.num_processes, listen)
        self._client, self._key = state.client, f"jpipe/processes/{next(self._joins)}"

    def open(self) -> socket.socket:
        listener, self.token = super().open(), secrets.token_hex(16)
        self.address = Address(self.address.host, listener.getsockname()[1])
        try:
            self._client.key_value_set(self._key, json.dumps([*self.address, self.token]))
        except RuntimeError as error:
            listener.close()
            raise InputError(
                f"process 0 cannot publish its address ({_status(error)}): the key exists already; "
                "start the run again, on a network that strangers cannot reach"
            ) from None
        return listener

    def find(self, seconds: float) -> None:
        try:
            text = self._client.blocking_key_value_get(self._key, math.ceil(seconds * 1000))
        except RuntimeError as error:
            raise InputError(
                f"process {self.index} did not get the address of process 0 within {seconds:g} s ({_status(error)}); see what "
                "process 0 says, and let all processes of a run join at the same place"
            ) from None
        try:
            host, port, token = json.loads(text)
            if not (isinstance(host, str) and isinstance(token, str) and isinstance(port, int) and 0 < port < 65536):
                raise ValueError
        except (ValueError, TypeError, RecursionError):
            raise InputError(
                f"expected the address of process 0 in JAX's store, found {text[:80]!r}: somebody else has written there"
            ) from None
        self.address, self.token = Address(host, port), token


async def connect(at: Rendezvous, limit: float, secret: bytes | None) -> socket.socket:
    """Connect to process 0, and return when all processes have connected; processes other than process 0 call this.

    Raises:
        InputError: no program or another program listens at the address; or process 0 has another secret, does not answer, or refuses.
    """
    deadline, key, reason = time.monotonic() + limit, handshake.key(secret, at.token), "no answer"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            link = await asyncio.to_thread(socket.create_connection, at.address, timeout=min(remaining, ANSWER_LIMIT))
        except OSError as error:
            reason = (error.strerror or str(error) or type(error).__name__).lower()
        else:
            link.setblocking(False)
            word = ""
            try:
                async with asyncio.timeout(limit + ANSWER_LIMIT):
                    word, _, refusal = (await handshake.call(link, key, at.index, at.count)).partition(" ")
            except (TimeoutError, handshake.OtherSecret, handshake.OtherProgram) as error:
                raise InputError(_problem(error, at, limit)) from None
            finally:
                if word != "go":
                    link.close()
            if word == "go":
                return link
            if word:
                raise (NotConnected if word == "late" else InputError)(refusal)
            reason = "it closed the connection"
        if not at.retries:
            break
        await asyncio.sleep(_RETRY)
    raise NotConnected(
        f"process {at.index} cannot reach the coordinator, process 0, at {at.address} within {limit:g} s ({reason}); check that "
        f"process 0 was started there, that the address is right and that no firewall is between; {at.longer}"
    )


def _problem(error: Exception, at: Rendezvous, limit: float) -> str:
    """Return the message for a failed handshake with the program at the address of process 0."""
    if isinstance(error, TimeoutError):
        return (
            f"process {at.index} had no answer from {at.address} within {limit + ANSWER_LIMIT:g} s; if process 0 runs there, it still "
            "waits for other processes: give all the same --connect-limit; if another program uses that port, choose another one"
        )
    if isinstance(error, handshake.OtherSecret):
        return (
            f"process {at.index} and process 0 at {at.address} have different secrets; give all processes of the run the same "
            f"{handshake.VARIABLE} or --secret-file, or none of them any"
        )
    return f"{at.address}: expected process 0 of this run, found another program at that port; choose another port, or end that program"


class Host:
    """Process 0 while the other processes connect. It drops and counts connections of strangers, which do not disturb the processes.

    Args:
        at: the address of process 0.
        secret: the secret that all processes share. Without a secret anybody can pose as one of the other processes.
    """

    def __init__(self, at: Rendezvous, secret: bytes | None) -> None:
        self._at, self._secret, self._key = at, secret, handshake.key(secret, at.token)
        self._unproved: dict[asyncio.Task[None], None] = {}  # in the order of arrival
        self._dropped: Counter[str] = Counter()
        self._present: dict[int, Caller] = {}
        self._mistake = ""  # a mistake of the user, which ends all processes
        self._changed = asyncio.Event()

    async def gathered(self, listener: socket.socket, limit: float) -> list[Caller]:
        """Wait until all other processes have connected, close the listener, and return these processes; each waits for an answer.

        Raises:
            InputError: some processes did not connect; or, with a secret, two have the same number, or counts of processes differ. The
                processes that have connected get the same message.
        """
        tasks: set[asyncio.Task[None]] = set()
        tasks.add(asyncio.create_task(self._accept(listener, tasks)))
        try:
            async with asyncio.timeout(limit):
                while len(self._present) < self._at.count - 1 and not self._mistake:
                    await self._changed.wait()
                    self._changed.clear()
            reason = InputError(self._mistake) if self._mistake else None
        except TimeoutError:
            reason = NotConnected("; ".join(filter(None, [self._missing(limit), self._summary()])))
        finally:
            for task in tasks:
                task.cancel("that said nothing in time")
            await asyncio.gather(*tasks, return_exceptions=True)
            listener.close()
        if reason is not None:
            for caller in self._present.values():
                caller.answer(f"{'late' if isinstance(reason, NotConnected) else 'no'} {reason}")
                caller.link.close()
            raise reason
        if summary := self._summary():
            os.write(2, f"jpipe: {summary} while the processes connected\n".encode())
        return list(self._present.values())

    async def _accept(self, listener: socket.socket, tasks: set[asyncio.Task[None]]) -> None:
        listener.setblocking(False)
        while True:
            try:
                link, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # the caller is gone already, or this process has too many open files
                self._drop_oldest()
                await asyncio.sleep(_LOOK)
                continue
            link.setblocking(False)
            if len(self._unproved) >= _MOST:
                self._drop_oldest()
            task = asyncio.create_task(self._receive(link))
            self._unproved[task] = None
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(0)  # so that the task begins before it can be cancelled

    def _drop_oldest(self) -> None:
        if self._unproved:
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.cancel("beyond the most at a time")

    async def _receive(self, link: socket.socket) -> None:
        """Drop a stranger, or count a process as present until it disconnects, since it may be restarted."""
        reason = ""
        try:
            async with asyncio.timeout(_PATIENCE):
                caller = await handshake.hear(link, self._key)
        except (handshake.Refused, asyncio.CancelledError) as refused:
            reason = str(refused)
        except TimeoutError:
            reason = "that said nothing in time"
        except OSError:
            reason = "that closed early"
        finally:
            self._unproved.pop(asyncio.current_task(), None)  # type: ignore[arg-type]  # there is one
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
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_recv(link, 1)  # returns if the other end closes; processes of a run send nothing
            del self._present[caller.index]
        self._changed.set()
        link.close()

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
        named = f"{', '.join(map(str, absent[:8]))}{', …' if len(absent) > 8 else ''}"
        single = len(absent) == 1
        return (
            f"process{'' if single else 'es'} {named} of {self._at.count} did not connect to {self._at.address} within {limit:g} s; "
            f"check that {'it was' if single else 'they were'} started, with the same coordinator, and can reach it; {self._at.longer}"
        )


def _status(error: RuntimeError) -> str:
    """Return the first words of an error of JAX, which name its kind."""
    return (str(error).splitlines() or [""])[0].partition(":")[0]
