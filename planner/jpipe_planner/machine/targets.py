"""Targets: devices with published properties that XLA can compile for without having such a device.

Nothing runs on them. XLA needs a plugin for the platform, but no driver and no device. For TPUs the plugin is `libtpu`. For NVIDIA GPUs it
is `jax-cuda13-plugin`, with ptxas, nvlink and libdevice from `nvidia-cuda-nvcc` or an installed CUDA toolkit. `targets.yaml` is the table
of known targets; a file of the same format adds other targets.
"""

import functools
import importlib.metadata
import importlib.resources
import importlib.util
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, Field

import jpipe
from jpipe import InputError, files
from jpipe_planner.machine.plain_yaml import parse
from jpipe_planner.machine.units import Bandwidth, Data, Positive, Possible, Rates, Share, in_unit, seconds

if TYPE_CHECKING:
    import jax

__all__ = ["Target", "TargetUnavailable", "find_target", "known_targets", "target_devices", "target_refusal"]

FORMAT = "jpipe-targets/1"
MOST_BYTES = 2**20  # the largest size of a file of targets, in bytes
_LARGEST_SLICE = 256  # chips
Platform = Literal["cuda", "tpu"]
EXTRAS: Mapping[str, str] = {"cuda": "target-cuda", "tpu": "target-tpu"}
# The packages of XLA's compilers, with their modules; the preferred package comes first.
_PLUGINS: Mapping[str, Mapping[str, str]] = {
    "cuda": {"jax-cuda13-plugin": "jax_plugins.xla_cuda13", "jax-cuda12-plugin": "jax_plugins.xla_cuda12"},
    "tpu": {"libtpu": "libtpu"},
}

# The properties that a GPU's compute capability determines, by their names in XLA's GpuDeviceInfoProto. Sources: XLA's own descriptions of
# a V100, an A100, an RTX A6000 and an H100 (openxla/xla, xla/backends/gpu/target_config/specs); for 8.9, deviceQuery on an L40S and an RTX
# 4090; for the other capabilities, the CUDA programming guide's technical specifications and throughput of instructions.
# Columns: bytes of shared memory of a multiprocessor, and at most of a block; threads of a multiprocessor; its units for float32.
_SIZES = {
    "5.2": (98304, 49152, 2048, 128),
    "6.1": (98304, 49152, 2048, 128),
    "7.0": (98304, 98304, 2048, 64),
    "7.5": (65536, 65536, 1024, 64),
    "8.0": (167936, 166912, 2048, 64),
    "8.6": (102400, 101376, 1536, 128),
    "8.9": (102400, 101376, 1536, 128),
    "9.0": (233472, 232448, 2048, 128),
    "10.0": (233472, 232448, 2048, 128),
    "12.0": (102400, 101376, 1536, 128),
}
CAPABILITIES: Mapping[str, Mapping[str, int]] = {
    capability: {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": per_core,
        "shared_memory_per_block_optin": per_block,
        "threads_per_core_limit": threads,
        "fpus_per_core": units,
        "block_dim_limit_x": 2147483647,  # limits of the blocks in a grid
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    for capability, (per_core, per_block, threads, units) in _SIZES.items()
}


class TargetUnavailable(InputError):
    """XLA cannot compile for a target here: its plugin is missing, has the wrong version, or does not know the device."""


class Host(Data):
    """The memory of a device's host, which can keep parts of the state (`jpipe.plan.HostMemory`), and the link to it.

    Attributes:
        bandwidth: bytes per second in each direction at the same time. The default is half of 16 lanes of PCIe 3.0, because two devices may
            share them.
        latency: seconds until a moved byte arrives.
        memory: bytes of host memory that a plan may use for each device; 0: nothing can be moved there. None: not limited.
    """

    bandwidth: Bandwidth = 8e9
    latency: Annotated[float, BeforeValidator(seconds), Field(ge=0, le=1e9, allow_inf_nan=False)] = 1e-5
    memory: Annotated[float, in_unit("bytes"), Field(ge=0, le=1e30)] | None = None

    @property
    def link(self) -> jpipe.Link:
        """The link to host memory; in each direction it carries one move at a time."""
        return jpipe.Link(self.bandwidth, self.latency)

    @property
    def limit(self) -> float:
        """The bytes that a plan may use for each device; infinity: not limited."""
        return math.inf if self.memory is None else self.memory


class Target(Data):
    """A device to compile for.

    Attributes:
        platform: JAX's platform, "cuda" or "tpu".
        name: the kind of the device, as JAX reports it.
        memory: bytes, as published.
        reserved: bytes that a plan leaves free, a dict from a purpose to bytes.
        flops: peak operations per second without sparsity, by dtype.
        efficiency: share of `flops` that large matrix products reach in training.
        memory_bandwidth: bytes per second.
        host: the host memory and the link to it, as expected if two devices share the link.
        compiler: the properties that XLA needs. For a GPU: `compute_capability`, `core_count`, `l2_cache_size`, `clock_rate_ghz` and
            `device_memory_size`; further fields of XLA's `GpuDeviceInfoProto` replace fields that follow from the compute capability. For a
            TPU: `topology`, such as `v5e:2x4`, and `chip_config_name` if a chip is one device of two cores.
        sources: the publications of the figures.

    Raises:
        InputError: a field is invalid; the message says what was expected.
    """

    platform: Platform
    name: str
    memory: Annotated[float, in_unit("bytes"), Positive, Possible]
    reserved: dict[str, Annotated[float, in_unit("bytes"), Field(ge=0, le=1e15)]] = Field(default_factory=dict)
    flops: Rates
    efficiency: Annotated[float, Share] = 0.5
    memory_bandwidth: Bandwidth
    host: Host = Host()
    compiler: dict[str, Any]
    sources: tuple[str, ...] = ()

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except pydantic.ValidationError as error:
            raise jpipe.errors.explain(error, Target, "target") from None

    @property
    def limit(self) -> float:
        """The bytes that a plan may use: `memory` minus `reserved`."""
        return self.memory - sum(self.reserved.values())

    @pydantic.field_validator("name", mode="before")
    @classmethod
    def _fits_a_line(cls, name: Any) -> Any:
        if not isinstance(name, str) or not re.fullmatch(r"[\w .:()/+-]{1,80}", name):
            raise ValueError(f"expected at most 80 letters, digits, spaces and . : ( ) / + -, found {jpipe.errors.short(name)}")
        return name

    @pydantic.field_validator("flops")
    @classmethod
    def _not_empty(cls, flops: dict[str, float]) -> dict[str, float]:
        if not flops:
            raise ValueError("expected peak rates without sparsity by dtype, such as {bfloat16: 989 TFLOP/s}, found none; add them")
        return flops

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "Target":
        if self.limit <= 0:
            reserved = sum(self.reserved.values())
            raise ValueError(f"reserved: expected less than the memory of {self.memory:,.0f} bytes, found {reserved:,.0f}")
        if self.platform == "cuda":
            self._gpu_properties()
        else:
            self.tpu_topology()
        return self

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of a GPU."""
        text = self.compiler.get("compute_capability")
        if text is None:
            raise ValueError("compiler: key 'compute_capability' is missing; add it, such as '9.0'")
        if not re.fullmatch(r"[0-9]{1,2}\.[0-9]", str(text)):
            raise ValueError(f"compiler: compute_capability: expected text such as '9.0', found {jpipe.errors.short(text)}")
        major, minor = str(text).split(".")
        return int(major), int(minor)

    def tpu_topology(self, count: int = 1) -> dict[str, str]:
        """Return the arguments of JAX's `get_topology_desc` for the target's slice, or for a larger slice of at least `count` chips."""
        if "topology" not in self.compiler:
            raise ValueError("compiler: key 'topology' is missing; add it, such as v5e:2x4")
        for name, value in self.compiler.items():
            if name not in _OF_A_TPU:
                raise ValueError(f"compiler: unknown property {jpipe.errors.short(name)}; {jpipe.errors.nearest(name, _OF_A_TPU)}")
            pattern, example = _OF_A_TPU[name]
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                raise ValueError(f"compiler: {name}: expected text such as '{example}', found {jpipe.errors.short(value)}")
        kind, _, sides = str(self.compiler["topology"]).partition(":")
        lengths = [int(side) for side in sides.split("x")]
        while 0 < math.prod(lengths) < min(count, _LARGEST_SLICE):
            shortest, *others = sorted(lengths)
            lengths = sorted((2 * shortest, *others))
        names = {name: str(value) for name, value in self.compiler.items() if name != "topology"}
        return {"topology_name": f"{kind}:{'x'.join(map(str, lengths))}", **names}

    def _gpu_properties(self) -> dict[str, int | float]:
        """Return the fields of `GpuDeviceInfoProto` except the compute capability."""
        capability = ".".join(map(str, self.capability))
        explicit = {name: value for name, value in self.compiler.items() if name != "compute_capability"}
        names = (*_OF_A_GPU, *_OF_A_CAPABILITY)
        for name, value in explicit.items():
            if name not in names:
                raise ValueError(f"compiler: unknown property {jpipe.errors.short(name)}; {jpipe.errors.nearest(name, names)}")
            kind, kinds = ("a number", int | float) if name == "clock_rate_ghz" else ("an integer", int)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e15:
                raise ValueError(f"compiler: {name}: expected {kind} above 0, found {jpipe.errors.short(value)}")
        known = {**CAPABILITIES.get(capability, {}), **explicit}
        if missing := [name for name in _OF_A_GPU if name not in known]:
            raise ValueError(f"compiler: expected {', '.join(_OF_A_GPU)}, found no {', '.join(missing)}; add the missing ones")
        if missing := [name for name in _OF_A_CAPABILITY if name not in known]:
            raise ValueError(
                f"compiler: the table has no compute capability {capability}, only {', '.join(CAPABILITIES)}; add {', '.join(missing)}"
            )
        return known

    def with_memory(self, size: int) -> "Target":
        """Return the target with another size of memory for XLA. A TPU stays as it is, because its memory cannot be changed."""
        return self.model_copy(update={"compiler": {**self.compiler, "device_memory_size": size}}) if self.platform == "cuda" else self

    def config_text(self) -> str:
        """Return the properties of a GPU as the text of a `GpuTargetConfigProto`, which XLA reads."""
        major, minor = self.capability
        numbers = " ".join(f"{name}: {value}" for name, value in sorted(self._gpu_properties().items()))
        features = " feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
        capability = f"cuda_compute_capability {{ major: {major} minor: {minor}{features} }}"
        info = f"{capability} memory_bandwidth: {round(self.memory_bandwidth)} {numbers}"
        return (
            f'gpu_device_info {{ {info} }}\nplatform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 8 patch: 0 }}\n'
            f'device_description_str: "{self.name}"\n'
        )


_OF_A_TPU = {
    "topology": (r"[a-z0-9]{2,8}:[0-9]{1,3}(x[0-9]{1,3}){1,2}", "v5e:2x4"),
    "chip_config_name": (r"[a-z_]{2,30}", "megacore"),
}
_OF_A_GPU = ("core_count", "l2_cache_size", "clock_rate_ghz", "device_memory_size")
_OF_A_CAPABILITY = tuple(CAPABILITIES["9.0"])


class _Table(Data):
    format: Literal["jpipe-targets/1"]
    targets: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]


@functools.cache
def known_targets() -> Mapping[str, Target]:
    """Return the targets of the table, by name."""
    text = importlib.resources.files("jpipe_planner.machine").joinpath("targets.yaml").read_text(encoding="utf-8")
    return read_targets(text, "targets.yaml")


def read_targets(text: str, where: str) -> dict[str, Target]:
    """Read targets from YAML.

    Args:
        text: YAML, as `jpipe target --here` writes it.
        where: the source, such as a file name, for error messages.

    Raises:
        InputError: the text is no YAML with targets; the message says what was expected.
    """
    data = parse(text, where)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        actual = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise InputError(where=where, expected=f"YAML with 'format: {FORMAT}'", found=repr(actual), change="is this a file of targets?")
    try:
        table = _Table(**{str(key): value for key, value in data.items()})
    except pydantic.ValidationError as error:
        raise jpipe.errors.explain(error, _Table, where) from None
    targets = {}
    for name, fields in table.targets.items():
        try:
            targets[name] = Target(**{str(key): value for key, value in fields.items()})
        except InputError as error:
            raise error.at(f"{where}: targets.{name}") from None
    return targets


def find_target(name: str) -> Target:
    """Return a target of the table, or the target in a file.

    Args:
        name: a name, such as `h100-80gb`, or a file that ends in `.yaml`.

    Raises:
        InputError: there is no such target or file, or the file has several targets.
    """
    if not name.endswith((".yaml", ".yml")):
        if name in known_targets():
            return known_targets()[name]
        longer = " or ".join(repr(known) for known in known_targets() if name and known.startswith(name))
        nearest = f"did you mean {longer}?" if longer else jpipe.errors.nearest(name, known_targets())
        raise InputError(f"target: unknown target '{name}'; {nearest} (the name of your own file must end in .yaml)")
    path = files.expanded(name, "target")
    other = f"target: expected text in UTF-8 in '{name}', found other bytes"
    targets = read_targets(
        files.read_text(path, MOST_BYTES, f"target: cannot read '{path}'", "name a file that is there", other), str(path)
    )
    if len(targets) > 1:
        raise InputError(where=path, expected="one target", found=", ".join(targets), change="put each target into a separate file")
    return next(iter(targets.values()))


def target_devices(target: Target, count: int = 1, processes: int = 1) -> tuple["jax.Device", ...]:
    """Return devices to compile for: the devices of this process if they are of the target's kind, otherwise devices without hardware.

    `jax.jit(f).lower(spec).compile()` accepts shardings on devices without hardware, but nothing can run on them.

    Args:
        target: the target.
        count: the number of devices.
        processes: the number of processes with equal shares of the devices, a divisor of `count`. With 1, the devices of a TPU may still
            belong to several processes, as in its slices.

    Raises:
        TargetUnavailable: XLA cannot compile for the target here; the message says what to install.
    """
    here = [device for device in local_devices() if device.device_kind == target.name]
    if processes == 1 and len(here) >= count:
        return tuple(here[:count])
    if reason := target_refusal(target):
        raise TargetUnavailable(reason, where="target")
    try:
        devices = _devices_elsewhere(target.model_dump_json(), count, processes)
    except Exception as error:  # XLA and its plugins raise errors of many classes
        reason = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
        what = f"XLA cannot compile for {target.name} here: {reason}"
        raise TargetUnavailable(what, where="target", change=_REMEDIES[target.platform]) from None
    if len(devices) < count:
        parts = f" in {processes} equal parts" if processes > 1 else ""
        expected, found = f"{count} devices of {target.name}{parts}", f"{len(devices)} in a slice"
        raise TargetUnavailable(where="target", expected=expected, found=found, change="use fewer")
    return devices[:count]


def local_devices() -> "list[jax.Device]":
    """Return the devices of this process. Raise InputError if JAX cannot start them."""
    import jax

    try:
        return jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError has no message: JAX requires GPUs and finds none
        reason = (str(error).splitlines() or ["none found"])[0]
        raise InputError(f"target: JAX has no devices to use: {reason}; see its variable JAX_PLATFORMS") from None


_REMEDIES: Mapping[str, str] = {
    "cuda": "it needs ptxas, nvlink and libdevice, which jpipe-train[target-cuda] installs",
    "tpu": "another version of libtpu may",
}


# libtpu asks no server for the machine's own TPUs, and compiles in several processes at the same time.
_TPU_SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@functools.cache
def _devices_elsewhere(target_json: str, count: int, processes: int) -> tuple["jax.Device", ...]:
    """Return devices that this machine does not have: for equal arguments the same objects, so that equal programs have equal shardings."""
    import jax
    from jax.experimental import topologies

    target = Target.model_validate_json(target_json)
    if target.platform == "tpu":
        for name, value in _TPU_SETTINGS.items():
            os.environ.setdefault(name, value)
        devices: Any = topologies.get_topology_desc(platform="tpu", **target.tpu_topology(count)).devices
        if processes == 1:  # the first devices, even if they belong to several processes
            return tuple(devices[:count])
        each = [[device for device in devices if device.process_index == p][: count // processes] for p in range(processes)]
        return tuple(device for part in each for device in part)
    layout = f"1x{processes}x{count // processes}"
    devices = topologies.get_topology_desc("", "cuda", target_config=target.config_text(), topology=layout).devices
    # XLA looks for its CUDA tools (ptxas, nvlink) only when it compiles, and they may not know the device. Compiling a small program here
    # shows such an error early.
    like = jax.ShapeDtypeStruct((8, 8), "float32", sharding=jax.sharding.SingleDeviceSharding(devices[0]))
    jax.jit(lambda x: jax.lax.log(x + x.T)).lower(like).compile()
    return tuple(devices)


def target_refusal(target: Target) -> str | None:
    """Return why XLA cannot compile for a target here, judged by the installed packages and programs, or None."""
    install = f"install jpipe-train[{EXTRAS[target.platform]}]"
    package = next((name for name, module in _PLUGINS[target.platform].items() if _folders(module)), None)
    if package is None:
        return f"XLA's compiler for {target.platform} is not installed; {install}"
    if target.platform == "tpu":
        return None
    version, jaxlib = _version(package), _version("jaxlib")
    if version and version != jaxlib:
        return f"{package} {version} is for another JAX than {jaxlib}; install {package}=={jaxlib}"
    if (ptxas := _ptxas()) is None:
        return f"there is no ptxas, NVIDIA's assembler; {install}"
    if target.capability < _LEAST_OF_CUDA_13 and _release(ptxas) >= 13:
        capability = ".".join(map(str, target.capability))
        return (
            f"{target.name} has compute capability {capability}, but the ptxas of CUDA 13 supports 7.5 and newer; install "
            "nvidia-cuda-nvcc-cu12, which has the ptxas of CUDA 12, and set CUDA_ROOT to its folder nvidia/cuda_nvcc"
        )
    return None


_LEAST_OF_CUDA_13 = (7, 5)


def _version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _folders(module: str) -> list[Path]:
    """Return the folders of a module, without importing it; empty if it is not installed."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]


def _ptxas() -> str | None:
    """Return the ptxas that XLA will call: from CUDA_ROOT, NVIDIA's packages, the PATH or a CUDA toolkit; None if there is none."""
    root = os.environ.get("CUDA_ROOT")
    preferred = [Path(root)] if root else [*_folders("nvidia.cu13"), *_folders("nvidia.cuda_nvcc")]
    folders = [*(str(folder / "bin") for folder in preferred), os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin", "/opt/cuda/bin"]
    return shutil.which("ptxas", path=os.pathsep.join(folders))


@functools.cache
def _release(ptxas: str) -> int:
    """Return the CUDA release of a ptxas program, or 0 if it is unknown."""
    try:
        command = [ptxas, "--version"]
        words = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout  # noqa: S603 - NVIDIA's assembler
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r"release (\d+)", words)
    return int(match[1]) if match else 0
