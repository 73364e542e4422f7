"""The mutual authentication of processes: they share a secret, and each connection begins with a proof from both ends.

The end that connects speaks first, in lines of text:

    caller:    jpipe INDEX COUNT NONCE
    listener:  NONCE
    caller:    PROOF
    listener:  PROOF ANSWER, or the word `unknown`

A proof is an HMAC of its author (caller or listener), the first two lines, and the answer if there is one. So a proof is valid only for one
connection and one direction. What follows on the connection is neither signed nor encrypted.

Nothing here needs JAX.
"""

import hmac
import os
import re
import secrets
import stat
from asyncio import IncompleteReadError, LimitOverrunError, StreamReader, StreamWriter
from dataclasses import dataclass
from pathlib import Path

from jpipe.errors import InputError
from jpipe.files import read_bytes

__all__ = [
    "VARIABLE",
    "Caller",
    "Refused",
    "call",
    "find_secret",
    "hear",
    "key",
]

VARIABLE = "JPIPE_SECRET"
SHORTEST = 16  # the least bytes of a secret; a shorter one could be guessed, by testing guesses on an intercepted proof

_HELLO = re.compile(rb"jpipe (\d{1,9}) (\d{1,9}) ([0-9a-f]{32})\n")
_NONCE = re.compile(rb"[0-9a-f]{32}\n")
_UNKNOWN = b"unknown\n"


class Refused(Exception):
    """A stranger has connected, and is dropped for this reason."""


def find_secret(file: str | None = None) -> bytes | None:
    """Return the secret of this run from `file`, or without a file from the variable `JPIPE_SECRET`; None if there is neither.

    Raise InputError if it has less than 16 bytes, the file is not regular or cannot be read, or other users may read it.
    """
    if file is None and VARIABLE not in os.environ:
        return None
    where = VARIABLE if file is None else f"secret file '{file}'"
    text = (os.fsencode(os.environ[VARIABLE]) if file is None else _read(file, where)).strip()
    if len(text) < SHORTEST:
        raise InputError(f"{where}: expected a secret of {SHORTEST} bytes or more, found {len(text)}; make one with: openssl rand -hex 32")
    return text


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


def key(secret: bytes | None, token: str = "") -> bytes:
    """Return the key for proofs. Without a secret, anybody who knows the token can compute it.

    Proofs for one token are not valid for another.
    """
    return hmac.digest(secret or b"", f"jpipe {token}".encode(), "sha256")


def _proof(key: bytes, author: bytes, begin: bytes, answer: str = "") -> bytes:
    """Return the proof of the `caller`, or of the `listener` for its answer, on the connection that began with the lines `begin`."""
    return hmac.digest(key, b" ".join((author, begin, answer.encode())), "sha256").hex().encode()


async def call(reader: StreamReader, writer: StreamWriter, key: bytes, index: int, count: int, at: object = "") -> str:
    """Introduce this process to the listener, and return its answer; "" if the other end closes the connection before it answers.

    Args:
        reader: what comes from the new connection.
        writer: what goes to it.
        key: the key for proofs, the same at both ends.
        index: the index of this process.
        count: the number of processes, as the caller knows it.
        at: the address of the listener, for messages.

    Raises:
        InputError: the listener has another secret, is another program, or does not prove that it has the secret.
    """
    stranger = f"{at}: expected process 0 of this run, found another program at that port; choose another port, or end that program"
    hello = b"jpipe %d %d %s\n" % (index, count, secrets.token_hex(16).encode())
    try:
        writer.write(hello)
        if not _NONCE.fullmatch(nonce := await reader.readuntil()):
            raise InputError(stranger)
        writer.write(_proof(key, b"caller", hello + nonce) + b"\n")
        line = await reader.readuntil()
    except (IncompleteReadError, OSError):
        return ""
    except LimitOverrunError:
        raise InputError(stranger) from None
    if line == _UNKNOWN:
        raise InputError(
            f"process {index} and process 0 at {at} have different secrets; give all processes of the run the same {VARIABLE} or "
            "--secret-file, or none of them any"
        )
    proof, _, answer = line.removesuffix(b"\n").partition(b" ")
    text = answer.decode(errors="replace")
    if not hmac.compare_digest(proof, _proof(key, b"listener", hello + nonce, text)):
        raise InputError(stranger)
    return text


@dataclass(frozen=True)
class Caller:
    """A caller that has connected and proved to know the secret, with the index of its process and its number of processes."""

    reader: StreamReader
    writer: StreamWriter
    index: int
    count: int
    _key: bytes
    _begin: bytes

    def answer(self, text: str) -> None:
        """Send the only answer, one line."""
        self.writer.write(_proof(self._key, b"listener", self._begin, text) + f" {text}\n".encode())


async def hear(reader: StreamReader, writer: StreamWriter, key: bytes) -> Caller:
    """Return the caller at a new connection after it has proved to know the secret; the arguments are as for `call`.

    A stranger learns nothing about the run, and sends no line longer than the limit of `reader`.

    Raises:
        Refused: the caller is a stranger.
    """
    try:
        if (match := _HELLO.fullmatch(hello := await reader.readuntil())) is None:
            raise Refused("without a hello of jpipe's")
        nonce = secrets.token_hex(16).encode() + b"\n"
        writer.write(nonce)
        proof = await reader.readuntil()
    except LimitOverrunError:
        raise Refused("without a hello of jpipe's") from None
    except (IncompleteReadError, OSError):
        raise Refused("that closed early") from None
    if not hmac.compare_digest(proof, _proof(key, b"caller", hello + nonce) + b"\n"):
        writer.write(_UNKNOWN)
        raise Refused("with another secret")
    return Caller(reader, writer, int(match[1]), int(match[2]), key, hello + nonce)
