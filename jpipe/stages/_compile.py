"""Ahead-of-time compilation of the calls of stages, and of the initialization of layers, for the devices of workers."""

import contextlib
import functools
import hashlib
import os
import re
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import Empty, LifoQueue
from types import MappingProxyType
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jpipe.capabilities.registry import exchange_of, runtimes_of, values_of
from jpipe.errors import callers_code, cause
from jpipe.meshes._place import Place
from jpipe.model._function_arguments import Loss
from jpipe.model._layer import Layer, LayerSpec, key_spec
from jpipe.model._stack import LayerStack
from jpipe.model.jaxprs._wanted import without_effects
from jpipe.ops import OPS
from jpipe.plan import Plan
from jpipe.programs._instructions import (
    AllReduce,
    Compute,
    Instruction,
    Program,
    Update,
)
from jpipe.stages._arrays import CHOOSING_LAYOUTS, Arrays
from jpipe.stages._calls import UpdateKind, ops_of_stage, trace_call
from jpipe.stages._compiled_stage import CompiledStage, choices, sharded_by_xla, update_kind
from jpipe.stages.functions._evaluation import can_evaluate
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any
CompiledPrograms = dict[tuple[Place, str], jax.stages.Compiled]
"""Compiled programs by place and `program_key`."""


def compile_workers(
    workers: Mapping[int, Arrays],
    programs: Iterable[Program],
    like: Mapping[int, CompiledStage] | None = None,
) -> dict[int, CompiledStage]:
    """Compile for each of these workers the calls that the programs need, and the evaluation. Workers in one place share calls.

    Calls are traced one after the other and compiled in parallel. `like` has the same workers, compiled for microbatches of other shapes:
    calls that do not depend on the shapes are reused.
    """
    names = {w: {"evaluate"} if can_evaluate(a.functions) else set[str]() for w, a in workers.items()}  # no instruction names these calls
    for w, a in workers.items():
        names[w].update(("add_state", "mean_state") if like is None and a.functions.averages_when_read else ())
    for program in programs:
        for instruction in program.instructions:
            if (w := instruction.worker) in workers:
                f = workers[w].functions
                names[w].update(name for name in _calls(instruction, program, f) if like is None or name in ops_of_stage(f))
    used: dict[tuple[Any, ...], set[str]] = {}  # by layers, place and share; None for calls that do not depend on the share
    stages: dict[tuple[Any, ...], Arrays] = {}
    keys = {w: (a.functions.stage.layers, a.place) for w, a in workers.items()}
    for w, a in workers.items():
        of_share = {name for name in names[w] if name in get_args(UpdateKind)}
        for each, some in ((replace(a, share=None), names[w] - of_share), (a, of_share)):
            used.setdefault((*keys[w], each.share), set()).update(some)
            stages[*keys[w], each.share] = each
    compiled = dict(zip(stages, _compile_in_turns([(a, sorted(used[key])) for key, a in stages.items()]), strict=True))
    made: dict[tuple[Any, ...], CompiledStage] = {}
    for w, a in workers.items():
        key = *keys[w], a.share
        made.setdefault(key, CompiledStage(stages[key], compiled[*keys[w], None] | compiled[key]))
    of_workers = {w: made[*keys[w], a.share] for w, a in workers.items()}
    return of_workers if like is None else {w: replace(stage, calls=like[w].calls | stage.calls) for w, stage in of_workers.items()}


def _compile_in_turns(
    stages: Sequence[tuple[Arrays, list[str]]], known: CompiledPrograms | None = None
) -> list[dict[str, jax.stages.Compiled]]:
    """Compile the named calls of each stage.

    On a mesh and on a TPU the calls of `sharded_by_xla` precede those that read their results. In the default layouts, a TPU would copy
    many residuals after the forward and before the backward.

    With `known` the calls are compiled only for analysis, while further calls are traced. Programs in `known` are not compiled again, and
    new programs are added to it.
    """
    compiled: list[dict[str, jax.stages.Compiled]] = [{} for _ in stages]
    platform = next((a.place.first.platform for a, _ in stages), "")  # of all stages
    arrays = [replace(a, any_layout=platform in CHOOSING_LAYOUTS) for a, _ in stages]
    is_open = [bool(a.place.mesh) or a.any_layout for a in arrays]
    for turn in (*dict.fromkeys(name for a in arrays for name in sharded_by_xla(a.functions)), None):
        due = [
            (i, name)
            for i, (a, names) in enumerate(stages)
            for name in names
            if name not in compiled[i] and (turn is None or (is_open[i] and name == turn and name in sharded_by_xla(a.functions)))
        ]
        lowered = (_lower_call(arrays[i], name) for i, name in due)
        if known is None:
            calls = compile_in_parallel(lowered, _OPTIONS.get(platform, {}))
        else:
            keys = _compile_unknown(((arrays[i].place, call) for (i, _), call in zip(due, lowered, strict=True)), known)
            calls = [known[key] for key in keys]
        for (i, name), call in zip(due, calls, strict=True):
            compiled[i][name] = call
            if turn is not None:
                chosen = choices(arrays[i].functions, turn, call, layouts=arrays[i].any_layout)
                arrays[i] = replace(arrays[i], chosen={**chosen, **arrays[i].chosen})
    return compiled


def _compile_unknown(programs: Iterable[tuple[Place, jax.stages.Lowered]], known: CompiledPrograms) -> list[tuple[Place, str]]:
    """Compile the programs that `known` lacks, add them, and return the keys of all programs in `known`.

    The programs are only for analysis. Threads compile them while the next ones are lowered. Programs with the same `program_key`, as of
    equal stages, are compiled once. After an error nothing more is compiled.
    """
    keys, begun = list[tuple[Place, str]](), dict[tuple[Place, str], Future[jax.stages.Compiled]]()
    pool = ThreadPoolExecutor(os.cpu_count())  # XLA releases Python's lock while it compiles
    try:
        for place, call in programs:
            keys.append(key := (place, program_key(call)))
            if key not in known and key not in begun:
                begun[key] = pool.submit(compile_for_analysis, call, place.first)
        known.update((key, program.result()) for key, program in begun.items())
    finally:
        pool.shutdown(cancel_futures=True)
    return keys


def with_metrics(workers: Mapping[int, CompiledStage], metrics: Mapping[str, Loss]) -> dict[int, CompiledStage]:
    """Return copies of workers of the last stage that also compute these metrics in evaluations."""
    measuring = {w: replace(stage.arrays, functions=replace(stage.functions, metrics=metrics)) for w, stage in workers.items()}
    return _evaluating_by({w: replace(workers[w], arrays=arrays) for w, arrays in measuring.items()}, "evaluate")


def with_outputs(workers: Mapping[int, CompiledStage]) -> dict[int, CompiledStage]:
    """Return copies of workers of the last stage that return the model's outputs, instead of the loss, in evaluations."""
    return _evaluating_by(workers, "predict")


def _evaluating_by(workers: Mapping[int, CompiledStage], name: str) -> dict[int, CompiledStage]:
    """Return copies of the workers with this call as their evaluation."""
    lowered = {stage.place: _lower_call(replace(stage.arrays, share=None), name) for stage in workers.values()}
    compiled = dict(zip(lowered, compile_in_parallel(list(lowered.values())), strict=True))
    return {w: replace(stage, calls=stage.calls | {"evaluate": compiled[stage.place]}) for w, stage in workers.items()}


def compile_stages(
    plan: Plan, stages: Mapping[int, Arrays], programs: Iterable[Program], known: CompiledPrograms | None = None
) -> dict[int, CompiledStage]:
    """Compile the calls of some stages, except evaluations, only for analysis; equal stages are compiled once.

    Programs in `known` are not compiled again; new programs are added to it.
    """
    names = {s: set[str]() for s in stages}
    for program in programs:
        for instruction in program.instructions:
            s, _ = plan.workers[instruction.worker]
            if s in stages:
                names[s].update(_calls(instruction, program, stages[s].functions))
    compiled = _compile_in_turns([(a, sorted(names[s])) for s, a in stages.items()], {} if known is None else known)
    return {s: CompiledStage(a, calls) for (s, a), calls in zip(stages.items(), compiled, strict=True)}


def count_calls(program: Program, functions: Sequence[StageFunctions]) -> list[Counter[str]]:
    """Count how often a program runs each call of each stage, over all its replicas."""
    counts: list[Counter[str]] = [Counter() for _ in functions]
    for instruction in program.instructions:
        s, _ = program.plan.workers[instruction.worker]
        counts[s].update(_calls(instruction, program, functions[s]))
    return counts


def _calls(instruction: Instruction, program: Program, f: StageFunctions) -> Iterator[str]:
    """Yield the calls that an instruction needs at a stage."""
    yield from _calls_of_core(instruction, program, f)
    for hooks in runtimes_of(program.plan, f.capabilities):
        if (calls := hooks.used_calls.get(type(instruction))) is not None:
            yield from calls(f, instruction)


def _calls_of_core(instruction: Instruction, program: Program, f: StageFunctions) -> tuple[str, ...]:
    stage = program.plan.workers[instruction.worker][0]
    match instruction:
        case Compute():
            return (OPS[instruction.op].function + instruction.piece,)
        case AllReduce(piece=piece):
            summing = exchange_of(values_of(program.plan)).sums
            names = ("add", "finish") if summing is None else summing.calls
            return tuple(f"{name}{piece}" for name in names)
        case Update():
            aside = ("zero_accumulators", "mean_loss") if stage == program.plan.depth - 1 else ("zero_accumulators",)
            late = () if f.late_sums is None or f.stage.sum_parts else ("sum_devices",)
            return (update_kind(instruction), *late, *(aside if program.separates_sums[stage] else ()))
    return ()


def compile_start(stage: CompiledStage) -> Callable[[Tree], tuple[Tree, Tree, Tree]]:
    """Return `fresh params -> (weight version, optimizer state, accumulators)` of a stage before batch 0, compiled once for each stage."""
    f, starts = stage.functions, stage.starts
    if not starts:
        names = ["init_optimizer", "zero_accumulators"] + ["first_version"] * f.precision.has_masters
        lowered = [_lower_call(stage.arrays, name) for name in names]
        starts.update(zip(names, compile_in_parallel(lowered), strict=True))

    def start(fresh: Tree) -> tuple[Tree, Tree, Tree]:
        version = starts["first_version"](fresh) if "first_version" in starts else fresh
        optimizer = starts["init_optimizer"](stage.arrays.updated(fresh))
        return version, optimizer, starts["zero_accumulators"](version)

    return start


def program_key(program: jax.stages.Lowered) -> str:
    """Return a hash of the text of a program. Programs that differ only in the names of their results have the same hash."""
    return hashlib.sha256(_RESULT_NAME.sub("", program.as_text()).encode()).hexdigest()


_RESULT_NAME = re.compile(r'jax\.result_info = "[^"]*"')  # such as the id of a layer


def compile_for_analysis(program: jax.stages.Lowered, device: jax.Device) -> jax.stages.Compiled:
    """Compile a program that will not run, to read its memory.

    XLA assigns memory before it makes kernels, which take most of the time. So kernels are made with little effort. For CPUs LLVM does not
    optimize. For another machine's GPU XLA tries no variants of kernels, uses the smallest tiles for matrix products, and reuses kernels of
    earlier programs. In all compared programs, the memory was the same as with usual compilation.

    Args:
        program: the program, lowered for the device.
        device: a device of this process, or of another machine.
    """
    if device.platform == "cpu":
        return program.compile(dict(_NO_OPTIMIZATION))
    if device.platform != "gpu" or device in jax.local_devices():
        return _compile(program, _OPTIONS.get(device.platform, {}))
    with _kernel_file() as kernels, contextlib.suppress(jax.errors.JaxRuntimeError):
        return _compile(program, {**_LITTLE_EFFORT, **kernels})
    return program.compile({"xla_gpu_autotune_level": 0})  # some products or convolutions need other tiles, or none


def _compile(program: jax.stages.Lowered, options: Mapping[str, Any]) -> jax.stages.Compiled:
    """Compile a program, without the options that XLA lacks for its device."""
    known = dict(options)
    while True:
        try:
            return program.compile(known)
        except jax.errors.JaxRuntimeError as error:
            unknown = _UNKNOWN_OPTION.search(str(error))
            if unknown is None or unknown[1] not in known:
                raise
            del known[unknown[1]]


_OPTIONS: Mapping[str, Mapping[str, Any]] = {"tpu": {"xla_max_cross_program_prefetches": 0}}
"""Options of all programs, by platform. Programs of a TPU would keep one argument in its fast memory for their next run, and have less room
for other arrays; but a stage runs other programs before."""
_NO_OPTIMIZATION: Mapping[str, Any] = {"xla_backend_optimization_level": 0}
_LITTLE_EFFORT: Mapping[str, Any] = {
    **_NO_OPTIMIZATION,
    "xla_gpu_autotune_level": 0,
    "xla_force_config": "backend: TRITON backend_config { triton { block_m: 16 block_n: 16 block_k: 16 num_stages: 1 "
    "num_warps: 1 num_ctas: 1 } }",
    "xla_gpu_experimental_enable_tiling_propagation": False,  # the older search for tiles of fusions takes a quarter of the time
    "xla_llvm_disable_expensive_passes": True,
    "xla_gpu_disable_gpuasm_optimizations": True,
}
_UNKNOWN_OPTION = re.compile(r"No such compile option: '(\w+)'")
_KERNEL_FILES = LifoQueue[str]()  # files that no program is using
_KERNEL_LOCK = threading.Lock()  # without it two threads could make two folders


@contextlib.contextmanager
def _kernel_file() -> Iterator[dict[str, str]]:
    """Yield the option that names a file with kernels of earlier programs, which no other thread uses at the same time.

    Without a folder for temporary files, the option is left out.
    """
    try:
        name = _KERNEL_FILES.get_nowait()
    except Empty:
        try:
            with _KERNEL_LOCK:
                name = os.path.join(_folder_of_kernels().name, uuid.uuid4().hex)
        except OSError:
            yield {}
            return
    try:
        yield {"xla_gpu_kernel_cache_file": name}
    finally:
        _KERNEL_FILES.put(name)


@functools.cache
def _folder_of_kernels() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="jpipe-kernels-", ignore_cleanup_errors=True)


def compile_in_parallel(
    lowered: Iterable[jax.stages.Lowered], options: Mapping[str, Any] = MappingProxyType({})
) -> list[jax.stages.Compiled]:
    """Compile programs in parallel, each while the next ones are lowered. Options that XLA lacks are left out."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # XLA releases Python's lock while it compiles
        return list(pool.map(lambda call: _compile(call, options), lowered))


def _lower_call(arrays: Arrays, name: str) -> jax.stages.Lowered:
    traced = trace_call(arrays, name)
    if not traced.jaxpr.effects:
        return traced.lower()

    def message(error: BaseException) -> str:
        if arrays.place.mesh:
            where, remedy = " on a mesh", "make the side effect unordered (ordered=False), or give the stage one device"
        else:
            where, remedy = "", "remove the side effect; for a check of checkify, wrap the function that contains it in checkify.checkify"
        return f"{arrays.functions.description}: a side effect cannot run{where}: {cause(error)}; {remedy}"

    with callers_code(message):
        return traced.lower()


_RUN_ONCE: Mapping[str, str | bool] = MappingProxyType({"xla_backend_optimization_level": "1"})
"""Options for programs of a CPU that run once, which then compile in half the time and compute the same bits."""


def compile_initializers(
    stack: LayerStack, specs: Mapping[str, LayerSpec], layer_places: Iterable[tuple[str, Place]]
) -> dict[tuple[str, Place], jax.stages.Compiled]:
    """Compile `key -> (params, state)` for each (layer id, place), unsharded on the place's first device; equal layers share a program.

    There is one unsharded program per layer, not per stage, so the bits of the weights depend neither on the cut nor on the mesh.
    """
    distinct: dict[tuple[str, jax.Device], jax.stages.Lowered] = {}
    program_of = {}
    for layer_id, place in dict.fromkeys(layer_places):
        lowered = _lower_initializer(stack.layers[layer_id], specs[layer_id].x, place.first)
        program_of[layer_id, place] = lowered.as_text(), place.first
        distinct.setdefault(program_of[layer_id, place], lowered)
    is_usual = jax.default_backend() == "cpu" and not jax.config.values["jax_disable_most_optimizations"]
    compiled = dict(zip(distinct, compile_in_parallel(list(distinct.values()), _RUN_ONCE if is_usual else {}), strict=True))
    return {key: compiled[program] for key, program in program_of.items()}


def _initializer(init: Callable[[jax.Array, Tree], tuple[Tree, Tree]], x: Tree) -> Callable[[jax.Array], tuple[Tree, Tree]]:
    return lambda key: init(key, jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), x))


def _lower_initializer(layer: Layer, x: Tree, device: jax.Device) -> jax.stages.Lowered:
    key = Place((device,)).specs(key_spec())
    traced = jax.jit(_initializer(layer.init, x)).trace(key)
    if traced.jaxpr.effects:  # a Linen module runs its forward on the zeros
        traced = jax.jit(_initializer(without_effects(layer.init, (False, True)), x)).trace(key)
    return traced.lower()
