"""The mutual authentication of processes: they share a secret, and each connection begins with a proof from both ends.

The end that connects speaks first, in lines of text:

    caller:    jpipe INDEX COUNT NONCE
    listener:  NONCE
    caller:    PROOF
    listener:  PROOF ANSWER, or the word `unknown`

A proof is an HMAC of its author (caller or listener), the first two lines, and the answer if there is one. So a proof is valid for one
connection and one direction only. Everything that follows on the connection is neither signed nor encrypted.

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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jpipe.errors import InputError
from jpipe.files import read_bytes

__all__ = [
    "VARIABLE",
    "Caller",
    "OtherProgram",
    "OtherSecret",
    "Refused",
    "call",
    "find_secret",
    "hear",
    "key",
]

VARIABLE = "JPIPE_SECRET"
SHORTEST = 16  # bytes of a secret; a shorter one could be guessed, because guesses can be tested on an intercepted proof

_LONGEST = 4096  # bytes of an answer
_HELLO = re.compile(rb"jpipe (\d{1,9}) (\d{1,9}) ([0-9a-f]{32})\n")
_NONCE = re.compile(rb"[0-9a-f]{32}\n")
_LONGEST_LINE = 128  # bytes of a line of a caller: none of the lines above is longer
_UNKNOWN = b"unknown\n"


class OtherSecret(Exception):
    """The listener does not accept the proof, because it has another secret."""


class OtherProgram(Exception):
    """The listener is another program, or does not prove that it has the secret."""


class Refused(Exception):
    """A stranger has connected, and is dropped for this reason."""


def find_secret(file: str | None = None) -> bytes | None:
    """Return the secret of this run from `file`, or without a file from the variable `JPIPE_SECRET`; None if there is neither.

    Args:
        file: a regular file that only its owner may read.

    Raises:
        InputError: the secret has less than 16 bytes, the file cannot be read, or other users may read it.
    """
    if file is None and VARIABLE not in os.environ:
        return None
    where = VARIABLE if file is None else f"secret file '{file}'"
    text = (os.fsencode(os.environ[VARIABLE]) if file is None else _read(file, where)).strip()
    if len(text) < SHORTEST:
        raise InputError(f"{where}: expected a secret of {SHORTEST} bytes or more, found {len(text)}; make one with: openssl rand -hex 32")
    return text


def key(secret: bytes | None, token: str = "") -> bytes:
    """Return the key for proofs. Without a secret, anybody who knows the token can compute it.

    Args:
        secret: the secret of the run.
        token: the token of a connection of the run, so that proofs for one token are not valid for another.
    """
    return hmac.digest(secret or b"", f"jpipe {token}".encode(), "sha256")


class _Proofs(NamedTuple):
    """Makes the proofs for one connection, from the key, the first line of the caller and the nonce of the listener."""

    key: bytes
    hello: bytes
    nonce: bytes

    def of(self, role: str, text: str = "") -> bytes:
        """Return the proof of the `caller`, or the proof of the `listener` for its answer `text`."""
        return hmac.new(self.key, b" ".join((role.encode(), self.hello, self.nonce, text.encode())), hashlib.sha256).hexdigest().encode()


async def call(link: socket.socket, key: bytes, index: int, count: int) -> str:
    """Introduce this process to the listener, and return its answer; "" if the other end closes the connection before it answers.

    Args:
        link: a new connection that does not block; nothing that follows the answer is read from it.
        key: the key for proofs, the same as the listener's.
        index: the index of this process.
        count: the number of processes, as the caller knows it.

    Raises:
        OtherSecret: the listener has another secret.
        OtherProgram: the listener is another program, or does not prove that it has the secret.
    """
    hello = b"jpipe %d %d %s\n" % (index, count, secrets.token_hex(16).encode())
    try:
        link.sendall(hello)
        if not (nonce := await _line(link, _LONGEST)):
            return ""
        if not _NONCE.fullmatch(nonce):
            raise OtherProgram
        proofs = _Proofs(key, hello, nonce)
        link.sendall(proofs.of("caller") + b"\n")
        if not (line := await _line(link, _LONGEST)):
            return ""
    except OSError:
        return ""
    if line == _UNKNOWN:
        raise OtherSecret
    proof, _, answer = line.removesuffix(b"\n").partition(b" ")
    text = answer.decode(errors="replace")
    if not hmac.compare_digest(proof, proofs.of("listener", text)):
        raise OtherProgram
    return text


@dataclass(frozen=True)
class Caller:
    """A caller that has connected and proved to know the secret.

    Attributes:
        link: the connection, which does not block.
        index: the index of its process.
        count: the number of processes, as the caller knows it.
    """

    link: socket.socket
    index: int
    count: int
    _proofs: _Proofs

    def answer(self, text: str) -> None:
        """Send the only answer, one line. Errors are ignored: if the caller has just disconnected, this is noticed soon."""
        with contextlib.suppress(OSError):
            self.link.sendall(self._proofs.of("listener", text) + f" {text}\n".encode())


async def hear(link: socket.socket, key: bytes) -> Caller:
    """Return the caller at a new connection after it has proved to know the secret. A stranger learns nothing about the run.

    Args:
        link: the connection, which does not block.
        key: the key for proofs, the same as the caller's.

    Raises:
        Refused: the caller is a stranger.
        OSError: the connection is broken.
    """
    if not (hello := await _line(link, _LONGEST_LINE)):
        raise Refused("that closed early")
    if (match := _HELLO.fullmatch(hello)) is None:
        raise Refused("without a hello of jpipe's")
    proofs = _Proofs(key, hello, secrets.token_hex(16).encode() + b"\n")
    link.sendall(proofs.nonce)
    if not (proof := await _line(link, _LONGEST_LINE)):
        raise Refused("that closed early")
    if not hmac.compare_digest(proof, proofs.of("caller") + b"\n"):
        link.sendall(_UNKNOWN)
        raise Refused("with another secret")
    return Caller(link, int(match[1]), int(match[2]), proofs)


async def _line(link: socket.socket, longest: int) -> bytes:
    """Read one line with its end, and no further byte; only the beginning of a line that is too long; b"" if the other end closes."""
    line = b""
    while not line.endswith(b"\n") and len(line) <= longest:
        if not (byte := await asyncio.get_running_loop().sock_recv(link, 1)):
            return b""
        line += byte
    return line


def _read(file: str, where: str) -> bytes:
    try:
        text, mode = read_bytes(Path(file), 2**20), os.stat(file).st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{where}: cannot read it: {reason}; give a file that holds only the secret") from None
    if mode & 0o077:
        raise InputError(
            f"{where}: expected a file that only its owner may read, found mode {stat.S_IMODE(mode):04o}; "
            f"run chmod 600 on it, or give the secret by the variable {VARIABLE}"
        )
    return text
