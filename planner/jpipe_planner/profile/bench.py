"""Compile, run and time stages on a device of this machine, or on several devices at once."""

import functools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from jpipe.context import without_mesh
from jpipe.model import find_products
from jpipe_planner.profile.analyze import PROGRAMS, Name
from jpipe_planner.profile.model import Meter, Model
from jpipe_planner.profile.scratch import compiling_threads, scratch_bytes

__all__ = ["Together", "cores", "neighbours"]

Tree = Any
ByProgram = Mapping[str, float]

IN_ONE: tuple[Literal["forward_backward"]] = ("forward_backward",)
"""The program of a stage that is timed only for neighbours."""

NOISE = np.random.default_rng(0).normal(scale=1e-2, size=4093)
_EMPTY = ("",)  # the group without layers
_APART = ("forward", "backward")
_NEIGHBOURS = 3  # the number of layers that are timed together
SECONDS = 0.05  # the least total time of the microbatches that are timed together on one device
_MOST = 64  # the most microbatches that are timed together


class Programs:
    """The programs of stages at several sizes, each compiled once, in threads: XLA releases Python's lock while it compiles."""

    def __init__(self, model: Model, device: jax.Device, pool: Executor, meter: Meter) -> None:
        self.model, self.device, self._pool, self._meter = model, device, pool, meter
        self._compiling: dict[Any, tuple[Future[jax.stages.Compiled], float]] = {}

    def begin(self, groups: Sequence[tuple[str, ...]], rows: int) -> None:
        """Start compiling the stages of these layers and the empty stage, unless they are compiled already."""
        for ids, stage in self.stages(groups, rows).items():
            for name in PROGRAMS:
                if self._key(ids, name, rows) not in self._compiling:
                    traced = stage.trace(name, self.device)
                    lowered = traced.lower()
                    self._meter.begin(future := self._pool.submit(lowered.compile))
                    self._compiling[self._key(ids, name, rows)] = future, count_flops(traced, lowered)

    def stages(self, groups: Sequence[tuple[str, ...]], rows: int) -> dict[tuple[str, ...], jpipe.stages.StandaloneStage]:
        """Return the stages of these layers, and the empty stage."""
        return {ids: self.model.stage(ids, rows) for ids in groups} | {_EMPTY: _empty_stage()}

    def get(self, ids: tuple[str, ...], rows: int) -> dict[str, tuple[jax.stages.Compiled, float]]:
        """Return the programs of one stage by name, with their FLOPs."""
        compiling = {name: self._compiling[self._key(ids, name, rows)] for name in PROGRAMS}
        return {name: (future.result(), flops) for name, (future, flops) in compiling.items()}

    def _key(self, ids: tuple[str, ...], name: str, rows: int) -> tuple[Any, ...]:
        """Return the key of a program. It has no size for an update and for the empty stage, which are the same at all sizes."""
        return ids, name, None if name == "update" or ids == _EMPTY else rows


class Bench:
    """Stages at one microbatch size with their arrays, and an empty stage. Its programs were begun before."""

    def __init__(self, programs: Programs, groups: Sequence[tuple[str, ...]], rows: int) -> None:
        batch = programs.model.batch(rows)
        self._runs: dict[tuple[str, ...], StageRun] = {}
        self.temporary: dict[tuple[str, ...], int] = {}
        self.flops: dict[tuple[str, ...], ByProgram] = {}
        for ids, stage in programs.stages(groups, rows).items():
            compiled = programs.get(ids, rows)
            calls = {name: program for name, (program, _) in compiled.items()}
            self._runs[ids] = StageRun(stage, batch, calls, programs.device)
            self.temporary[ids] = max(scratch_bytes(calls[name]) for name in PROGRAMS)
            self.flops[ids] = {name: flops for name, (_, flops) in compiled.items()}
        self._seconds = defaultdict[Any, list[float]](list)
        self.time(1)  # warms up
        self._seconds.clear()

    def time(self, repetitions: int) -> None:
        """Run each program `repetitions` more times, one after the other."""
        for _ in range(repetitions):
            for name in PROGRAMS:
                for ids, run in self._runs.items():
                    self._seconds[ids, name].append(run.seconds(name))

    def medians(self) -> tuple[dict[tuple[str, ...], ByProgram], float]:
        """Return the median times of each stage's programs, less the time of the empty stage; and that time."""
        dispatch = statistics.median(self._seconds[_EMPTY, "forward"] + self._seconds[_EMPTY, "backward"])
        medians = {key: max(statistics.median(times) - dispatch, 0.0) for key, times in self._seconds.items()}
        return {ids: {name: medians[ids, name] for name in PROGRAMS} for ids in self._runs if ids != _EMPTY}, dispatch


class StageRun:
    """One stage with arrays of noise, and with the batch's inputs and labels if the stage reads them. Values do not change times."""

    def __init__(
        self, stage: jpipe.stages.StandaloneStage, batch: tuple[Tree, Tree], calls: Mapping[str, jax.stages.Compiled], device: jax.Device
    ) -> None:
        ids, stack = stage.stage.layers, stage.stack
        specs = {name: calls[name].args_info[0] for name in PROGRAMS}
        params, state, x, labels, draw = (_filled(spec, device) for spec in specs["forward"])
        if ids[0] == stack.ids[0]:
            x = _filled(batch[0], device)
        if ids[-1] == stack.ids[-1]:
            labels = _filled(batch[1], device)
        self._stage, self._calls, self._params, self._draw = stage, calls, params, draw
        self._arguments = state, x, labels
        self._message, self._sums = (_filled(spec, device) for spec in specs["backward"][3:5])
        self._scale = _filled(specs["backward"][6], device)
        self._optimizer, _, *self._late = (
            _filled(spec, device) for spec in specs["update"][1:]
        )  # the norm, and the position if it is read
        self._forward_arrays: Any = None  # the arrays that the last forward keeps for its backward
        jax.block_until_ready((params, self._arguments, self._message, self._sums, self._optimizer))

    def seconds(self, name: str) -> float:
        """Run one of the programs and return its seconds. A backward uses the arrays of the last forward."""
        begin = time.perf_counter()
        jax.block_until_ready(self.begin(name))
        return time.perf_counter() - begin

    def begin(self, name: str) -> Tree:
        """Start one of the programs and return its results, which may not be ready yet."""
        call = self._calls[name]
        match name:
            case "forward":
                (y, changed, saved), done = call(self._params, *self._arguments, self._draw)
                self._forward_arrays = self._stage.keep(self._arguments, (y, changed)), saved
                return y, changed, saved, done
            case "backward" | "forward_backward":
                arguments = self._forward_arrays if name == "backward" else self._arguments
                result, done = call(self._params, *arguments, self._message, self._sums, self._draw, self._scale)
                self._sums, self._forward_arrays = result[1], None
                return result, done
        result, done = call(self._stage.trained(self._params), self._optimizer, self._sums, *self._late)
        trained, self._optimizer, self._sums, _ = result
        self._params = self._stage.updated(self._params, trained)
        return result, done


def _filled(specs: Tree, device: jax.Device) -> Tree:
    """Replace each shape and dtype by an array of small noise, or of zeros for integers. Arrays stay as they are."""

    def fill(spec: Any) -> jax.Array:
        if not hasattr(spec, "dtype") or hasattr(spec, "__array__"):
            return jax.device_put(jnp.asarray(spec), device)
        if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(0), device)
        noise = NOISE if jnp.issubdtype(spec.dtype, jnp.inexact) else np.zeros(1)
        return jax.device_put(np.resize(noise, spec.shape).astype(spec.dtype), device)

    return jax.tree.map(fill, specs)


def _empty_stage() -> jpipe.stages.StandaloneStage:
    """Return an empty stage in the middle of a pipeline."""
    stack = jpipe.LayerStack(dict.fromkeys(("before", "here", "after"), jnp.negative))
    specs = stack.specs(jax.ShapeDtypeStruct((1,), np.float32))
    optimizer = jpipe.model.LayerwiseOptimizer(optax.identity())
    return jpipe.stages.StandaloneStage(stack, jpipe.Stage(layers=("here",)), specs, None, lambda y, labels: (y.sum(), y.sum()), optimizer)


class Together:
    """Neighbouring layers as one stage that computes microbatch after microbatch without waiting, as in a pipeline.

    `seconds` is about the time of a forward and a backward of these layers; short ones are repeated, to be timed together. `devices` of
    this process can compute at once.
    """

    @without_mesh()
    def __init__(
        self,
        model: Model,
        ids: Sequence[str],
        rows: int,
        seconds: float,
        devices: Sequence[jax.Device],
        recompute: str = "none",
        programs: tuple[Name | Literal["forward_backward"], ...] = PROGRAMS,
    ) -> None:
        self._calls = min(math.ceil(SECONDS / max(seconds, SECONDS / _MOST)), _MOST)
        stage = model.stage(ids, rows, recompute)
        with compiling_threads() as pool:
            begun = [{name: pool.submit(stage.trace(name, device).lower().compile) for name in programs} for device in devices]
            compiled = [{str(name): program.result() for name, program in of_device.items()} for of_device in begun]
        self._runs = [StageRun(stage, model.batch(rows), *each) for each in zip(compiled, devices, strict=True)]
        self.seconds(programs, len(devices))  # warms up

    def seconds(self, names: tuple[str, ...] = _APART, count: int = 1) -> float:
        """Return the mean seconds in which the first `count` devices at once run each of these programs once."""
        begin = time.perf_counter()
        for name in names * self._calls:
            results = [run.begin(name) for run in self._runs[:count]]
        jax.block_until_ready(results)
        return (time.perf_counter() - begin) / self._calls


def neighbours(ids: Sequence[str], kinds: Mapping[str, Any], seconds: Mapping[str, float]) -> tuple[str, ...]:
    """Return three neighbours (or all layers), as many as possible of them of the kind of layers that together take the longest."""
    by_kind = defaultdict[Any, float](float)
    for layer_id in ids:
        by_kind[kinds[layer_id]] += seconds[layer_id]
    longest = max(by_kind, key=by_kind.__getitem__)
    runs = [tuple(ids[n : n + _NEIGHBOURS]) for n in range(max(len(ids) - _NEIGHBOURS, 0) + 1)]
    return max(runs, key=lambda run: sum(kinds[layer_id] == longest for layer_id in run))


def cores(rounds: Sequence[tuple[float, float]], devices: int) -> float:
    """Return how many devices can compute at the same time as fast as one device alone.

    A round has the seconds of one device alone, and of all devices together right after. The median of their ratios counts, so that a
    change of the machine's speed concerns one round.
    """
    ratio = statistics.median(alone / together if together > 0 else 1.0 for alone, together in rounds)
    return min(max(devices * ratio, 1.0), float(devices))


def count_flops(traced: jax.stages.Traced, lowered: jax.stages.Lowered) -> float:
    """Return the FLOPs of a program: the FLOPs from XLA's cost analysis, plus the loop iterations that it omits; 0 if it reports none.

    XLA counts the body of a loop once. For a `scan`, the matrix products and convolutions of the other iterations are added. For a `while`,
    nothing is added, because the number of iterations is unknown. In a product of groups of rows, each with its own kernel
    (`jax.lax.ragged_dot`), each row counts once, even if XLA multiplies all rows by all kernels, as for CPUs. Nothing is compiled.
    """
    # Only the iterations that XLA has not counted are added. It has counted the first iteration of every loop.
    further = sum(times * flops - _counted_by_xla(equation, flops) for equation, flops, times in find_products(traced.jaxpr.jaxpr))
    return _analyzed(lowered) + further


def _counted_by_xla(equation: Any, flops: float) -> float:
    """Return the FLOPs that XLA counts for a product. For a product of groups of rows they depend on the platform."""
    if equation.primitive.name != "ragged_dot_general":
        return flops
    bind = functools.partial(equation.primitive.bind, **equation.params)
    return _analyzed(jax.jit(bind).lower(*(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in equation.invars)))


def _analyzed(lowered: jax.stages.Lowered) -> float:
    """Return the FLOPs of a program by XLA's cost analysis. Some backends have no analysis, and some return a list with one analysis."""
    analysis: Any = lowered.cost_analysis()
    analysis = analysis[0] if isinstance(analysis, list) else analysis or {}
    return float(analysis.get("flops", 0.0))
