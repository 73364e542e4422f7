"""The measured profile: every distinct layer compiled as a pipeline compiles it, and timed on the device at hand."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from planner.analyze import PROGRAMS, scratch_bytes
from planner.flops import count_flops
from planner.model import POLICIES, Batch, Costs, Meter, Model, Progress, parts_of_bytes, profile_of
from planner.profile import Profile

Tree = Any
ByProgram = Mapping[str, float]

SHORT = 2e-4  # seconds; programs that take less are timed in groups
FEWEST = 3  # repetitions, however little time there is
NOISE = np.random.default_rng(0).normal(scale=1e-2, size=4093)
_EMPTY = ("",)  # the group that has no layers
_Known = dict[tuple[tuple[str, ...], str, int | None], tuple[jax.stages.Compiled, float]]
"""Programs and their FLOPs by group, name and rows."""


def measure(
    stack: jpipe.LayerStack,
    batch: Batch,
    loss: Callable[[Any, Any], tuple[jax.Array, jax.Array]],
    optimizer: optax.GradientTransformation,
    sizes: Sequence[int],
    *,
    policies: Sequence[str] = POLICIES,
    device: jax.Device | None = None,
    repetitions: int = 15,
    seconds: float = 20.0,
    progress: Progress | None = None,
) -> Profile:
    """Profile a model on a device that is here; each distinct layer has to fit, with its gradients, optimizer state and residuals.

    Forward, backward and update of each distinct layer are compiled as a stage of their own and run in turns, so that a slow moment of
    the machine, and what caches hold, is no single layer's. A time is a median, less what a stage without work takes, which is the
    profile's `dispatch`. Neighbours that are too short to be timed alone are timed as one stage, whose time is split by FLOPs.

    Args:
        stack: the model.
        batch: `rows -> (inputs, labels)` of a microbatch; where they are arrays, the first layer and the loss get their values.
        loss: `(outputs, labels) -> (sum, weight)`.
        optimizer: any that a `jpipe.Pipeline` takes.
        sizes: the microbatch sizes, in rows.
        policies: the recomputation policies whose residuals are wanted.
        device: by default the first of this process.
        repetitions: of each program, at most; at least 3.
        seconds: after which no further repetition begins, all sizes together; compiling comes on top of it.
        progress: called with the parts of the work that are done, and their number.

    Raises:
        InputError: layers, batch, loss and optimizer do not fit together.
    """
    model = Model(stack, batch, loss, optimizer, tuple(sizes))
    device = device or jax.local_devices()[0]
    meter = Meter(progress, parts_of_bytes(model) + 2 * len(model.sizes))
    costs: dict[tuple[str, int], Costs] = {}
    dispatch = []
    known: _Known = {}
    for rows in model.sizes:
        lone = _Bench(model, [(layer_id,) for layer_id in model.distinct], rows, device, known)
        meter.step()
        roughly, _ = lone.time(FEWEST, 0.0)
        groups = short_groups(model.stack.ids, model.like, roughly)
        bench = lone if all(len(ids) == 1 for ids in groups) else _Bench(model, groups, rows, device, known)
        found, empty = bench.time(repetitions, seconds / len(model.sizes))
        dispatch.append(empty)
        shares = [share for ids, taken in found.items() for share in split(taken, {i: lone.flops[model.like[i],] for i in ids}).items()]
        for layer_id in model.distinct:
            own = [seconds for other, seconds in shares if model.like[other] == layer_id]
            forward, backward, update = (statistics.fmean(seconds[name] for seconds in own) for name in PROGRAMS)
            costs[layer_id, rows] = Costs(forward, backward, update, lone.temporary[layer_id,], lone.flops[layer_id,]["forward"])
        meter.step()
    name = device.device_kind
    return profile_of(model, costs, policies, meter, source="measured", device=name, dispatch=statistics.median(dispatch))


def short_groups(ids: Sequence[str], like: Mapping[str, str], roughly: Mapping[tuple[str, ...], ByProgram]) -> list[tuple[str, ...]]:
    """What is to be timed together: neighbours of which each is short, enough of them to be long; the other layers alone.

    Args:
        ids: the model's layers.
        like: for each layer the first that equals it.
        roughly: seconds of each distinct layer alone.

    Returns:
        Groups of layer ids; each distinct layer, or one that equals it, is in one of them at least. Equal groups are there once.
    """

    def seconds(layer_id: str) -> float:
        alone = roughly[like[layer_id],]
        return alone["forward"] + alone["backward"]

    groups: list[list[str]] = []
    for layer_id in ids:
        joins = groups and all(seconds(other) < 2 * SHORT for other in (layer_id, groups[-1][-1]))
        if joins and sum(map(seconds, groups[-1])) < 4 * SHORT:
            groups[-1].append(layer_id)
        else:
            groups.append([layer_id])
    kinds: dict[tuple[str, ...], tuple[str, ...]] = {}
    for group in groups:
        kinds.setdefault(tuple(like[layer_id] for layer_id in group), tuple(group))
    together = {layer_id for kind in kinds if len(kind) > 1 for layer_id in kind}
    return [group for kind, group in kinds.items() if len(kind) > 1 or kind[0] not in together]


def split(taken: ByProgram, flops: Mapping[str, ByProgram]) -> dict[str, ByProgram]:
    """The time of a group for each of its layers, in proportion to FLOPs; evenly where a program has none."""
    found: dict[str, dict[str, float]] = {layer_id: {} for layer_id in flops}
    for name, seconds in taken.items():
        total = sum(own[name] for own in flops.values())
        for layer_id, own in flops.items():
            found[layer_id][name] = seconds * (own[name] / total if total else 1 / len(flops))
    return dict(found)


class _Bench:
    """Stages at one microbatch size, compiled and with arrays to run on, and one that does nothing.

    Attributes:
        temporary: scratch bytes of each stage.
        flops: FLOPs of each stage's programs.

    Args:
        model: what is profiled.
        groups: the layers of each stage.
        rows: the microbatch size.
        device: where it runs.
        known: programs that are compiled already; new ones are added.
    """

    def __init__(self, model: Model, groups: Sequence[tuple[str, ...]], rows: int, device: jax.Device, known: _Known) -> None:
        stages = {ids: model.stage(ids, rows) for ids in groups} | {_EMPTY: _empty_stage()}
        # An update is the same at all sizes, and a stage without work too.
        keys = {(ids, name): (ids, name, None if name == "update" or ids == _EMPTY else rows) for ids in stages for name in PROGRAMS}
        traced = {
            keys[ids, name]: stage.trace(name, device) for ids, stage in stages.items() for name in PROGRAMS if keys[ids, name] not in known
        }
        lowered = {key: program.lower() for key, program in traced.items()}
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # XLA compiles outside Python's lock
            compiled = pool.map(lambda program: program.compile(), lowered.values())
            known.update({key: (program, count_flops(traced[key], lowered[key])) for key, program in zip(lowered, compiled, strict=True)})
        batch = _filled(model.batch(rows), device)
        self._runs: dict[tuple[str, ...], _Run] = {}
        self.temporary: dict[tuple[str, ...], int] = {}
        self.flops: dict[tuple[str, ...], ByProgram] = {}
        for ids, stage in stages.items():
            calls: dict[str, jax.stages.Compiled] = {name: known[keys[ids, name]][0] for name in PROGRAMS}
            self._runs[ids] = _Run(stage, batch, calls, device)
            self.temporary[ids] = max(map(scratch_bytes, calls.values()))
            self.flops[ids] = {name: known[keys[ids, name]][1] for name in PROGRAMS}

    def time(self, repetitions: int, seconds: float) -> tuple[dict[tuple[str, ...], ByProgram], float]:
        """Median times of each stage's programs, and of a program of a stage without work, which they are short of.

        Args:
            repetitions: at most; 3 at least.
            seconds: after which no further one begins.
        """
        taken: dict[Any, list[float]] = {(ids, name): [] for ids in self._runs for name in PROGRAMS}
        end = time.perf_counter() + seconds
        for n in range(max(repetitions, FEWEST) + 1):
            if n > FEWEST and time.perf_counter() > end:
                break
            for name in PROGRAMS:
                for ids, run in self._runs.items():
                    one = run.seconds(name)
                    if n > 0:  # the first one warms up
                        taken[ids, name].append(one)
        dispatch = statistics.median(taken[_EMPTY, "forward"] + taken[_EMPTY, "backward"])
        medians = {key: max(statistics.median(times) - dispatch, 0.0) for key, times in taken.items()}
        return {ids: {name: medians[ids, name] for name in PROGRAMS} for ids in self._runs if ids != _EMPTY}, dispatch


class _Run:
    """One stage with arrays: inputs and labels where they are known, noise for all else; no time depends on what the numbers are."""

    def __init__(
        self, stage: jpipe.LoneStage, batch: tuple[Tree, Tree], calls: Mapping[str, jax.stages.Compiled], device: jax.Device
    ) -> None:
        ids, stack = stage.stage.layers, stage.stack
        specs = {name: calls[name].args_info[0] for name in PROGRAMS}
        params, state, x, labels, draw = (_filled(spec, device) for spec in specs["forward"])
        if ids[0] == stack.ids[0]:
            x = batch[0]
        if ids[-1] == stack.ids[-1]:
            labels = batch[1]
        self._stage, self._calls, self._params, self._draw = stage, calls, params, draw
        self._arguments = state, x, labels
        self._message, self._sums = (_filled(spec, device) for spec in specs["backward"][3:5])
        self._optimizer, _, self._norm = (_filled(spec, device) for spec in specs["update"][1:])
        self._left: Any = None  # what the last forward left for its backward
        jax.block_until_ready((params, self._arguments, self._message, self._sums, self._optimizer))

    def seconds(self, name: str) -> float:
        """Run one of the programs; the backward is that of the last forward."""
        call = self._calls[name]
        begin = time.perf_counter()
        match name:
            case "forward":
                (y, new_state, saved), done = call(self._params, *self._arguments, self._draw)
                jax.block_until_ready((y, new_state, saved, done))
                end = time.perf_counter()
                self._left = self._stage.keep(self._arguments, (y, new_state)), saved
            case "backward":
                result, done = call(self._params, *self._left, self._message, self._sums, self._draw)
                jax.block_until_ready((result, done))
                end = time.perf_counter()
                self._sums = result[1]
            case "update":
                result, done = call(self._params, self._optimizer, self._sums, self._norm)
                jax.block_until_ready((result, done))
                end = time.perf_counter()
                self._params, self._optimizer, self._sums, _ = result
        return end - begin


def _filled(specs: Tree, device: jax.Device) -> Tree:
    """Arrays of these shapes and dtypes: small noise, or zeros where they are whole numbers; arrays stay as they are."""

    def fill(spec: Any) -> jax.Array:
        if not hasattr(spec, "dtype") or hasattr(spec, "__array__"):
            return jax.device_put(jnp.asarray(spec), device)
        if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(0), device)
        noise = NOISE if jnp.issubdtype(spec.dtype, jnp.inexact) else np.zeros(1)
        return jax.device_put(np.resize(noise, spec.shape).astype(spec.dtype), device)

    return jax.tree.map(fill, specs)


def _empty_stage() -> jpipe.LoneStage:
    """A stage in the middle of a pipeline that does next to nothing."""
    stack = jpipe.LayerStack(dict.fromkeys(("before", "here", "after"), jnp.negative))
    specs = stack.specs(jax.ShapeDtypeStruct((1,), np.float32))
    optimizer = jpipe.LayerwiseOptimizer(optax.identity(), {})
    return jpipe.LoneStage(stack, jpipe.Stage(layers=("here",)), specs, None, lambda y, labels: (y.sum(), y.sum()), optimizer)
