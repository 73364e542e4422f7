"""Judge the facts of all processes: which are in order, which are worth knowing, and what to change."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from jpipe_train.console.terminal import align, count, printable
from jpipe_train.doctor.facts import Facts

Level = Literal["ok", "note", "problem"]

_GB = 1e9
_MUST_AGREE = ("jax", "jaxlib", "flax", "optax", "numpy")  # the processes of a run compare these, and stop if they differ
_CHANGES_NUMBERS = (
    *("JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_DEFAULT_PRNG_IMPL", "JAX_THREEFRY_PARTITIONABLE", "JAX_DEFAULT_DTYPE_BITS"),
    *("JAX_NUMPY_DTYPE_PROMOTION", "NVIDIA_TF32_OVERRIDE", "LIBTPU_INIT_ARGS", "XLA_FLAGS"),
)


class Finding(NamedTuple):
    """One row of the table."""

    level: Level  # `ok`, worth knowing (`note`), or a `problem` that stops or slows down a job
    what: str  # what was checked
    found: str  # the result
    advice: str = ""  # what to change; empty if nothing is to be changed
    measured: str = ""  # measured numbers, printed after `found`; they differ between processes
    least: float = 0.0  # the measured number that determines which process is the worst


def judge(everyone: Sequence[Facts], problems: Sequence[Finding] = ()) -> list[Finding]:
    """Return the problems of gathering facts, and then the findings from the facts of each process in the order of the table.

    With several processes the facts also have `sees folder`, and in process 0 `links`.
    """
    return [
        *problems,
        _processes(everyone),
        *_versions(everyone),
        *(row for what in _CHECKS for row in merged([[*_check(what, facts)] for facts in everyone])),
        *_links(everyone[0].get("links")),
    ]


def _check(what: str, facts: Facts) -> Iterator[Finding]:
    """Yield the findings of one check in one process. If its facts could not be gathered, yield a finding that says so."""
    section, check, level, advice = _CHECKS[what]
    if "error" in facts[section]:
        yield Finding(level, what, facts[section]["error"], advice)
    else:
        yield from check(what, facts, facts[section])


def _first(what: str, found: str, *rules: tuple[bool, Level, str], measured: str = "", least: float = 0.0) -> Finding:
    """Return a finding with the level and advice of the first rule (condition, level, advice) that applies, or `ok` if none does."""
    level, advice = next(((level, advice) for holds, level, advice in rules if holds), ("ok", ""))
    return Finding(level, what, found, advice, measured, least)


def _processes(everyone: Sequence[Facts]) -> Finding:
    hosts = _grouped([facts["process"].get("host", "an unknown host") for facts in everyone])
    expected, first = everyone[0]["process"].get("count", 1), next(iter(hosts))
    if expected == 1:
        return Finding("ok", "processes", f"one, on {first}")
    if len(everyone) == expected:
        shown = "; ".join(f"{host} has {processes(indices)}" for host, indices in hosts.items())
        return Finding("ok", "processes", f"{expected} connected: {shown}")
    return Finding("note", "processes", f"{expected} were expected; the rows below are only about this process, on {first}")


def _versions(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Yield differences between processes: their versions, config, code and settings, which a run compares at its start."""
    versions, code = ([facts[section] for facts in everyone] for section in ("versions", "code"))
    if failed := [each["error"] for each in versions if "error" in each]:
        yield Finding("problem", "versions", failed[0], "install jpipe with its requirements: pip install .")
        return
    for name in versions[0]:
        if different := _differing([each[name] for each in versions]):
            level: Level = "problem" if name in _MUST_AGREE else "note"
            advice = "install the same version on all hosts" + ("; a run stops if it differs" if level == "problem" else "")
            yield Finding(level, "versions", f"{name} differs: {different}", advice)
    yield Finding("ok", "versions", ", ".join(f"{name} {version}" for name, version in versions[0].items()))
    for name in dict.fromkeys(name for each in code for name in each if not name.startswith("version of ")):
        if different := _differing([each.get(name, "") for each in code]):
            advice = "make it the same in all processes; a run stops if it differs"
            yield Finding("problem", "settings", f"{name} differs: {different}", advice)


def _devices(what: str, facts: Facts, devices: Any) -> Iterator[Finding]:
    gpus, kinds, on_cpu = facts["gpus"].get("count", 0), devices["kinds"], devices["platform"] == "cpu"
    count = "the CPU" if on_cpu else f"{devices['count']} × {' and '.join(kinds)}"
    hidden = f", and this host has {gpus} NVIDIA GPUs" if on_cpu and gpus else ""
    memory = f", {devices['memory'] / _GB:.1f} GB each for JAX" if devices["memory"] else ""
    extra = "install jpipe with the extra cuda13 or cuda12, and check JAX_PLATFORMS and CUDA_VISIBLE_DEVICES below"
    one_kind = "select devices of one kind, with CUDA_VISIBLE_DEVICES or JAX_LOCAL_DEVICE_IDS"
    yield _first(what, count + hidden + memory, (bool(hidden), "problem", extra), (len(kinds) > 1, "problem", one_kind))


def _memory(what: str, facts: Facts, memory: Any) -> Iterator[Finding]:
    free = memory["available"]
    yield _first(
        what,
        f"{memory['total'] / _GB:.1f} GB",
        (free < _GB, "problem", "ask for more (sbatch --mem, resources.limits.memory), or stop other programs there"),
        (free < 4 * _GB, "note", "each process needs about 1 GB besides data, state in host memory and checkpoints"),
        measured=f"{free / _GB:.1f} GB free",
        least=free,
    )


def _shared_memory(what: str, facts: Facts, shared: Any) -> Iterator[Finding]:
    devices, free = facts["devices"], shared["available"]
    has_gpus = devices.get("platform") == "gpu" and max(devices["count"], facts["gpus"].get("count", 0)) > 1
    advice = "NCCL needs it between the GPUs of a host: docker --shm-size=2g; on Kubernetes a volume at /dev/shm, emptyDir.medium: Memory"
    little = has_gpus and free < _GB  # Docker gives 64 MB
    yield _first(what, "/dev/shm", (little, "problem", advice), measured=f"{free / _GB:.2f} GB free", least=free)  # noqa: S108 - a name


def _folder(what: str, facts: Facts, folder: Any) -> Iterator[Finding]:
    free, speed = folder["available"], folder["bytes_per_second"]
    small = "jpipe simulate shows the bytes of a checkpoint; keep few (checkpoint.keep) and write them rarely (checkpoint.every)"
    yield _first(
        what,
        folder["path"] + ("" if folder["existing"] == folder["path"] else f", not yet there; tried in {folder['existing']}"),
        (free < _GB, "problem", "free space, or choose another run.dir: a new checkpoint is written before an old one is removed"),
        (free < 20 * _GB or speed < 50e6, "note", small),
        measured=f"{free / _GB:.1f} GB free, {speed / 1e6:.0f} MB/s to disk",
        least=speed,
    )
    if facts.get("sees folder") is False:
        advice = "choose a run.dir that all hosts share, such as NFS or Lustre: all processes write their part of a checkpoint there"
        yield Finding("problem", what, f"a file that process 0 writes in {folder['existing']} does not appear", advice)


def _variables(what: str, facts: Facts, values: Any) -> Iterator[Finding]:
    """Yield the variables that change results or hide devices."""
    gpus, findings = facts["gpus"].get("count", 0), []
    for name, value in values.items():
        level: Level = "note"
        match name:
            case "JAX_PLATFORMS" if gpus and not {"cuda", "gpu", ""} & {*value.split(",")}:
                level, does, advice = "problem", f"leaves out the {gpus} GPUs of this host", f"unset {name}"
            case "CUDA_VISIBLE_DEVICES" if gpus and value.split(",")[0].strip().lower() in ("", "-1", "none", "void", "nodevfiles"):
                level, does, advice = "problem", "hides all GPUs", f"unset {name}"
            case "CUDA_VISIBLE_DEVICES" if gpus:
                does, advice = f"hides the other GPUs of {gpus}", ""
            case _ if name in _CHANGES_NUMBERS and value:
                does, advice = "may change results", "set it in all processes, or in none"
            case _:
                continue
        findings.append(Finding(level, what, f"{name}={value} {does}", advice))
    yield from findings or [Finding("ok", what, "none that changes results or hides devices")]


_DRIVERS = "try JAX alone: python -c 'import jax; print(jax.devices())'; see docs/how-to/install.md for drivers and extras"
_CHECKS: dict[str, tuple[str, Callable[[str, Facts, Any], Iterator[Finding]], Level, str]] = {
    # name: the facts to check, the check, and if the facts could not be gathered: the level and the advice
    "devices": ("devices", _devices, "problem", _DRIVERS),
    "memory": ("memory", _memory, "note", ""),
    "shared memory": ("shared memory", _shared_memory, "note", ""),
    "run folder": ("folder", _folder, "problem", "choose another run.dir, or create the folder and set its owner: mkdir, chown"),
    "variables": ("environment", _variables, "note", ""),
}


def _links(links: dict[str, Any] | None) -> Iterator[Finding]:
    if links is not None and "error" in links:
        advice = "the processes cannot exchange arrays, which a run needs; see docs/how-to/troubleshooting/processes.md"
        yield Finding("problem", "links", links["error"], advice)
    elif links is not None:
        latency, bandwidth = links["latency"], links["bandwidth"]
        is_slow = latency > 5e-3 or bandwidth < 100e6  # typical for hosts at different sites
        advice = "check that the fast network is used (NCCL_SOCKET_IFNAME on GPUs); else try plan.extra_in_flight and plan.links"
        found = f"an array takes {latency * 1e3:.2f} ms to the next process, and 1 MB goes at {bandwidth / 1e6:.0f} MB/s"
        yield _first("links", found, (is_slow, "note", advice))


def merged(of_processes: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Merge the findings of all processes, in order; a finding that only some processes have names them.

    If findings differ only in their measurement, only the lowest is shown.
    """
    having: dict[Finding, list[tuple[float, int, str]]] = {}
    for index, findings in enumerate(of_processes):
        for finding in findings:
            equal = finding._replace(measured="", least=0.0)
            having.setdefault(equal, []).append((finding.least, index, finding.measured))
    rows = []
    for finding, members in having.items():
        _, worst, measured = min(members)
        text = finding.found + (f", {measured}" if measured else "")
        if len({each for *_, each in members}) > 1:
            text += f" (the lowest, in process {worst})"
        only = "" if len(members) == len(of_processes) else f"{processes([index for _, index, _ in members])}: "
        rows.append(finding._replace(found=only + text))
    return rows


def processes(indices: Sequence[int]) -> str:
    """Return a text such as `process 3` or `processes 0-3, 6`."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return f"process{'' if len(indices) == 1 else 'es'} {shown}"


def _differing(values: Sequence[str]) -> str:
    """List the differing values with their processes, such as `0.12 in processes 0-2; 0.10 in process 3`; "" if all are equal."""
    groups = _grouped(values)
    return "; ".join(f"{value or 'nothing'} in {processes(indices)}" for value, indices in groups.items()) if len(groups) > 1 else ""


def _grouped(values: Sequence[str]) -> dict[str, list[int]]:
    """Return the processes that have each value."""
    return {value: [index for index, other in enumerate(values) if other == value] for value in values}


def table(findings: Sequence[Finding]) -> list[str]:
    """Return the findings as lines: level, what was checked, and the result. The advice follows in an indented line."""
    rows = align([[finding.level, finding.what, printable(finding.found)] for finding in findings])
    indent = " " * sum(2 + max(len(cell) for cell in column) for column in zip(*(finding[:2] for finding in findings), strict=True))
    lines = []
    for finding, row in zip(findings, rows, strict=True):
        lines += [row, *([f"{indent}→ {printable(finding.advice)}"] if finding.advice else [])]
    numbers = [sum(finding.level == level for finding in findings) for level in ("problem", "note")]
    return [*lines, f"{count(numbers[0], 'problem')}, {count(numbers[1], 'note')}"]
