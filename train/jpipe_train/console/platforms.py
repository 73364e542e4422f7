"""Keep JAX from starting plugins for devices that this machine lacks. They may be installed only for compiling.

At its start JAX tries each plugin. Without a device, the plugin for CUDA prints a traceback, and libtpu prints warnings.
"""

import ctypes
import glob
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys

_OF_CUDA = {"jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"}
_GPUS = "/dev/nvidia*", "/dev/dxg"  # /dev/dxg is in WSL
_TPUS = "/dev/accel*", "/dev/vfio/[0-9]*"


def name_platforms() -> None:
    """Set JAX_PLATFORMS to cpu if every installed plugin of JAX lacks its device, unless the user has set the variable.

    The compilers in these plugins then log nothing. This has no effect if JAX is already imported. Child processes inherit the variables.
    """
    if "JAX_PLATFORMS" in os.environ or "jax" in sys.modules:
        return
    plugins, has_libtpu = _plugins(), importlib.util.find_spec("libtpu") is not None
    if not plugins and not has_libtpu:
        return
    is_cuda_idle = plugins <= _OF_CUDA and not (plugins and _has_gpu())
    if is_cuda_idle and not (has_libtpu and _exists(*_TPUS)):
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ.setdefault(
            "TF_CPP_MIN_LOG_LEVEL", "3"
        )  # the compilers would log programs that need too much memory, which commands report themselves


def _plugins() -> set[str]:
    """Return the modules of JAX's plugins. They are in the namespace package `jax_plugins`, or entry points name them."""
    namespace = importlib.util.find_spec("jax_plugins")
    folders = (namespace.submodule_search_locations if namespace else None) or ()
    modules = {module.name for module in pkgutil.iter_modules(folders, "jax_plugins.")}
    return modules | {entry.value for entry in importlib.metadata.entry_points(group="jax_plugins")}


def _has_gpu() -> bool:
    """Return whether there is an NVIDIA driver, or an NVIDIA GPU even without a working driver."""
    if _exists(*_GPUS):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _exists(*patterns: str) -> bool:
    return any(glob.glob(pattern) for pattern in patterns)
