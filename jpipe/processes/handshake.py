"""The mutual authentication of processes: they share a secret, and each connection begins with a proof from both ends.

The end that connects speaks first, in lines of text:

    caller:    jpipe INDEX COUNT NONCE
    listener:  NONCE
    caller:    PROOF
    listener:  PROOF ANSWER, or the word `unknown`

A proof is an HMAC over its author, INDEX, COUNT, both nonces, and the answer if there is one. So it is good for one connection only, and
in one direction. What follows on the connection is neither signed nor encrypted.

Nothing here needs JAX.
"""

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from jpipe.errors import InputError
from jpipe.files import open_to_read

__all__ = [
    "VARIABLE",
    "Caller",
    "NotOfThisRun",
    "Refused",
    "UnknownHere",
    "call",
    "find_secret",
    "hear",
    "key",
]

VARIABLE = "JPIPE_SECRET"
SHORTEST = 16  # bytes of a secret: guesses can be tested against an intercepted proof

_LONGEST = 4096  # bytes of a secret, and of an answer
_HELLO = re.compile(rb"jpipe (\d{1,9}) (\d{1,9}) ([0-9a-f]{32})\n")
_NONCE = re.compile(rb"[0-9a-f]{32}\n")
_LONGEST_LINE = 128  # bytes of a line of a caller: none of the lines above is longer
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
    index: int
    count: int
    of_caller: bytes
    of_listener: bytes

    def proof(self, role: str, text: str = "") -> bytes:
        parts = (role, self.index, self.count, self.of_caller.decode(), self.of_listener.decode(), text)
        return hmac.new(self.key, " ".join(map(str, parts)).encode(), hashlib.sha256).hexdigest().encode()


def call(link: socket.socket, key: bytes, index: int, count: int, limit: float) -> str | None:
    """Introduce this process to the listener and return its answer, or None where the other end closes the connection before.

    Args:
        link: just connected; nothing that follows the answer is read from it.
        key: as the listener has it.
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
        connection = _Connection(key, index, count, nonce, line.strip())
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


class Refused(Exception):
    """A stranger called, who is dropped for this reason."""


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


async def hear(link: socket.socket, key: bytes) -> Caller:
    """Return who has just connected, once it has proved to know the secret; a stranger is told nothing.

    Args:
        link: the connection, which does not block.
        key: as the caller has it.

    Raises:
        Refused: the caller is a stranger.
        OSError: the connection is broken.
    """
    if (hello := _HELLO.fullmatch(await _heard(link))) is None:
        raise Refused("without a hello of jpipe's")
    nonce = secrets.token_hex(16).encode()
    connection = _Connection(key, int(hello[1]), int(hello[2]), hello[3], nonce)
    link.sendall(nonce + b"\n")
    if not hmac.compare_digest(await _heard(link), connection.proof("caller") + b"\n"):
        link.sendall(_UNKNOWN)
        raise Refused("with another secret")
    return Caller(link, connection)


async def _heard(link: socket.socket) -> bytes:
    """Return a line of a caller, who says no more before the answer, or the beginning of one that is too long."""
    line = b""
    while not line.endswith(b"\n") and len(line) <= _LONGEST_LINE:
        if not (data := await asyncio.get_running_loop().sock_recv(link, _LONGEST_LINE)):
            raise Refused("that closed early")
        line += data
    return line


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
        raise InputError(where=where, expected=f"at most {_LONGEST} bytes", change="give a file that holds only the secret")
    return text
