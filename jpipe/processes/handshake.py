"""The mutual authentication of processes: they share a secret, and each connection begins with a proof from both ends.

The end that connects speaks first, in lines of text:

    caller:    jpipe INDEX COUNT NONCE
    listener:  NONCE
    caller:    PROOF
    listener:  PROOF ANSWER, or the word `unknown`

A proof is an HMAC over the purpose of the connection, its author, INDEX, COUNT, both nonces, and the answer if there is one. So it is
good for one connection only, and in one direction. What follows on the connection is neither signed nor encrypted.

Nothing here needs JAX.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import selectors
import socket
import stat
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from jpipe.errors import InputError
from jpipe.files import open_to_read

__all__ = [
    "VARIABLE",
    "Caller",
    "Door",
    "NotOfThisRun",
    "UnknownHere",
    "call",
    "find_secret",
    "key",
]

VARIABLE = "JPIPE_SECRET"
SHORTEST = 16  # bytes of a secret: guesses can be tested against an intercepted proof

_LONGEST = 4096  # bytes of a secret, and of an answer
_HELLO = re.compile(rb"jpipe (\d{1,9}) (\d{1,9}) ([0-9a-f]{32})\n")
_NONCE = re.compile(rb"[0-9a-f]{32}\n")
_LONGEST_LINE = 128  # bytes of a line of a caller: none of the lines above is longer
_PATIENCE = 10.0  # seconds in which a caller must finish its proof
_MOST = 256  # unproved callers at a time; for one more the oldest is dropped
_UNKNOWN = b"unknown\n"


class UnknownHere(Exception):
    """The listener does not accept the proof: it has another secret."""


class NotOfThisRun(Exception):
    """The listener is another program, or does not prove that it has the secret."""


def find_secret(file: str | None = None) -> bytes | None:
    """Return the secret of this run, from `file` or else from the variable `JPIPE_SECRET`, or None.

    Args:
        file: a regular file that only its owner may read.

    Raises:
        InputError: a secret of less than 16 bytes, a file that others may read or that cannot be read.
    """
    if file is not None:
        where = f"secret file '{file}'"
        text = _read(file, where)
    elif VARIABLE in os.environ:
        where, text = VARIABLE, os.fsencode(os.environ[VARIABLE])
    else:
        return None
    if len(text := text.strip()) < SHORTEST:
        raise InputError(f"{where}: expected a secret of {SHORTEST} bytes or more, found {len(text)}; make one with: openssl rand -hex 32")
    return text


def key(secret: bytes | None, token: str = "") -> bytes:
    """Return the key for proofs: without a secret anybody with the token can make one.

    Args:
        secret: the secret of the run.
        token: the token of a part of the run, so that proofs of one part are not valid in another.
    """
    return hmac.digest(secret or b"", f"jpipe {token}".encode(), "sha256")


@dataclass(frozen=True)
class _Connection:
    """The facts that both ends know of a connection before any proof."""

    key: bytes
    purpose: str
    index: int
    count: int
    of_caller: bytes
    of_listener: bytes

    def proof(self, role: str, text: str = "") -> bytes:
        parts = (self.purpose, role, self.index, self.count, self.of_caller.decode(), self.of_listener.decode(), text)
        return hmac.new(self.key, " ".join(map(str, parts)).encode(), hashlib.sha256).hexdigest().encode()


def call(link: socket.socket, key: bytes, purpose: str, index: int, count: int, limit: float) -> str | None:
    """Introduce this process to the listener and return its answer, or None where the other end closes the connection before.

    Args:
        link: just connected; nothing that follows the answer is read from it.
        key: as the listener has it.
        purpose: the purpose of the connection, one word, as the listener has it.
        index: the index of this process.
        count: the number of processes, as the caller knows it.
        limit: seconds to wait for the answer.

    Raises:
        TimeoutError: the answer did not come in time.
        UnknownHere: the listener has another secret.
        NotOfThisRun: the listener is another program, or does not prove that it has the secret.
    """
    end = time.monotonic() + limit
    try:
        nonce = secrets.token_hex(16).encode()
        link.sendall(b"jpipe %d %d %s\n" % (index, count, nonce))
        if not (line := _line(link, end)):
            return None
        if not _NONCE.fullmatch(line):
            raise NotOfThisRun
        connection = _Connection(key, purpose, index, count, nonce, line.strip())
        link.sendall(connection.proof("caller") + b"\n")
        if not (line := _line(link, end)):
            return None
    except TimeoutError:  # an OSError too, but the caller handles it in another way
        raise
    except OSError:
        return None
    if line == _UNKNOWN:
        raise UnknownHere
    proof, _, answer = line.removesuffix(b"\n").partition(b" ")
    text = answer.decode(errors="replace")
    if not hmac.compare_digest(proof, connection.proof("listener", text)):
        raise NotOfThisRun
    return text


class _Refused(Exception):
    """The caller is dropped for this reason."""


class Caller:
    """A caller that has connected and proved to know the secret.

    Attributes:
        link: the connection, which does not block.
        index: the index of its process.
        count: the number of processes, as the caller knows it.
    """

    def __init__(self, link: socket.socket, connection: _Connection) -> None:
        self.link, self.index, self.count, self._connection = link, connection.index, connection.count, connection

    def answer(self, text: str) -> None:
        """Send the one answer, a line; a caller that has just left is noticed soon enough."""
        with contextlib.suppress(OSError):
            self.link.sendall(self._connection.proof("listener", text) + f" {text}\n".encode())


@dataclass(eq=False)
class _Waiting:
    """A caller that has not proved anything yet."""

    link: socket.socket
    end: float
    said: bytes = b""
    connection: _Connection | None = None


class Door:
    """A listening socket that admits callers who know the secret and drops all others, without harm to anybody else.

    Args:
        listener: is closed with this.
        key: see `key`.
        purpose: the purpose of the connections, one word.

    Attributes:
        dropped: how many connections were dropped, by the reason.
    """

    def __init__(self, listener: socket.socket, key: bytes, purpose: str) -> None:
        self._listener, self._key, self._purpose = listener, key, purpose
        self._waiting: dict[_Waiting, None] = {}  # in the order of arrival, and so of their deadlines
        self._selector = selectors.DefaultSelector()
        self.dropped: Counter[str] = Counter()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for waiting in list(self._waiting):
            self._drop(waiting, "that said nothing in time")
        self._selector.close()
        self._listener.close()

    def poll(self, seconds: float) -> list[Caller]:
        """Return the callers that have proved to know the secret, waiting up to a time for any event."""
        let_in = []
        # The listener comes last: a new caller may replace an old one, which must not be read from any more.
        for ready, _ in sorted(self._selector.select(seconds), key=lambda ready: ready[0].data is None):
            if ready.data is None:
                self._accept()
            elif caller := self._hear(ready.data):
                let_in.append(caller)
        now = time.monotonic()
        for waiting in [waiting for waiting in self._waiting if waiting.end < now]:
            self._drop(waiting, "that said nothing in time")
        return let_in

    def summary(self) -> str:
        """Describe the dropped callers, or return an empty string."""
        if not (total := self.dropped.total()):
            return ""
        reasons = ", ".join(f"{number} {reason}" for reason, number in self.dropped.most_common())
        return f"{total} connection{'s were' if total > 1 else ' was'} dropped ({reasons})"

    def _accept(self) -> None:
        for _ in range(_MOST):
            try:
                link, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it is gone already, or this process has too many files open
                if self._waiting:
                    self._drop(next(iter(self._waiting)), "beyond the most at a time")
                return
            link.setblocking(False)
            if len(self._waiting) >= _MOST:
                self._drop(next(iter(self._waiting)), "beyond the most at a time")
            waiting = _Waiting(link, time.monotonic() + _PATIENCE)
            self._waiting[waiting] = None
            self._selector.register(link, selectors.EVENT_READ, data=waiting)

    def _hear(self, waiting: _Waiting) -> Caller | None:
        """Read received bytes and return the caller, if it has now proved to know the secret."""
        try:
            connection = self._proved(waiting)
        except _Refused as refused:
            self._drop(waiting, str(refused))
            return None
        except BlockingIOError:
            return None
        except OSError:
            self._drop(waiting, "that closed early")
            return None
        if connection is None:
            return None
        self._selector.unregister(waiting.link)
        del self._waiting[waiting]
        return Caller(waiting.link, connection)

    def _proved(self, waiting: _Waiting) -> _Connection | None:
        data = waiting.link.recv(_LONGEST_LINE)
        if not data:
            raise _Refused("that closed early")
        waiting.said += data
        if not waiting.said.endswith(b"\n") and len(waiting.said) <= _LONGEST_LINE:
            return None
        line, waiting.said = waiting.said, b""
        if waiting.connection is not None:
            if not hmac.compare_digest(line, waiting.connection.proof("caller") + b"\n"):
                waiting.link.sendall(_UNKNOWN)
                raise _Refused("with another secret")
            return waiting.connection
        if (hello := _HELLO.fullmatch(line)) is None:
            raise _Refused("without a hello of jpipe's")
        nonce = secrets.token_hex(16).encode()
        waiting.connection = _Connection(self._key, self._purpose, int(hello[1]), int(hello[2]), hello[3], nonce)
        waiting.link.sendall(nonce + b"\n")
        return None

    def _drop(self, waiting: _Waiting, reason: str) -> None:
        self.dropped[reason] += 1
        del self._waiting[waiting]
        self._selector.unregister(waiting.link)
        waiting.link.close()


def _line(link: socket.socket, end: float) -> bytes:
    """Read a line with its end, and no byte more; return nothing if the other end closes the connection."""
    line = b""
    while not line.endswith(b"\n") and len(line) <= _LONGEST:
        link.settimeout(max(end - time.monotonic(), 0.001))
        if not (byte := link.recv(1)):
            return b""
        line += byte
    return line


def _read(file: str, where: str) -> bytes:
    try:
        with open_to_read(Path(file)) as opened:
            mode, text = os.fstat(opened.fileno()).st_mode, opened.read(_LONGEST + 1)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{where}: cannot read it: {getattr(error, 'strerror', None) or error}; give a file that holds the secret"
        ) from None
    if mode & 0o077:
        raise InputError(
            f"{where}: expected a file that only its owner may read, found mode {stat.S_IMODE(mode):04o}; "
            f"run chmod 600 on it, or give the secret by the variable {VARIABLE}"
        )
    if len(text) > _LONGEST:
        raise InputError(f"{where}: expected at most {_LONGEST} bytes; give a file that holds only the secret")
    return text
