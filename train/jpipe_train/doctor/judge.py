"""Judge recorded facts: what is in order, what to know, and what to change."""

from collections.abc import Iterator, Sequence
from typing import Any

from jpipe_train.doctor.findings import Finding, Level, differing, merged, processes
from jpipe_train.doctor.local import LIBRARIES, Facts
from jpipe_train.doctor.variables import judge_variables

_GB = 1e9
_LITTLE_MEMORY, _SMALL_MEMORY = 1 * _GB, 4 * _GB  # of the host: JAX alone needs half a GB in each process
_LITTLE_DISK, _SMALL_DISK = 1 * _GB, 20 * _GB
_SMALL_SHARED_MEMORY = 1 * _GB  # Docker gives 64 MB, and NCCL needs some tens of MB for each pair of GPUs
_SLOW_DISK = 50e6  # bytes per second
_CLOCK, _WRONG_CLOCK = 0.1, 60.0  # seconds apart
_LONG_TRIP, _NARROW = 5e-3, 100e6  # seconds, and bytes per second, as between hosts of different places
_GONE_WITH_THE_CONTAINER = ("tmpfs", "ramfs", "overlay")
_MUST_AGREE = ("jax", "jaxlib", "flax", "optax", "numpy")  # the processes of a run compare them, and end if they differ


def judge(everyone: Sequence[Facts], problems: Sequence[Finding] = ()) -> list[Finding]:
    """Return the findings, in the order of the table.

    Args:
        everyone: the facts of each process, as `gather` of `jpipe_train.doctor.local` returns them; with several processes also `clock` and
            `sees folder`, and in process 0 `links`.
        problems: what went wrong while the facts were gathered.
    """
    checks = (_devices, _cores, _memory, _shared_memory, _folder, _cache, judge_variables)
    return [
        *problems,
        *_processes(everyone),
        *_versions(everyone),
        *_differences(everyone),
        *(finding for check in checks for finding in merged([list(check(facts)) for facts in everyone])),
        *_clocks(everyone),
        *_links(everyone),
    ]


def failed_probe(what: str, facts: dict[str, Any], advice: str = "", level: Level = "problem") -> Finding:
    """Return the finding of a probe that failed."""
    return Finding(level, what, facts["error"], advice)


def _processes(everyone: Sequence[Facts]) -> Iterator[Finding]:
    hosts: dict[str, list[int]] = {}
    for index, facts in enumerate(everyone):
        hosts.setdefault(facts["process"].get("host", "an unknown host"), []).append(index)
    asked = everyone[0]["process"].get("count", 1)
    shown = "; ".join(f"{host} has {processes(indices)}" for host, indices in hosts.items())
    if asked == 1:
        yield Finding("ok", "processes", f"one, on {next(iter(hosts))}")
    elif len(everyone) == asked:
        yield Finding("ok", "processes", f"{asked} connected: {shown}")
    else:
        yield Finding("note", "processes", f"{asked} were expected; the rows below are about this one alone, on {next(iter(hosts))}")


def _versions(everyone: Sequence[Facts]) -> Iterator[Finding]:
    failed = [facts["versions"] for facts in everyone if "error" in facts["versions"]]
    if failed:
        yield failed_probe("versions", failed[0])
        return
    of = [facts["versions"] for facts in everyone]
    for name in ("python", *LIBRARIES):
        if len({versions[name] for versions in of}) > 1:
            level: Level = "problem" if name in _MUST_AGREE else "note"
            advice = "install the same version on all hosts" + ("; processes of a run end where it differs" if level == "problem" else "")
            yield Finding(level, "versions", f"{name} differs: {differing([versions[name] for versions in of])}", advice)
    missing = [name for name in LIBRARIES if any(versions[name] == "not installed" for versions in of)]
    if missing:
        yield Finding("problem", "versions", f"{', '.join(missing)} not installed", "install jpipe with its requirements: pip install .")
        return
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


def _devices(facts: Facts) -> Iterator[Finding]:
    devices, gpus = facts["devices"], facts["gpus"].get("count", 0)
    if "error" in devices:
        advice = "try JAX alone: python -c 'import jax; print(jax.devices())'; see docs/how-to/install.md for drivers and extras"
        yield failed_probe("devices", devices, advice)
        return
    memory = "" if not devices["memory"] else f", {devices['memory'] / _GB:.1f} GB each for JAX"
    if devices["platform"] == "cpu" and gpus:
        advice = "install jpipe with the extra cuda13 or cuda12, and check JAX_PLATFORMS and CUDA_VISIBLE_DEVICES below"
        yield Finding("problem", "devices", f"JAX finds CPUs alone, and this host has {gpus} NVIDIA GPUs", advice)
    elif len(devices["kinds"]) > 1:
        advice = "select devices of one kind, with CUDA_VISIBLE_DEVICES or JAX_LOCAL_DEVICE_IDS"
        yield Finding("problem", "devices", f"several kinds in one process: {', '.join(devices['kinds'])}", advice)
    else:
        count = "the CPU" if devices["platform"] == "cpu" else f"{devices['count']} × {devices['kinds'][0]}"
        yield Finding("ok", "devices", f"{count}{memory}")


def _cores(facts: Facts) -> Iterator[Finding]:
    cores = facts["cores"]
    if "error" in cores:
        yield failed_probe("cores", cores, level="note")
        return
    usable, limit = cores["usable"], cores["limit"]
    found = f"{usable} of {cores['machine']} usable" + ("" if limit is None else f", the control group limits it to {limit:g}")
    if limit is not None and limit < 0.75 * usable:
        advice = "ask for more CPU (docker --cpus, resources.limits.cpu), or pin the process: threads beyond the limit are throttled"
        yield Finding("note", "cores", found, advice)
    elif usable == 1 and (cores["machine"] or 1) > 1:
        advice = "with SLURM give srun --cpus-per-task; elsewhere check taskset and the CPU set of the container"
        yield Finding("note", "cores", found, advice)
    else:
        yield Finding("ok", "cores", found)


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts["memory"]
    if "error" in memory:
        yield failed_probe("memory", memory, level="note")
        return
    limited = " (the limit of the control group)" if memory["limit"] is not None and memory["limit"] <= memory["total"] else ""
    found = f"{memory['total'] / _GB:.1f} GB{limited}"
    measured: dict[str, Any] = {"measured": f"{memory['available'] / _GB:.1f} GB free", "least": float(memory["available"])}
    if memory["available"] < _LITTLE_MEMORY:
        yield Finding(
            "problem", "memory", found, "ask for more (sbatch --mem, resources.limits.memory), or end what else runs there", **measured
        )
    elif memory["available"] < _SMALL_MEMORY:
        yield Finding(
            "note", "memory", found, "each process needs about 1 GB besides data, state in host memory and checkpoints", **measured
        )
    else:
        yield Finding("ok", "memory", found, **measured)


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    shared, devices = facts["shared memory"], facts["devices"]
    if "error" in shared:
        yield failed_probe("shared memory", shared, level="note")
        return
    found = f"{shared['total'] / _GB:.2f} GB in /dev/shm"
    measured: dict[str, Any] = {"measured": f"{shared['available'] / _GB:.2f} GB free", "least": float(shared["available"])}
    has_gpus = devices.get("platform") == "gpu" and max(devices["count"], facts["gpus"].get("count", 0)) > 1
    if has_gpus and shared["available"] < _SMALL_SHARED_MEMORY:
        advice = (
            "NCCL needs it between the GPUs of a host: docker --shm-size=2g; on Kubernetes a volume at /dev/shm, emptyDir.medium: Memory"
        )
        yield Finding("problem", "shared memory", found, advice, **measured)
    else:
        yield Finding("ok", "shared memory", found, **measured)


def _folder(facts: Facts) -> Iterator[Finding]:
    folder = facts["folder"]
    if "error" in folder:
        yield failed_probe("run folder", folder, "choose another run.dir, or make the folder and its owner: mkdir, chown")
        return
    available, speed = folder["available"], folder["bytes_per_second"]
    where = folder["path"] if folder["exists"] else f"{folder['path']}, not yet there; tried in {folder['existing']}"
    found = f"{where}: {folder['filesystem'] or 'unknown file system'}"
    measured: dict[str, Any] = {"measured": f"{available / _GB:.1f} GB free, {speed / 1e6:.0f} MB/s to disk", "least": float(speed)}
    if available < _LITTLE_DISK:
        advice = "free space, or choose another run.dir: a checkpoint is written before an old one goes"
        yield Finding("problem", "run folder", found, advice, **measured)
    elif folder["filesystem"] in _GONE_WITH_THE_CONTAINER:
        advice = "it ends with the container or the machine: set run.dir to a volume that stays, or a job cannot resume"
        yield Finding("note", "run folder", found, advice, **measured)
    elif available < _SMALL_DISK or speed < _SLOW_DISK:
        advice = "jpipe simulate shows the bytes of a checkpoint; keep few (checkpoint.keep) and write them rarely (checkpoint.every)"
        yield Finding("note", "run folder", found, advice, **measured)
    else:
        yield Finding("ok", "run folder", found, **measured)
    if facts.get("sees folder") is False:
        advice = "choose a run.dir that all hosts share, such as NFS or Lustre: all processes write their part of a checkpoint there"
        yield Finding("problem", "run folder", f"a file that process 0 writes in {folder['existing']} does not appear", advice)


def _cache(facts: Facts) -> Iterator[Finding]:
    cache = facts["compile cache"]
    if "error" in cache:
        yield failed_probe("compile cache", cache, "choose another folder for compile_cache, or null")
    elif cache["problem"]:
        yield Finding("note", "compile cache", cache["problem"], "each start compiles again; set compile_cache to a folder of your own")
    else:
        yield Finding("ok", "compile cache", cache["folder"] or "off")


def _clocks(everyone: Sequence[Facts]) -> Iterator[Finding]:
    clocks = {index: facts["clock"] for index, facts in enumerate(everyone) if "clock" in facts}
    if len(clocks) < 2:
        return
    apart = {index: max(abs(clock["offset"]) - clock["uncertainty"], 0.0) for index, clock in clocks.items()}
    worst = max(apart, key=lambda index: (apart[index], abs(clocks[index]["offset"])))
    offset, uncertainty = (clocks[worst][name] for name in ("offset", "uncertainty"))
    milliseconds = round(offset * 1e3, 2)
    ahead = f"{milliseconds:+.2f}" if milliseconds else "0.00"  # not -0.00
    found = f"at most {ahead} ms from process 0, in process {worst} (known to {uncertainty * 1e3:.2f} ms)"
    if apart[worst] > _CLOCK:
        level: Level = "problem" if apart[worst] > _WRONG_CLOCK else "note"
        yield Finding(level, "clocks", found, "synchronize the hosts (chrony or ntpd): certificates, logs and file times depend on it")
    else:
        yield Finding("ok", "clocks", found)


def _links(everyone: Sequence[Facts]) -> Iterator[Finding]:
    trips = {index: facts["clock"]["round_trip"] for index, facts in enumerate(everyone) if index and "clock" in facts}
    if trips:
        slowest = max(trips, key=lambda index: trips[index])
        yield Finding("ok", "messages", f"{trips[slowest] * 1e3:.2f} ms to process 0 and back from process {slowest}, the slowest")
    links = everyone[0].get("links")
    if links is None:
        return
    if "error" in links:
        yield failed_probe(
            "links", links, "the processes cannot exchange arrays as a run does; see docs/how-to/troubleshooting/processes.md"
        )
        return
    latency, bandwidth = links["latency"], links["bandwidth"]
    found = f"an array takes {latency * 1e3:.2f} ms to the next process, and 1 MB goes at {bandwidth / 1e6:.0f} MB/s"
    if latency > _LONG_TRIP or bandwidth < _NARROW:
        advice = "check that the fast network is used (NCCL_SOCKET_IFNAME on GPUs); else try plan.extra_in_flight and plan.links"
        yield Finding("note", "links", found, advice)
    else:
        yield Finding("ok", "links", found)
