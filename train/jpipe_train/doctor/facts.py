"""The facts of this process and its host, as plain data for other processes."""

import glob
import hashlib
import importlib.metadata
import os
import platform
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jpipe
from jpipe.files import TEMPORARY, create, resolved
from jpipe_planner.machine.local import host_memory
from jpipe_train.config.config import Config
from jpipe_train.doctor import devices
from jpipe_train.launch.distributed import Membership
from jpipe_train.launch.team import code_facts
from jpipe_train.launch.team import facts as facts_of_run

Facts = dict[str, Any]

_NAMES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "LIBTPU_INIT_ARGS", "LD_LIBRARY_PATH", "no_proxy", "no_grpc_proxy")
_PREFIXES = "JAX_", "XLA_", "NCCL_", "TPU_", "FLAX_", "SLURM_LOCALID"
_HIDDEN = ("http_proxy", "https_proxy", "grpc_proxy", "JPIPE_SECRET")  # their values may be or contain passwords
_USER = re.compile(r"//\S*@")  # finds the password in an address; it may have any character, even "/" and "@"
_SIZE = 2**24  # bytes of a test file: writing it takes some milliseconds on a disk, a second on a slow network


def gather(config: Config | None, member: Membership | None, find_devices: Callable[[], Facts] = devices.find) -> Facts:
    """Return all facts of this process; a fact that cannot be determined is `{"error": why}`."""
    folder = "runs" if config is None or config.run.dir is None else config.run.dir
    probes: dict[str, Callable[[], Facts]] = {
        "process": lambda: _process(member),
        "versions": _versions,
        "code": lambda: _code(config),
        "devices": find_devices,
        "gpus": lambda: {"count": len(glob.glob("/dev/nvidia[0-9]*"))},
        "memory": memory,
        "shared memory": lambda: {"available": shutil.disk_usage("/dev/shm").free},  # noqa: S108 - nothing is written there
        "folder": lambda: try_folder(resolved(folder, "run.dir")),
        "environment": lambda: environment(os.environ),
    }
    return {name: _attempt(probe) for name, probe in probes.items()}


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change a job, without passwords."""
    chosen = {name: value for name, value in sorted(variables.items()) if name in _NAMES or name.startswith(_PREFIXES)}
    return {name: _USER.sub("//", value) for name, value in chosen.items()} | {name: "(set)" for name in _HIDDEN if variables.get(name)}


def memory(root: Path = Path("/")) -> Facts:
    """Return the `total` and `available` bytes of host memory, within the limit of this process's control group."""
    sizes = {name: value.split() for name, _, value in (line.partition(":") for line in _text(root / "proc/meminfo").splitlines())}
    total, available = (1024.0 * int(sizes[name][0]) if name in sizes else host_memory() for name in ("MemTotal", "MemAvailable"))
    groups = root / "sys/fs/cgroup"
    own = groups / _text(root / "proc/self/cgroup").rpartition("::/")[2].strip()  # of version 2
    for folder in (own, *own.parents):
        limit, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
        if folder.is_relative_to(groups) and limit.isdecimal() and used.isdecimal():
            dropped = re.search(r"^inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)  # cached files
            free = int(limit) - int(used) + (int(dropped[1]) if dropped else 0)
            total, available = min(total, int(limit)), min(available, max(free, 0))
    return {"total": total, "available": available}


def try_folder(path: Path) -> Facts:
    """Write a file to disk in a folder, or in its nearest existing parent, remove it, and return how fast that was."""
    existing = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    available, probe, content = shutil.disk_usage(existing).free, existing / temporary_name(), os.urandom(_SIZE)
    began = time.perf_counter()
    try:
        with create(probe) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
    finally:
        probe.unlink(missing_ok=True)
    speed = len(content) / max(seconds, 1e-6)
    return {"path": str(path), "existing": str(existing), "available": available, "bytes_per_second": speed}


def temporary_name() -> str:
    """Return a name for a file that nobody can guess."""
    return TEMPORARY.replace("*", secrets.token_hex(8))


def _attempt(probe: Callable[[], Facts]) -> Facts:
    try:
        return probe()
    except Exception as error:  # a probe must survive a broken system
        reason = " ".join(str(error).split()) or "without a message"
        return {"error": reason if isinstance(error, OSError | RuntimeError | jpipe.InputError) else f"{type(error).__name__}: {reason}"}


def _process(member: Membership | None) -> Facts:
    """Return the host, this process's number, the number of processes and the coordinator."""
    index, count, coordinator = (0, 1, None) if member is None else (member.process_id, member.num_processes, member.coordinator.host)
    return {"host": socket.gethostname(), "index": index, "count": count, "coordinator": coordinator}


def _versions() -> Facts:
    """Return the versions of Python, jpipe and the libraries that it computes with."""
    libraries = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = {name: importlib.metadata.version(name) for name in libraries}
    return {"python": platform.python_version(), "jpipe": jpipe.__version__, **versions}


def _code(config: Config | None) -> Facts:
    """Return what must be the same in all processes of a run; long texts are replaced by digests."""
    facts = code_facts() if config is None else facts_of_run(config)
    return {name: value if len(value) < 100 else hashlib.sha256(value.encode()).hexdigest()[:12] for name, value in facts.items()}


def _text(file: Path) -> str:
    """Return the text of a system file, or "" if it does not exist."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
