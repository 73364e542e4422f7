"""What the operating system gives a process: cores, memory, shared memory, and a folder to write into."""

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jpipe.files import TEMPORARY, create
from jpipe_planner.machine.local import host_memory, usable_cores

ROOT = Path("/")
_SIZE = 2**24  # bytes of a test file: writing it takes some milliseconds on a disk, a second on a slow network
_UNLIMITED = 2**60  # bytes: control groups of version 1 write a number that large where there is no limit


def cores(root: Path = ROOT) -> dict[str, Any]:
    """Return the cores of the `machine`, those that are `usable` by this process, and the `limit` of its control group."""
    limits = [limit for folder in _groups(root, "cpu") if (limit := _cpu_limit(folder)) is not None]
    return {"machine": os.cpu_count(), "usable": usable_cores(), "limit": min(limits, default=None)}


def memory(root: Path = ROOT) -> dict[str, Any]:
    """Return bytes of host memory: `total`, `available`, and the `limit` of the control group, if any, which lowers the other two."""
    total, available = _of_machine(root)
    limits = [limit for folder in _groups(root, "memory") if (limit := _memory_limit(folder)) is not None]
    for most, used in limits:
        total, available = min(total, most), min(available, max(most - used, 0.0))
    return {"total": total, "available": available, "limit": min((most for most, _ in limits), default=None)}


def shared_memory(folder: Path = ROOT / "dev" / "shm") -> dict[str, Any]:
    """Return the bytes of shared memory: `total` and `available`.

    Raises:
        OSError: there is none.
    """
    usage = shutil.disk_usage(folder)
    return {"total": usage.total, "available": usage.free}


def writable(path: Path, root: Path = ROOT, size: int = _SIZE) -> dict[str, Any]:
    """Write `size` bytes to disk in a folder, or in its nearest existing parent, and remove the file.

    Returns:
        The folder (`path`), the folder that was written to (`existing`), whether these are the same (`exists`), the kind of `filesystem`,
        the bytes that are `available`, and the speed (`bytes_per_second`).

    Raises:
        OSError: the folder cannot be written.
    """
    existing = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    available = shutil.disk_usage(existing).free
    probe = existing / temporary_name()
    content = os.urandom(2**20)  # a file system may compress what repeats, but not within so much
    began = time.perf_counter()
    try:
        with create(probe) as file:
            for _ in range(max(size // len(content), 1)):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
    finally:
        probe.unlink(missing_ok=True)
    return {
        "path": str(path),
        "existing": str(existing),
        "exists": existing == path,
        "filesystem": filesystem(existing, root),
        "available": available,
        "bytes_per_second": max(size // len(content), 1) * len(content) / max(seconds, 1e-6),
    }


def temporary_name() -> str:
    """Return a name for a file that nobody can guess."""
    return TEMPORARY.replace("*", secrets.token_hex(8))


def filesystem(folder: Path, root: Path = ROOT) -> str | None:
    """Return the kind of file system that a folder is on, such as `ext4`, `nfs4` or `tmpfs`; None if the system does not say."""
    kinds = {}
    for line in _lines(root / "proc" / "self" / "mounts"):
        _, point, kind, *_ = (*line.split(" "), "", "", "")
        kinds[Path(point.replace("\\040", " "))] = kind  # of several mounts at one place the last one is seen
    return next((kinds[parent] for parent in (folder, *folder.parents) if parent in kinds), None)


def _of_machine(root: Path) -> tuple[float, float]:
    """Return the total and the available bytes of memory of the machine."""
    sizes = {name: value.split()[0] for name, _, value in (line.partition(":") for line in _lines(root / "proc" / "meminfo")) if value}
    if {"MemTotal", "MemAvailable"} <= sizes.keys():
        return 1024.0 * int(sizes["MemTotal"]), 1024.0 * int(sizes["MemAvailable"])
    return host_memory(), host_memory()


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and its parents (version 2), or of one controller's group (version 1)."""
    base = root / "sys" / "fs" / "cgroup"
    for line in _lines(root / "proc" / "self" / "cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = base / controller if controllers else base
        folder = top / path.lstrip("/")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def _cpu_limit(folder: Path) -> float | None:
    """Return the mean number of cores that a control group may use, or None."""
    quota, period = (*_words(folder / "cpu.max"), "", "")[:2]
    if not quota:
        quota, period = ("".join(_words(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _memory_limit(folder: Path) -> tuple[float, float] | None:
    """Return the limit of a control group and its use in bytes, without files that can be dropped; None without a limit."""
    for most, used, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = "".join(_words(folder / most)), "".join(_words(folder / used))
        if limit.isdecimal() and int(limit) < _UNLIMITED:
            statistics = dict(line.split() for line in _lines(folder / "memory.stat") if len(line.split()) == 2)
            usage_now = int(usage) if usage.isdecimal() else 0
            return float(limit), max(usage_now - int(statistics.get(dropped, 0)), 0)
    return None


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    """Return the lines of a system file, or [] if it does not exist."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
