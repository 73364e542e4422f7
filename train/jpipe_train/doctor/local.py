"""The facts of this process and its host, as plain data for other processes."""

import glob
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

import jax

import jpipe
from jpipe.files import resolved
from jpipe_train.assemble import compile_cache
from jpipe_train.config.config import AUTO, Config
from jpipe_train.doctor import devices, system
from jpipe_train.launch.distributed import Membership
from jpipe_train.launch.together import code_facts
from jpipe_train.launch.together import facts as facts_of_run

Facts = dict[str, Any]

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy")
_NAMES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "LIBTPU_INIT_ARGS"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS", "KUBERNETES_SERVICE_HOST"),
)
_PREFIXES = "JAX_", "XLA_", "NCCL_", "TPU_", "FLAX_", "SLURM_CPUS_", "SLURM_LOCALID", "SLURM_NTASKS"
_SECRET = "JPIPE_SECRET"
_USER = re.compile(r"//\S*@"), "//"  # in an address among other text; a password may have any character, "/" and "@" too
_USER_OF_PROXY = re.compile(r"^\s*((?:https?|socks\w*)://)?.*@", re.DOTALL | re.IGNORECASE), r"\1"
_RUNS = "runs"  # where runs without run.dir are


def gather(config: Config | None, member: Membership | None, find_devices: Callable[[], dict[str, Any]] = devices.find) -> Facts:
    """Return all facts of this process; a fact that cannot be found is `{"error": why}`.

    Args:
        config: the config of the run, if there is one.
        member: the place of this process among several.
        find_devices: starts the devices, like `jpipe_train.doctor.devices.find`.
    """
    folder = _RUNS if config is None or config.run.dir is None else config.run.dir
    probes: dict[str, Callable[[], dict[str, Any]]] = {
        "process": lambda: _process(member),
        "versions": _versions,
        "code": lambda: _code(config),
        "devices": find_devices,
        "gpus": lambda: {"count": len(glob.glob("/dev/nvidia[0-9]*"))},
        "cores": system.cores,
        "memory": system.memory,
        "shared memory": system.shared_memory,
        "folder": lambda: system.writable(resolved(folder, "run.dir")),
        "compile cache": lambda: _cache(AUTO if config is None else config.compile_cache),
        "environment": lambda: environment(os.environ),
    }
    return {name: _attempt(probe) for name, probe in probes.items()}


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change a job, without passwords; proxies by their names in lower case, as most programs read them."""
    chosen = {name: value for name, value in sorted(variables.items()) if name in (*_NAMES, *PROXIES) or name.startswith(_PREFIXES)}
    if variables.get(_SECRET):
        chosen[_SECRET] = "(set)"
    return {name: _without_user(name, value) for name, value in chosen.items()}


def _without_user(name: str, value: str) -> str:
    """Return the value of a variable without user names and passwords; what follows the last `@` is the host."""
    pattern, kept = _USER_OF_PROXY if name in PROXIES else _USER
    return pattern.sub(kept, value)


def _attempt(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return probe()
    except Exception as error:  # a probe looks at what may be out of order
        reason = " ".join(str(error).split()) or "without a message"
        return {"error": reason if isinstance(error, OSError | RuntimeError | jpipe.InputError) else f"{type(error).__name__}: {reason}"}


def _process(member: Membership | None) -> dict[str, Any]:
    """Return the host, this process's number, the number of processes and the coordinator."""
    if member is None:
        return {"host": socket.gethostname(), "index": 0, "count": 1, "coordinator": None, "devices": None}
    return {
        "host": socket.gethostname(),
        "index": member.process_id,
        "count": member.num_processes,
        "coordinator": member.coordinator.host,
        "devices": member.devices,
    }


def _versions() -> dict[str, str]:
    """Return the versions of Python, jpipe and the libraries that it computes with, and whether the package kubernetes is installed."""
    versions = {"python": platform.python_version(), "jpipe": jpipe.__version__}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    versions["kubernetes"] = "" if importlib.util.find_spec("kubernetes") is None else "installed"
    return versions


def _code(config: Config | None) -> dict[str, str]:
    """Return what must be the same in all processes of a run; long texts as digests."""
    facts = code_facts() if config is None else facts_of_run(config)
    return {name: value if len(value) < 100 else hashlib.sha256(value.encode()).hexdigest()[:12] for name, value in facts.items()}


def _cache(setting: str | None) -> dict[str, Any]:
    """Return the folder of compiled programs, and why it cannot be used, if so."""
    if setting is None:
        return {"folder": None, "problem": None}
    problem = compile_cache.use(setting)  # in a folder that the user has set for JAX, too
    return {"folder": jax.config.values["jax_compilation_cache_dir"], "problem": problem}
