"""Functions that name, read and write the files of jpipe, jpipe_planner and jpipe_train safely.

Strangers may have made a folder, or may be able to write to it. So nothing is written through a symbolic link or under a name that can be
guessed, and a file is written completely or not at all.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from jpipe.errors import InputError, short

__all__ = [
    "TEMPORARY",
    "create",
    "expanded",
    "make_folder",
    "new_folder",
    "open_to_append",
    "open_to_read",
    "read_bytes",
    "read_text",
    "resolved",
    "shown",
    "unusable",
    "unused",
    "write_atomically",
    "writing",
]

TEMPORARY = ".jpipe-*.tmp"
"""The pattern of names of files that are being written. Such files of a killed process can be removed."""


def unusable(path: str) -> str | None:
    """Return why a path cannot be one of this machine's files, and what to change; None if it can. The disk is not read.

    Args:
        path: a path from a user.

    Returns:
        The end of a message, or None.

    Example:
        >>> unusable("s3://bucket/run")
        "expected a path on this machine, found the URL 's3://bucket/run'; copy what is there to a folder or mount it, and give its path"
    """
    try:
        os.fsencode(path)
        if "\0" in path:
            raise ValueError("a null character")
    except ValueError:  # surrogates that encode no byte, from an escape in YAML or JSON
        return f"{short(path)} has a character that no path can have; choose another name"
    if _URL.match(path):
        return (
            f"expected a path on this machine, found the URL {short(path)}; copy what is there to a folder or mount it, and give its path"
        )
    try:
        Path(path).expanduser()
    except RuntimeError:
        return f"{path!r} begins with an unknown user's home folder; give the full path"
    return None


_URL = re.compile(r"\s*[^\s/\\][^/\\]+:/")
"""The beginning of a URL, also with one slash, as `Path` writes it. `C:/` is no URL, and `./` in front makes any text a path."""


def expanded(path: str, where: str) -> Path:
    """Return a path in which the home folder replaces `~`.

    Args:
        path: a path from a user.
        where: the config key or option that gives the path, for messages.

    Raises:
        InputError: the path is impossible on this machine: it is a URL, is too long, or begins with an unknown user's home folder.
    """
    if problem := unusable(path):
        raise InputError(problem, where=where)
    file = Path(path).expanduser()
    try:
        os.lstat(file)
    except OSError as error:  # the file may be missing or unreadable, which the code that reads it reports
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"cannot find '{path}': {error.strerror}", where=where, change="choose another") from None
    return file


def resolved(path: str, where: str) -> Path:
    """Return an absolute path without `..`, symbolic links and `~`; parts that do not exist are kept as they are.

    Args:
        path: a path from a user.
        where: as in `expanded`.

    Raises:
        InputError: no file can have this path, or the path is not UTF-8, which TensorStore requires to write checkpoints.
    """
    try:
        real = expanded(path, where).resolve()
        str(real).encode()
        if any(part.is_symlink() for part in (real, *real.parents)):  # since Python 3.13 `resolve` raises no error for a cycle of links
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(real))
    except UnicodeEncodeError:
        raise InputError(
            where=where, expected="a path in UTF-8", found=repr(os.fsencode(real)), change="rename the folder, or choose another"
        ) from None
    except (OSError, RuntimeError) as error:  # a cycle of symbolic links
        raise InputError(
            f"cannot find '{path}': {getattr(error, 'strerror', None) or error}", where=where, change="choose another"
        ) from None
    return real


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file completely, or not at all if writing fails or the process or machine dies. On return the file is on disk.

    Text is written as UTF-8. An existing file is replaced. A symbolic link is replaced itself, not the file that it points to.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    unfinished = path.with_name(TEMPORARY.replace("*", secrets.token_hex(8)))
    try:
        with create(unfinished) as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    to_disk(path.parent)


@contextlib.contextmanager
def writing(where: str, name: object) -> Iterator[None]:
    """Raise `InputError` if a file that the user has named cannot be written.

    Args:
        where: the option that names the file, for messages.
        name: the name of the file, for messages.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{where}: cannot write '{name}': {error.strerror}; choose another file") from None


def create(path: Path) -> BinaryIO:
    """Create a file and open it for writing.

    Raises:
        OSError: the file cannot be created, or the name already exists, even as a symbolic link.
    """
    return open(_open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


def unused(path: str, where: str) -> Path:
    """Return the absolute path of a file or folder that does not exist yet. Symbolic links in its parent folders are followed.

    Args:
        path: a path from a user.
        where: the option that gives the path, for messages.

    Raises:
        InputError: the path already exists, or no file can have it.
    """
    new = expanded(path, where)
    new = resolved(str(new.parent), where) / new.name
    if os.path.lexists(new):
        raise InputError(f"'{path}' already exists", where=where, change="choose another name, or remove it first")
    return new


@contextlib.contextmanager
def new_folder(path: Path, where: str) -> Iterator[Path]:
    """Yield a temporary folder to write into. At the end it is renamed to `path` and is on disk; after an error it is removed.

    Missing parent folders are created.

    Args:
        path: the name of the new folder, from `unused`.
        where: the option that gives the path, for messages.

    Raises:
        InputError: the folder or a file in it cannot be written.
    """
    unfinished = path.with_name(TEMPORARY.replace("*", secrets.token_hex(8)))
    try:
        make_folder(path.parent)
        unfinished.mkdir()
        try:
            yield unfinished
            for inner in (*unfinished.iterdir(), unfinished):
                to_disk(inner)
            os.rename(unfinished, path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        to_disk(path.parent)
    except OSError as error:
        raise InputError(f"cannot write '{shown(path)}': {error.strerror}", where=where, change="choose another folder") from None


def open_to_append(path: Path) -> BinaryIO:
    """Open a file to append to it, without a buffer; create the file if it does not exist.

    Raises:
        OSError: the file cannot be opened, or is a symbolic link, a FIFO or a device. A FIFO or a device could block forever.
    """
    try:
        number = _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK)
    except OSError as error:
        raise (_not_regular(path) if error.errno == errno.ENXIO else error) from None  # a FIFO without a reader
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise _not_regular(path)
    os.set_blocking(number, True)
    return open(number, "ab", buffering=0)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless the folder exists.

    Raises:
        OSError: the folder cannot be created, or the path is a symbolic link, even to a folder.
    """
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise _linked(path)


def open_to_read(path: Path) -> BufferedReader:
    """Open a regular file, or a symbolic link to a regular file, to read it.

    Raises:
        OSError: the file cannot be opened, or is not a regular file. A FIFO, a device or a socket could block forever.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise (_not_regular(path) if error.errno == errno.ENXIO else error) from None  # a socket
    try:
        kind = os.fstat(number).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise _not_regular(path)
        return open(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_bytes(path: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes, opened as in `open_to_read`.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger than `most`.
    """
    with open_to_read(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most // 2**20} MiB, the limit for such a file", str(path))
        return file.read(most)


def read_text(path: Path, most: int, cannot: str, hint: str, other: str, where: str = "") -> str:
    """Read a regular text file in UTF-8, and raise `InputError` with a message for the user if that fails.

    Args:
        path: the file.
        most: the largest allowed size in bytes, a multiple of a MiB.
        cannot: the start of the message if the file cannot be read, such as "plan.file: cannot read 'plan.json'"; the system's message
            follows.
        hint: the end of this message.
        other: the message if the file is not text.
        where: the place to put in front of both messages, if they do not begin with a place.

    Raises:
        InputError: the file cannot be read, is larger than `most`, or is not text.
    """
    try:
        return read_bytes(path, most).decode("utf-8")
    except OSError as error:
        raise InputError(f"{cannot}: {error.strerror}", where=where, change=hint) from None
    except UnicodeDecodeError:
        raise InputError(other, where=where) from None


def to_disk(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def shown(path: Path) -> str:
    """Return a path for messages: relative to the current folder if the path is inside this folder."""
    try:
        current = Path.cwd()
    except OSError:  # it was removed
        return str(path)
    return str(path.relative_to(current) if path.is_relative_to(current) else path)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:  # its message, "Too many levels of symbolic links", does not help
            raise _linked(path) from None
        raise


def _linked(path: Path) -> OSError:
    return OSError(errno.ELOOP, "it is a symbolic link, which jpipe does not follow there", str(path))


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))
