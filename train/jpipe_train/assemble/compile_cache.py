"""Keep compiled programs for later runs in JAX's persistent compilation cache.

The cache holds machine code that later runs execute, so a folder is used only if no other user can write to it.
"""

import contextlib
import hashlib
import os
import platform
import stat
import warnings
from pathlib import Path

import jax

from jpipe import InputError
from jpipe.files import resolved

AUTO = "auto"  # the user's cache folder
_LARGEST = 4 * 1024**3  # bytes; if the cache is larger when a run begins, the oldest programs are removed
_REQUESTS, _HITS = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"

_counts = {_REQUESTS: 0, _HITS: 0}


def use(setting: str | None) -> str | None:
    """Make JAX keep the programs that it compiles from now on. If the user has set a cache folder for JAX, that folder is kept.

    `setting` is a folder, which must be usable (InputError), `AUTO`, or None for no cache. Return a message if it is `AUTO` and the user's
    cache folder cannot be used.
    """
    if setting is None or jax.config.values["jax_compilation_cache_dir"] is not None:
        return None
    try:
        folder = _private_folder(_default() if setting == AUTO else resolved(setting, "compile_cache"))
    except OSError as error:
        problem = f"compile_cache: '{error.filename}' cannot be used: {error.strerror}"
        if setting != AUTO:
            raise InputError(f"{problem}; choose another folder, or null") from None
        return f"{problem}; compiled programs are not kept"
    _remove_oldest(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a pipeline has many programs, most of them small
    # A killed process may leave a partial entry. JAX then warns and compiles the program.
    warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry", UserWarning)
    return None


class CacheCount:
    """Count the programs that JAX compiles from now on, and how many of them it finds in the cache."""

    def __init__(self) -> None:
        if _count not in _listening:
            jax.monitoring.register_event_listener(_count)
            _listening.append(_count)
        self._before = dict(_counts)

    def __str__(self) -> str:
        programs, hits = (_counts[event] - self._before[event] for event in (_REQUESTS, _HITS))
        if not hits:
            return ""
        return " (from the cache)" if hits == programs else f" ({hits} of {programs} programs from the cache)"


_listening: list[object] = []


def _count(event: str, **_: str | int) -> None:
    if event in _counts:
        _counts[event] += 1


def _default() -> Path:
    """Return the user's cache folder for this kind of processor; different machines may share a home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"  # the XDG standard says to ignore a relative path
    except RuntimeError:
        raise OSError(0, "there is no home folder", "~") from None
    try:
        str(home).encode()
    except UnicodeEncodeError:  # JAX takes text in UTF-8 only
        raise OSError(0, "its name is not UTF-8", os.fsencode(home).decode(errors="backslashreplace")) from None
    return home / "jpipe" / f"compiled-{_processor()}"


def _processor() -> str:
    features = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:8]


def _private_folder(folder: Path) -> Path:
    """Create the folder if necessary. Raise OSError if that fails, or if another user can write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(1, "its programs are executed, so it must belong to you, and no other user may write to it", str(folder))
    return folder


def _remove_oldest(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another run may remove entries at the same time
        entries = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(folder) if entry.is_file())
        size = sum(entry[1] for entry in entries)
        for _, each, path in entries:
            if size <= _LARGEST:
                return
            os.unlink(path)
            size -= each
