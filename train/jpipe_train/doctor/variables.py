"""Judge the environment variables that change results or keep a job from starting."""

import ipaddress
from collections.abc import Iterator, Mapping

from jpipe_train.doctor.findings import Finding, Level
from jpipe_train.doctor.local import Facts

_OF_GRPC = ("grpc_proxy", "https_proxy", "http_proxy")  # JAX's coordinator is reached by gRPC, which reads these, the first that is set
_CHANGES_NUMBERS = (
    *("JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_DEFAULT_PRNG_IMPL", "JAX_THREEFRY_PARTITIONABLE", "JAX_DEFAULT_DTYPE_BITS"),
    *("JAX_NUMPY_DTYPE_PROMOTION", "NVIDIA_TF32_OVERRIDE", "LIBTPU_INIT_ARGS", "XLA_FLAGS"),
)
_SLOWS = ("JAX_DISABLE_JIT", "JAX_DEBUG_NANS", "JAX_DEBUG_INFS", "JAX_CHECK_TRACER_LEAKS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
_OFF = ("", "0", "false", "no", "off")
_NO_GPU = ("", "-1", "none", "void", "nodevfiles")


def judge_variables(what: str, facts: Facts, variables: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings about the variables of a process."""
    findings = [*_of_devices(variables, facts), *_of_proxies(variables, facts), *_of_clusters(variables, facts), *_of_numbers(variables)]
    yield from findings or [Finding("ok", what, "none that changes results or hides devices")]


def _of_devices(variables: Mapping[str, str], facts: Facts) -> Iterator[Finding]:
    gpus = facts["gpus"].get("count", 0)
    platforms, visible = variables.get("JAX_PLATFORMS"), variables.get("CUDA_VISIBLE_DEVICES")
    if gpus and platforms is not None and not {"cuda", "gpu", ""} & {*platforms.split(",")}:
        yield Finding("problem", "variables", f"JAX_PLATFORMS={platforms} leaves out the {gpus} GPUs of this host", "unset JAX_PLATFORMS")
    if gpus and visible is not None and visible.split(",")[0].strip().lower() in _NO_GPU:
        yield Finding("problem", "variables", f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs", "unset CUDA_VISIBLE_DEVICES")
    elif visible is not None and gpus:
        yield Finding("note", "variables", f"CUDA_VISIBLE_DEVICES={visible}: the other GPUs of {gpus} are hidden")
    if facts["devices"].get("platform") == "gpu" and "cuda" in variables.get("LD_LIBRARY_PATH", "").lower():
        advice = "unset it if JAX reports a version of CUDA, cuDNN or NCCL that does not fit: its wheels bring their own"
        yield Finding("note", "variables", "LD_LIBRARY_PATH names a folder of CUDA, so its libraries are found before JAX's", advice)


def _of_proxies(variables: Mapping[str, str], facts: Facts) -> Iterator[Finding]:
    host = facts["process"].get("coordinator")
    proxy = next((name for name in _OF_GRPC if variables.get(name)), None)
    if host is None or proxy is None:
        return
    exceptions = next((variables[name] for name in ("no_grpc_proxy", "no_proxy") if variables.get(name)), "")
    if not is_exempt(host, exceptions):
        advice = f"export no_proxy={','.join(filter(None, (exceptions, host)))}, or unset {proxy}"
        level: Level = "note" if facts["process"].get("connected") else "problem"
        yield Finding(level, "variables", f"{proxy}={variables[proxy]} may catch the connection to the coordinator {host}", advice)


def is_exempt(host: str, exceptions: str) -> bool:
    """Return whether a list such as `no_proxy` covers a host: by the end of its name, its address, or its network."""
    for entry in filter(None, (entry.strip() for entry in exceptions.split(","))):
        if host.endswith(entry.removeprefix("*")):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
        except ValueError:  # a name
            continue
    return False


def _of_clusters(variables: Mapping[str, str], facts: Facts) -> Iterator[Finding]:
    devices, local = facts["devices"], variables.get("SLURM_LOCALID", "")
    is_selected = variables.get("JAX_LOCAL_DEVICE_IDS") or variables.get("JAX_COORDINATOR_ADDRESS")
    if devices.get("platform") == "gpu" and local.isdecimal() and not is_selected and int(local) >= devices["count"]:
        advice = "use --gpus-per-node in place of --gpus-per-task, or export JAX_LOCAL_DEVICE_IDS=0"
        found = f"SLURM_LOCALID={local}: the task takes GPU {local}, and {devices['count']} are visible to it"
        yield Finding("problem", "variables", found, advice)
    per_task = variables.get("SLURM_CPUS_PER_TASK", "")
    usable = facts["cores"].get("usable")
    if local and per_task.isdecimal() and usable is not None and usable < int(per_task):
        advice = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK": it does not take this from the batch script'
        yield Finding("note", "variables", f"SLURM_CPUS_PER_TASK={per_task}, and {usable} cores are usable", advice)
    in_pod = "KUBERNETES_SERVICE_HOST" in variables and not facts["versions"].get("kubernetes")
    if in_pod and facts["process"].get("count", 1) == 1 and "JAX_NUM_PROCESSES" not in variables:
        advice = "for several pods set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (examples/clusters)"
        yield Finding("note", "variables", "in a pod of Kubernetes without JAX_NUM_PROCESSES: it trains alone", advice)


def _of_numbers(variables: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in variables.items():
        if name in _CHANGES_NUMBERS and value:
            yield Finding("note", "variables", f"{name}={value} may change results", "set it in all processes, or in none")
        if name in _SLOWS and value.lower() not in _OFF:
            yield Finding("note", "variables", f"{name}={value} makes steps slow", f"unset {name} except to look for a mistake")
