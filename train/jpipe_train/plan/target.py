"""`jpipe target`: the table of targets, one target with its sources, and the target of this machine."""

from collections.abc import Mapping

from rich.filesize import decimal

from jpipe import InputError, files
from jpipe_planner.machine.attached import attached_target
from jpipe_planner.machine.targets import TargetUnavailable, find_target, known_targets, target_devices, target_refusal
from jpipe_train.console.terminal import align

_ENDINGS = ".yaml", ".yml"


def listing() -> list[str]:
    """Return the table of targets as lines, and for targets without a compiler here the packages to install."""
    targets = known_targets()
    dtypes = list(dict.fromkeys(dtype for target in targets.values() for dtype in target.flops))
    refusals = {name: target_refusal(target) for name, target in targets.items()}
    head = ["target", "device", "memory", "reserved", *dtypes, "bandwidth", "compiler installed"]
    rows = list[list[str]]()
    for name, target in targets.items():
        rates = [f"{target.flops[dtype] / 1e12:g}" if dtype in target.flops else "–" for dtype in dtypes]
        sizes = decimal(int(target.memory)), decimal(int(sum(target.reserved.values())))
        bandwidth = f"{target.memory_bandwidth / 1e9:,.0f} GB/s"
        rows.append([name, target.name, *sizes, *rates, bandwidth, "yes" if refusals[name] is None else "no"])
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        if reason is not None:
            names_by_reason.setdefault(reason, []).append(name)
    return [
        *align([head, *rows]),
        "",
        "reserved: bytes that a plan leaves free; by dtype: peak TFLOP/s without sparsity. jpipe target NAME shows one with its sources.",
        *(f"no compiler here: {', '.join(names)}: {reason}" for reason, names in names_by_reason.items()),
    ]


def description(name: str) -> list[str]:
    """Return lines with the figures and sources of a target, and whether XLA can compile for it here. Raise InputError if there is none."""
    target, compiled = find_target(name), "yes"
    try:
        target_devices(target)
    except TargetUnavailable as error:
        compiled = f"no: {error.at('')}"
    return [
        f"{name}: {target.name} ({target.platform})",
        f"memory: {decimal(int(target.memory))}; a plan may use {decimal(int(target.limit))}",
        f"reserved: {_listed({what: decimal(int(size)) for what, size in target.reserved.items()})}",
        f"peak rates without sparsity: {_listed({dtype: f'{rate / 1e12:g} TFLOP/s' for dtype, rate in target.flops.items()})}",
        f"efficiency: {target.efficiency:g} of these in large matrix products",
        f"memory bandwidth: {target.memory_bandwidth / 1e9:,.2f} GB/s",
        f"link to host memory: {target.host.bandwidth / 1e9:g} GB/s in each direction",
        f"for XLA: {_listed({key: str(value) for key, value in target.compiler.items()})}",
        f"compiled here: {compiled}",
        "sources:" if target.sources else "sources: none",
        *(f"  {source}" for source in target.sources),
    ]


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "nothing"


def write_here(out: str | None) -> list[str]:
    """Write this machine's GPU or TPU as a target into a new file, and return lines about it. Raise InputError if that fails."""
    if out is not None and not out.endswith(_ENDINGS):
        raise InputError(where="--out", expected="a name that ends in .yaml", found=f"'{out}'")
    if out is not None:
        files.unused(out, "--out")
    attached = attached_target()
    path = files.unused(out or f"{attached.name}.yaml", "--out")
    shown = files.shown(path)
    with files.writing("--out", shown):
        files.write_atomically(path, attached.text)
    if not attached.table:
        rates = f"the table has no {attached.kind}: add its peak FLOP/s to 'flops' in the file before you use the file"
    else:
        rates = f"its FLOP/s, efficiency and reserved bytes are taken from {attached.table} in the table"
    return [
        f"written: {shown}, {attached.kind}; {rates}",
        *([f"it differs from the table: {', '.join(attached.differing)}"] if attached.differing else []),
        f"to plan for it on another machine: jpipe simulate CONFIG --target {shown}, or device: {{target: {shown}}} in a topology",
    ]
