"""Judge recorded facts: what is in order, what to know, and what to change."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jpipe_train.doctor.findings import Finding, Level, differing, merged, processes
from jpipe_train.doctor.local import LIBRARIES, Facts
from jpipe_train.doctor.variables import judge_variables

_GB = 1e9
_LITTLE_MEMORY, _SMALL_MEMORY = 1 * _GB, 4 * _GB  # of the host: JAX alone needs half a GB in each process
_LITTLE_DISK, _SMALL_DISK = 1 * _GB, 20 * _GB
_SMALL_SHARED_MEMORY = 1 * _GB  # Docker gives 64 MB, and NCCL needs some tens of MB for each pair of GPUs
_SLOW_DISK = 50e6  # bytes per second
_LONG_TRIP, _NARROW = 5e-3, 100e6  # seconds, and bytes per second, as between hosts of different places
_GONE_WITH_THE_CONTAINER = ("tmpfs", "ramfs", "overlay")
_MUST_AGREE = ("jax", "jaxlib", "flax", "optax", "numpy")  # the processes of a run compare them, and end if they differ


def judge(everyone: Sequence[Facts], problems: Sequence[Finding] = ()) -> list[Finding]:
    """Return the findings, in the order of the table.

    Args:
        everyone: the facts of each process, as `gather` of `jpipe_train.doctor.local` returns them; with several processes also
            `sees folder`, and in process 0 `links`.
        problems: what went wrong while the facts were gathered.
    """
    return [
        *problems,
        *_processes(everyone),
        *_versions(everyone),
        *_differences(everyone),
        *(row for check in _CHECKS for row in merged([[*_checked(*check, facts)] for facts in everyone])),
        *_links(everyone[0].get("links")),
    ]


def _checked(
    what: str, section: str, check: Callable[[str, Facts, Any], Iterator[Finding]], level: Level, advice: str, facts: Facts
) -> Iterator[Finding]:
    """Yield the findings of one check in one process, or that its probe failed."""
    if "error" in facts[section]:
        yield Finding(level, what, facts[section]["error"], advice)
    else:
        yield from check(what, facts, facts[section])


def _first(what: str, found: str, *rules: tuple[bool, Level, str], measured: str = "", least: float = 0.0) -> Iterator[Finding]:
    """Yield a finding by the first of the rules (whether it holds, level, advice) that holds; if none does, it is as it should be."""
    level, advice = next(((level, advice) for holds, level, advice in rules if holds), ("ok", ""))
    yield Finding(level, what, found, advice, measured, least)


def _processes(everyone: Sequence[Facts]) -> Iterator[Finding]:
    hosts: dict[str, list[int]] = {}
    for index, facts in enumerate(everyone):
        hosts.setdefault(facts["process"].get("host", "an unknown host"), []).append(index)
    asked, first = everyone[0]["process"].get("count", 1), next(iter(hosts))
    if asked == 1:
        yield Finding("ok", "processes", f"one, on {first}")
    elif len(everyone) == asked:
        shown = "; ".join(f"{host} has {processes(indices)}" for host, indices in hosts.items())
        yield Finding("ok", "processes", f"{asked} connected: {shown}")
    else:
        yield Finding("note", "processes", f"{asked} were expected; the rows below are about this one alone, on {first}")


def _versions(everyone: Sequence[Facts]) -> Iterator[Finding]:
    of = [facts["versions"] for facts in everyone]
    if failed := [versions["error"] for versions in of if "error" in versions]:
        yield Finding("problem", "versions", failed[0])
        return
    for name in ("python", *LIBRARIES):
        if len({versions[name] for versions in of}) > 1:
            level: Level = "problem" if name in _MUST_AGREE else "note"
            advice = "install the same version on all hosts" + ("; processes of a run end where it differs" if level == "problem" else "")
            yield Finding(level, "versions", f"{name} differs: {differing([versions[name] for versions in of])}", advice)
    if missing := [name for name in LIBRARIES if any(versions[name] == "not installed" for versions in of)]:
        yield Finding("problem", "versions", f"{', '.join(missing)} not installed", "install jpipe with its requirements: pip install .")
    else:
        shown = ", ".join(f"{name} {of[0][name]}" for name in LIBRARIES)
        yield Finding("ok", "versions", f"Python {of[0]['python']}, jpipe {of[0]['jpipe']}, {shown}")


def _differences(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Yield the further facts that the processes of a run compare at its start: config, code and settings."""
    code = [facts["code"] for facts in everyone]
    for name in dict.fromkeys(name for each in code for name in each):
        values = [each.get(name, "") for each in code]
        if len(set(values)) > 1 and not name.startswith("version of "):
            advice = "give all processes the same; processes of a run end where it differs"
            yield Finding("problem", "settings", f"{name} differs: {differing(values)}", advice)


def _devices(what: str, facts: Facts, devices: Any) -> Iterator[Finding]:
    gpus, kinds, on_cpu = facts["gpus"].get("count", 0), devices["kinds"], devices["platform"] == "cpu"
    memory = f", {devices['memory'] / _GB:.1f} GB each for JAX" if devices["memory"] else ""
    if on_cpu and gpus:
        advice = "install jpipe with the extra cuda13 or cuda12, and check JAX_PLATFORMS and CUDA_VISIBLE_DEVICES below"
        yield Finding("problem", what, f"JAX finds CPUs alone, and this host has {gpus} NVIDIA GPUs", advice)
    elif len(kinds) > 1:
        advice = "select devices of one kind, with CUDA_VISIBLE_DEVICES or JAX_LOCAL_DEVICE_IDS"
        yield Finding("problem", what, f"several kinds in one process: {', '.join(kinds)}", advice)
    else:
        count = "the CPU" if on_cpu else f"{devices['count']} × {kinds[0]}"
        yield Finding("ok", what, f"{count}{memory}")


def _cores(what: str, facts: Facts, cores: Any) -> Iterator[Finding]:
    usable, machine, limit = cores["usable"], cores["machine"], cores["limit"]
    throttled = "ask for more CPU (docker --cpus, resources.limits.cpu), or pin the process: threads beyond the limit are throttled"
    pinned = "with SLURM give srun --cpus-per-task; elsewhere check taskset and the CPU set of the container"
    yield from _first(
        what,
        f"{usable} of {machine} usable" + ("" if limit is None else f", the control group limits it to {limit:g}"),
        (limit is not None and limit < 0.75 * usable, "note", throttled),
        (usable == 1 < (machine or 1), "note", pinned),
    )


def _memory(what: str, facts: Facts, memory: Any) -> Iterator[Finding]:
    total, free, limit = memory["total"], memory["available"], memory["limit"]
    more = "ask for more (sbatch --mem, resources.limits.memory), or end what else runs there"
    yield from _first(
        what,
        f"{total / _GB:.1f} GB{' (the limit of the control group)' if limit is not None and limit <= total else ''}",
        (free < _LITTLE_MEMORY, "problem", more),
        (free < _SMALL_MEMORY, "note", "each process needs about 1 GB besides data, state in host memory and checkpoints"),
        measured=f"{free / _GB:.1f} GB free",
        least=float(free),
    )


def _shared_memory(what: str, facts: Facts, shared: Any) -> Iterator[Finding]:
    devices, free = facts["devices"], shared["available"]
    has_gpus = devices.get("platform") == "gpu" and max(devices["count"], facts["gpus"].get("count", 0)) > 1
    advice = "NCCL needs it between the GPUs of a host: docker --shm-size=2g; on Kubernetes a volume at /dev/shm, emptyDir.medium: Memory"
    yield from _first(
        what,
        f"{shared['total'] / _GB:.2f} GB in /dev/shm",
        (has_gpus and free < _SMALL_SHARED_MEMORY, "problem", advice),
        measured=f"{free / _GB:.2f} GB free",
        least=float(free),
    )


def _folder(what: str, facts: Facts, folder: Any) -> Iterator[Finding]:
    free, speed, kind = folder["available"], folder["bytes_per_second"], folder["filesystem"]
    where = folder["path"] if folder["exists"] else f"{folder['path']}, not yet there; tried in {folder['existing']}"
    volatile = "it ends with the container or the machine: set run.dir to a volume that stays, or a job cannot resume"
    small = "jpipe simulate shows the bytes of a checkpoint; keep few (checkpoint.keep) and write them rarely (checkpoint.every)"
    yield from _first(
        what,
        f"{where}: {kind or 'unknown file system'}",
        (free < _LITTLE_DISK, "problem", "free space, or choose another run.dir: a checkpoint is written before an old one goes"),
        (kind in _GONE_WITH_THE_CONTAINER, "note", volatile),
        (free < _SMALL_DISK or speed < _SLOW_DISK, "note", small),
        measured=f"{free / _GB:.1f} GB free, {speed / 1e6:.0f} MB/s to disk",
        least=float(speed),
    )
    if facts.get("sees folder") is False:
        advice = "choose a run.dir that all hosts share, such as NFS or Lustre: all processes write their part of a checkpoint there"
        yield Finding("problem", what, f"a file that process 0 writes in {folder['existing']} does not appear", advice)


def _cache(what: str, facts: Facts, cache: Any) -> Iterator[Finding]:
    advice = "each start compiles again; set compile_cache to a folder of your own"
    yield from _first(what, cache["problem"] or cache["folder"] or "off", (bool(cache["problem"]), "note", advice))


_DRIVERS = "try JAX alone: python -c 'import jax; print(jax.devices())'; see docs/how-to/install.md for drivers and extras"
_CHECKS: tuple[tuple[str, str, Callable[[str, Facts, Any], Iterator[Finding]], Level, str], ...] = (
    # name, facts to look at, the check, and if these facts could not be found: how bad that is, and what to do
    ("devices", "devices", _devices, "problem", _DRIVERS),
    ("cores", "cores", _cores, "note", ""),
    ("memory", "memory", _memory, "note", ""),
    ("shared memory", "shared memory", _shared_memory, "note", ""),
    ("run folder", "folder", _folder, "problem", "choose another run.dir, or make the folder and its owner: mkdir, chown"),
    ("compile cache", "compile cache", _cache, "problem", "choose another folder for compile_cache, or null"),
    ("variables", "environment", judge_variables, "note", ""),
)


def _links(links: dict[str, Any] | None) -> Iterator[Finding]:
    if links is not None and "error" in links:
        advice = "the processes cannot exchange arrays as a run does; see docs/how-to/troubleshooting/processes.md"
        yield Finding("problem", "links", links["error"], advice)
    elif links is not None:
        latency, bandwidth = links["latency"], links["bandwidth"]
        advice = "check that the fast network is used (NCCL_SOCKET_IFNAME on GPUs); else try plan.extra_in_flight and plan.links"
        found = f"an array takes {latency * 1e3:.2f} ms to the next process, and 1 MB goes at {bandwidth / 1e6:.0f} MB/s"
        yield from _first("links", found, (latency > _LONG_TRIP or bandwidth < _NARROW, "note", advice))
