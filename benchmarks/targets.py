"""`python -m benchmarks.targets`: read in programs compiled for GPUs and TPUs which transfers and sums are asynchronous, and what overlaps.

It compiles for targets that are not here (`pip install 'jpipe-train[target-cuda,target-tpu]'`), and runs nothing. With `--document` the
table goes into docs/explanation/communication.md.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import jpipe
from benchmarks.papers.document import Table, write
from jpipe.processes import Connection, Reduction
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_planner.machine.targets import find_target, target_devices
from jpipe_train.losses.cross_entropy import loss

TARGETS = {"h100-80gb": "H100", "v5e": "TPU v5e"}
KINDS = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
WORK = {"fusion", "dot", "convolution", "custom-call", "while", "conditional", "call", "scatter", "gather", "sort", "reduce"}
MESHES = {"weights sharded (model 4)": ({"model": 4}, False), "rows (data 4)": ({"data": 4}, False), "fsdp (data 4)": ({"data": 4}, True)}
ARRAY = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)


class Found(NamedTuple):
    """A collective in a compiled program.

    Attributes:
        kind: such as `all-reduce`.
        between: the number of computations between its start and its end; None if it is synchronous.
    """

    kind: str
    between: int | None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--document", type=Path)
    document = parser.parse_args(arguments).document
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for target in TARGETS:
        for what, programs in programs_for(target):
            by_kind: dict[str, list[Found]] = {}
            for program in programs:
                for collective in collectives(program.as_text() or ""):
                    by_kind.setdefault(collective.kind, []).append(collective)
            for kind, each in sorted(by_kind.items()):
                rows.setdefault((what, kind), {})[target] = in_words(each)
    cells = [(*key, *(by_target.get(target, "none") for target in TARGETS)) for key, by_target in rows.items()]
    table = Table("collectives of targets", ("program", "collective", *TARGETS.values()), cells)
    print(table.text)
    if document is not None:
        write(document, {table.name: table.text})


def programs_for(target: str) -> Iterator[tuple[str, list[jax.stages.Compiled]]]:
    """Yield what is compiled for a target, with its programs."""
    known = find_target(target)
    devices = target_devices(known, 8, 2)
    hosts = [[device for device in devices if device.process_index == process] for process in range(2)]
    connection = Connection(hosts[0][0], hosts[1][0])
    connection.compile([ARRAY])
    yield "message to another process", connection.programs
    reduction = Reduction((hosts[0][0], hosts[1][0]))
    reduction.compile([ARRAY])
    yield "sum of two processes", reduction.programs
    for name, (mesh, fsdp) in MESHES.items():
        compiled = stage_programs(mesh, fsdp, hosts[0])
        for call in ("forward", "backward"):
            yield f"{call} of a stage, {name}", [compiled[call]]


def stage_programs(mesh: dict[str, int], fsdp: bool, devices: Sequence[jax.Device]) -> dict[str, jax.stages.Compiled]:
    """Compile the first stage of a decoder with one block of width 1,024 in bfloat16 on a mesh, and return its programs by name."""
    config = ModelConfig(depth=2, width=1024, heads=16, seq_len=512, vocab_size=2048, compute_dtype="bfloat16")
    stack = layers(config)
    stages = [{"layers": ids, "mesh": mesh, "fsdp": fsdp} for ids in (stack.ids[:2], stack.ids[2:])]
    plan = jpipe.Plan(stages=stages, schedule="gpipe", microbatches=1)
    tokens = jax.ShapeDtypeStruct((8, 512), jnp.int32)
    pipe = jpipe.Pipeline(stack, plan, loss, optax.adamw(1e-3), precision=jpipe.Precision(params="bfloat16"))
    programs: dict[object, jax.stages.Compiled] = {}
    pipe.costs((tokens, tokens), compiled_for=devices, stages=[0], programs=programs)
    return {name_of(program): program for program in programs.values()}


def name_of(program: jax.stages.Compiled) -> str:
    """Return the name of a program, such as `forward`."""
    name = re.match(r"HloModule jit_(\w+)", program.as_text() or "")
    assert name is not None, "a program without a name"
    return name[1]


def collectives(text: str) -> Iterator[Found]:
    """Yield the collectives of a scheduled program."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%([\w.-]+) .*?{\n(.*?)^}", text, re.MULTILINE | re.DOTALL))
    wrapped = {*re.findall(r"async-start\(.*calls=%([\w.-]+)", text)}
    for body in (body for name, body in bodies.items() if name not in wrapped):
        started: dict[str, tuple[str, int]] = {}
        work = 0
        for name, operation, operands, after in re.findall(r"%([\w.-]+) = .*? ([a-z][a-z-]*)\((.*?)\)(.*)$", body, re.MULTILINE):
            if kind := re.fullmatch(rf"({KINDS})(-start)?", operation):
                if kind[2]:
                    started[name] = kind[1], work
                else:
                    yield Found(kind[1], None)
            elif operation == "async-start":
                called = re.search(r"calls=%([\w.-]+)", after)
                inside = re.search(rf" ({KINDS})\(", bodies.get(called[1], "") if called else "")
                if inside:
                    started[name] = inside[1], work
            elif operation.endswith("-done") and (first := re.search(r"%([\w.-]+)", operands)) and first[1] in started:
                kind_of, before = started.pop(first[1])
                yield Found(kind_of, work - before)
            elif operation in WORK:
                work += 1


def in_words(each: Sequence[Found]) -> str:
    """Count the collectives of one kind in a program; in brackets, the fewest and the most computations between start and done."""
    between = sorted(collective.between for collective in each if collective.between is not None)
    parts = [f"{len(each) - len(between)} synchronous"] if len(each) > len(between) else []
    if between:
        parts.append(f"{len(between)} asynchronous ({' to '.join(dict.fromkeys((str(between[0]), str(between[-1]))))})")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
