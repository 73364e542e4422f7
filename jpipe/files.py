"""How jpipe, planner and train name, read and write files.

A folder may come from a stranger, or be one in which strangers may make files: nothing is written through a symbolic link, under a name
that somebody can know before, or half.
"""

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

from jpipe.errors import InputError

TEMPORARY = ".jpipe-*.tmp"
"""The names of files that are being written; what a killed process leaves of them can be removed."""


def expanded(path: str, where: str) -> Path:
    """A path with the home folder in place of `~`.

    Args:
        path: as a user gives it.
        where: the config's key or the option that it was given by, for messages.

    Raises:
        InputError: there is no such home folder, or no file can have that name.
    """
    try:
        os.fsencode(path)
        if "\0" in path:
            raise ValueError("a null character")
    except ValueError:  # lone surrogates that stand for no byte, from an escape in YAML or JSON
        raise InputError(f"{where}: {path!a} has a character that no path can have; choose another name") from None
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{where}: {path!r} begins with a user's home folder that is not known; write the folder out") from None


def resolved(path: str, where: str) -> Path:
    """An absolute path without `..`, symbolic links and `~`; what is not there yet is made of the name alone.

    Args:
        path: as a user gives it.
        where: as in `expanded`.

    Raises:
        InputError: no file can have that name, or TensorStore, which writes checkpoints, cannot: it takes UTF-8 only.
    """
    try:
        found = expanded(path, where).resolve()
        str(found).encode()
        if any(part.is_symlink() for part in (found, *found.parents)):  # from Python 3.13 on `resolve` leaves a circle as it is
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(found))
    except UnicodeEncodeError:
        raise InputError(f"{where}: expected a path in UTF-8, found {os.fsencode(found)!r}; rename the folder, or choose another") from None
    except (OSError, RuntimeError) as error:  # symbolic links in a circle
        raise InputError(f"{where}: cannot find '{path}': {getattr(error, 'strerror', None) or error}; choose another") from None
    return found


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8) so that a reader finds all of it or, if that fails or process or machine die, none of it.

    A file of that name is replaced; so is a symbolic link, whatever it points to. When this returns the file is on the disk.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    unfinished = path.with_name(TEMPORARY.replace("*", secrets.token_hex(8)))
    try:
        with open(_open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    to_disk(path.parent)


def open_to_append(path: Path) -> BinaryIO:
    """A file that is written at its end, unbuffered; it is made where there is none.

    Raises:
        OSError: it cannot be opened; a symbolic link is refused, and so is a FIFO or a device, which could hold up the run forever.
    """
    special = OSError(errno.EINVAL, "it is not a regular file", str(path))
    try:
        number = _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK)
    except OSError as error:
        raise (special if error.errno == errno.ENXIO else error) from None  # a FIFO that nobody reads
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise special
    os.set_blocking(number, True)
    return open(number, "ab", buffering=0)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where it is not there.

    Raises:
        OSError: it cannot be made; a symbolic link is refused, whatever it points to.
    """
    path.mkdir(parents=True, exist_ok=True)
    refuse_link(path)


def refuse_link(path: Path) -> None:
    """Refuse a symbolic link.

    Raises:
        OSError: it is one.
    """
    if path.is_symlink():
        raise _linked(path)


def read_bytes(path: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes; a symbolic link to one is followed.

    A FIFO or a device is refused at once: reading it could take forever.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = os.fstat(number).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if os.fstat(number).st_size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most // 2**20} MiB, the limit for such a file", str(path))
        with open(number, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(number)


def read_text(path: Path, most: int, cannot: str, hint: str, other: str) -> str:
    """Read a regular file of text in UTF-8 that a user named.

    Args:
        path: the file.
        most: bytes, whole MiB; a larger file is refused.
        cannot: the message begins with it, such as "plan.file: cannot read 'plan.json'"; then comes what the system says.
        hint: the message ends with it.
        other: the message where the file is no text.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        return read_bytes(path, most).decode("utf-8")
    except OSError as error:
        raise InputError(f"{cannot}: {error.strerror}; {hint}") from None
    except UnicodeDecodeError:
        raise InputError(other) from None


def to_disk(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def shown(path: Path) -> str:
    """A path as a message has it: without the current folder, where it is inside of that."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:  # "Too many levels of symbolic links" is of no help
            raise _linked(path) from None
        raise


def _linked(path: Path) -> OSError:
    return OSError(errno.ELOOP, "it is a symbolic link, which jpipe does not follow there", str(path))
