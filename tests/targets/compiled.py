"""The programs of a pipeline compiled for devices that are not here, and what their compiled text says."""

import math
import re

import jax

from jpipe import Pipeline
from jpipe.context import tracing_for
from jpipe.runtime._placement import place_on
from jpipe.stages._arrays import Arrays, shares_of
from jpipe.stages._compile import compile_start, compile_workers
from jpipe.stages._compiled_stage import CompiledStage


def compile_pipeline(pipe: Pipeline, batch, devices, *, start: bool = False) -> dict[int, CompiledStage]:
    """Compile all programs of each worker as `Pipeline.init` does, workers on equal meshes in one place, and check their donations."""
    with tracing_for(devices[0].platform):
        functions = pipe.stage_functions(batch)
        shares = [shares_of(pipe.plan, f) for f in functions]
        workers = {
            w: Arrays(functions[s], place_on(devices, functions[s].partition.mesh), share=shares[s][r])
            for w, (s, r) in enumerate(pipe.plan.workers)
        }
        stages = compile_workers(workers, pipe._steps_of(functions).verified_runs)
        for stage in stages.values() if start else ():
            compile_start(stage)
    for stage in stages.values():
        for name, program in stage.calls.items():
            check_donations(name, program)
    return stages


def programs_of(stages) -> dict[str, list]:
    """Return the programs of all workers by name, each once."""
    by_name: dict[str, dict[int, object]] = {}
    for stage in stages.values():
        for name, program in stage.calls.items():
            by_name.setdefault(name, {})[id(program)] = program
    return {name: list(programs.values()) for name, programs in by_name.items()}


def check_donations(name, program) -> None:
    """Check that each donated array becomes a result: XLA writes the result into its memory, so that no second copy is alive."""
    head, donated = text_of(program).partition("\n")[0], sum(info.donated for info in jax.tree.leaves(program.args_info))
    alias = re.search(r"input_output_alias={(.*?) }", head)
    numbers = {int(number) for number in re.findall(r"\((\d+), ", alias[1])} if alias else set()
    assert len(numbers) == donated, f"{name}: {donated} arrays are donated, {len(numbers)} become results"
    sizes = [array_bytes(array) for array in re.findall(r"(\w+\[[\d,]*\])", re.search(r"layout={\((.*?)\)->", head)[1])]
    expected, aliased = sum(sizes[i] for i in numbers), program.memory_analysis().alias_size_in_bytes
    if "T(" in head:  # arrays in tiles take more
        assert aliased >= expected
    else:
        assert aliased == expected, f"{name}: {expected} bytes are donated, {aliased} used again"


def array_bytes(array: str) -> int:
    """Return the bytes of an array such as `bf16[2,3]`."""
    dtype, shape = re.fullmatch(r"(\w+)\[([\d,]*)\]", array).groups()
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return math.prod(int(size) for size in shape.split(",") if size) * bits // 8


def text_of(program) -> str:
    """Return the compiled text."""
    return program.as_text()


def matrix_products(program) -> list[tuple[str, ...]]:
    """Return the dtypes of the factors of each matrix product in a compiled program, as they are multiplied."""
    products = []
    for computation in re.split(r"\n(?=\S)", text_of(program)):
        dtypes = dict(re.findall(r"%([\w.-]+) = \(?(\w+)\[", computation))
        for line in computation.splitlines():
            call = re.search(r" (dot|convolution|custom-call)\(([^)]*)\)", line)
            if call is None or (call[1] == "custom-call" and "gemm" not in line):
                continue
            if algorithm := re.search(r"algorithm=dot_(\w+?)_(\w+?)_", line):  # whatever the arrays are in
                products.append(algorithm.groups())
            else:
                products.append(tuple(dtypes[name] for name in re.findall(r"%([\w.-]+)", call[2])[:2]))
    return products


def collectives(program) -> set[str]:
    """Return the kinds of collectives in a compiled program."""
    kinds = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|ragged-all-to-all"
    return set(re.findall(rf" ({kinds})(?:-start)?\(", text_of(program)))
