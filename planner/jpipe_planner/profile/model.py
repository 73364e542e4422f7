"""The model to be profiled at several microbatch sizes: which of its layers are equal, and their bytes, from shapes alone."""

import dataclasses
import functools
import itertools
import math
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax

import jpipe
from jpipe import InputError
from jpipe_planner.machine.compiling import bytes_beyond_memory
from jpipe_planner.profile.flops import count_flops
from jpipe_planner.profile.profile import AtSize, LayerProfile, Profile, SharedProfile, TensorProfile
from jpipe_planner.profile.tensor import tensor_profile

Tree = Any
Batch = Callable[[int], tuple[Tree, Tree]]
"""`rows -> (inputs, labels)`, a microbatch of that many rows; arrays, or `jax.ShapeDtypeStruct`s."""
Progress = Callable[[int, int], None]
"""Called with the number of finished parts of the work, and their total number."""

StageCosts = dict[tuple[str, ...], dict[tuple[int, str], jpipe.programs.StageCost]]
"""The costs of distinct layers, and of distinct pairs of neighbours, as stages, by rows and recomputation policy."""

POLICIES = ("none", "elementwise", "full", "dots_with_no_batch_dims_saveable")


class Costs(NamedTuple):
    """The costs of a layer at one size that do not follow from its shapes: seconds, scratch bytes, FLOPs of a forward."""

    forward: float
    backward: float
    update: float
    temporary: int
    flops: float


@dataclass(frozen=True)
class Model:
    """A model to be profiled, whose equal layers are profiled once.

    Layers are equal if their traces, shapes, logical axes and optimizer states are equal. The names of their parameters may differ, and so
    may the constants with which they make random keys, because neither changes what a layer costs. The first layer, which has no input
    gradient, and the last one, which includes the loss, are never equal to others.

    Attributes:
        stack: its layers.
        batch: shapes of a microbatch, by its number of rows.
        loss: `(outputs, labels) -> (sum, weight)`.
        optimizer: any that a `jpipe.Pipeline` takes.
        sizes: the microbatch sizes, in rows.
        precision: as in `jpipe.Pipeline`.
        ema_decay: as in `jpipe.Pipeline`.
        delay_correction: as in `jpipe.Pipeline`.

    Raises:
        InputError: there are no sizes, or not all are integers above 0. Later calls raise it for parts that do not fit together.
    """

    stack: jpipe.LayerStack
    batch: Batch
    loss: Callable[[Any, Any], tuple[jax.Array, jax.Array]]
    optimizer: optax.GradientTransformation
    sizes: tuple[int, ...]
    precision: jpipe.Precision = field(default_factory=jpipe.Precision)
    ema_decay: float | None = None
    delay_correction: str | float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stack", jpipe.model.cast_layers(self.stack, self.precision))
        if not self.sizes or any(not isinstance(rows, int) or isinstance(rows, bool) or rows < 1 for rows in self.sizes):
            raise InputError(f"sizes: expected microbatch sizes, whole numbers of rows above 0, found {list(self.sizes)}")
        object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))

    @cached_property
    def first_equal(self) -> dict[str, str]:
        """The first layer that is equal to each layer, possibly itself."""
        key, layerwise = jax.eval_shape(lambda: jax.random.key(0)), self._layerwise
        first: dict[tuple[Any, ...], str] = {}
        equal = {}
        for layer_id in self.stack.ids:
            spec, layer = self._first_specs[layer_id], self.stack.layers[layer_id]
            end = layer_id if layer_id in (self.stack.ids[0], self.stack.ids[-1]) else None
            entries = self.stack.ties.split({layer_id: spec.params}, [layer_id])
            trained = layerwise.trained.part(entries)
            states = [jax.eval_shape(functools.partial(layerwise.init, entry), params) for entry, params in trained.items()]
            leaves = tuple(sorted(map(repr, jax.tree.leaves(states))))  # only leaves: it is keyed by layer id
            flags = layerwise.trained.flags(entries)
            gradients = (*flags, *self.stage([layer_id], self.sizes[0], specs=self._first_specs).gradients)
            shares = tuple(self.stack.ties.shared.get(layer_id, {}))
            text = _without_names(layer, spec, key, by_use=all(flags) and not shares)
            equal[layer_id] = first.setdefault((end, layer.stochastic, text, leaves, gradients, shares), layer_id)
        return equal

    @cached_property
    def distinct(self) -> tuple[str, ...]:
        """The layers that are not equal to an earlier one."""
        return tuple(dict.fromkeys(self.first_equal.values()))

    @cached_property
    def pairs(self) -> dict[tuple[str, str], tuple[str, str]]:
        """One pair of neighbours of each kind, by the layers to which they are equal."""
        pairs: dict[tuple[str, str], tuple[str, str]] = {}
        for pair in itertools.pairwise(self.stack.ids):
            pairs.setdefault((self.first_equal[pair[0]], self.first_equal[pair[1]]), pair)
        return pairs

    @cached_property
    def triples(self) -> dict[tuple[str, str], tuple[str, str, str]]:
        """For each kind of pair three neighbours that begin with it, if any do; three equal layers if there are such."""
        triples: dict[tuple[str, str], tuple[str, str, str]] = {}
        for three in zip(self.stack.ids, self.stack.ids[1:], self.stack.ids[2:], strict=False):
            first, second, third = (self.first_equal[layer_id] for layer_id in three)
            if (first, second) not in triples or (third == second and self.first_equal[triples[first, second][2]] != second):
                triples[first, second] = three
        return triples

    def stage(self, ids: Sequence[str], rows: int, recompute: str = "none", specs: Any = None) -> jpipe.stages.StandaloneStage:
        """Return consecutive layers as one stage; `specs` are those of all layers, where they are not known for all sizes yet.

        It is traced once: the next call returns the same.
        """
        if recompute not in jpipe.plan.RECOMPUTE:
            raise InputError(
                f"policies: unknown recomputation policy '{recompute}'; {jpipe.errors.nearest(recompute, jpipe.plan.RECOMPUTE)}"
            )
        key = tuple(ids), rows, recompute
        if key not in self._stages:
            stage = jpipe.Stage(layers=key[0], recompute=recompute)
            labels, specs = self.batches[rows][1], specs or self._specs[rows]
            self._stages[key] = jpipe.stages.StandaloneStage(self.stack, stage, specs, labels, self.loss, self._layerwise, self.precision)
        return self._stages[key]

    @cached_property
    def _stages(self) -> dict[tuple[tuple[str, ...], int, str], jpipe.stages.StandaloneStage]:
        return {}

    def gradient_bytes(self, layer_id: str) -> int:
        """Return the bytes of a layer's accumulated gradients."""
        entries = self.stack.ties.split({layer_id: self._first_specs[layer_id].params}, [layer_id])
        trained = dict(self._layerwise.trained.part(entries))
        return sum(leaf.size * self._gradient_dtype(leaf).itemsize for leaf in jax.tree.leaves(trained))

    def _ahead_bytes(self, entry: str, spec: Any) -> int:
        if self.delay_correction is None or self._layerwise.trained.excludes(entry):
            return 0
        optimizer = dataclasses.replace(self._layerwise, delay_factor=1.0)
        return _bytes(optimizer.ahead(jax.eval_shape(functools.partial(optimizer.init, entry), self._layerwise.trained.of(entry, spec))))

    def ahead_bytes(self, layer_id: str) -> int:
        """Return the bytes of the prediction for a layer: 0 without `delay_correction`."""
        entries = self.stack.ties.split({layer_id: self._first_specs[layer_id].params}, [layer_id])
        return sum(self._ahead_bytes(entry, spec) for entry, spec in entries.items())

    def _gradient_dtype(self, leaf: Any) -> Any:
        return self.precision.accumulator_dtype(self.precision.version_dtype(leaf.dtype))

    @cached_property
    def shared(self) -> tuple[SharedProfile, ...]:
        """The bytes of the parameters that two or more layers share."""
        entries = self.stack.ties.split({layer_id: spec.params for layer_id, spec in self._first_specs.items()})
        sharers = self.stack.ties.sharers(self.stack.ids)
        return tuple(self._shared_profile(name, entries[name], layers) for name, layers in sharers.items())

    def _shared_profile(self, name: str, spec: Any, layers: tuple[str, ...]) -> SharedProfile:
        weights = spec.size * self.precision.version_dtype(spec.dtype).itemsize
        if self._layerwise.trained.excludes(name):
            return SharedProfile(layers=layers, weights=weights, frozen=weights, accumulators=0)
        optimizer = _bytes(jax.eval_shape(functools.partial(self._layerwise.init, name), spec))
        return SharedProfile(
            layers=layers,
            weights=weights,
            accumulators=spec.size * self._gradient_dtype(spec).itemsize,
            optimizer=optimizer,
            ahead=self._ahead_bytes(name, spec),
        )

    @cached_property
    def batches(self) -> dict[int, tuple[Tree, Tree]]:
        """Shapes and dtypes of (inputs, labels), by size."""
        return {rows: jax.eval_shape(lambda batch: batch, self.batch(rows)) for rows in self.sizes}

    @cached_property
    def _first_specs(self) -> dict[str, jpipe.model.LayerSpec]:
        return self.stack.specs(self.batches[self.sizes[0]][0])

    @cached_property
    def _specs(self) -> dict[int, dict[str, jpipe.model.LayerSpec]]:
        """The specs of all layers at all sizes; each distinct layer is traced once per size."""
        specs = {self.sizes[0]: self._first_specs}
        for rows in self.sizes[1:]:
            x = self.batches[rows][0]
            layer_specs: dict[str, jpipe.model.LayerSpec] = {}
            for layer_id, first in self.first_equal.items():
                has_names = self._first_specs[first] == self._first_specs[layer_id]
                known = first in layer_specs and has_names and layer_specs[first].x == x
                layer_specs[layer_id] = layer_specs[first] if known else self.stack.specs(x, [layer_id])[layer_id]
                x = layer_specs[layer_id].output
            specs[rows] = layer_specs
        return specs

    @cached_property
    def _layerwise(self) -> jpipe.model.LayerwiseOptimizer:
        params = {layer_id: spec.params for layer_id, spec in self._first_specs.items()}
        optimizer = jpipe.model.find_layerwise(self.optimizer, params, self.precision.has_masters, self.stack.ties)
        return dataclasses.replace(optimizer, ema_decay=self.ema_decay)


class Meter:
    """A counter of finished parts of work for a `Progress`."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def step(self) -> None:
        """Count one more finished part."""
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)


def count_bytes(model: Model, policies: Sequence[str], meter: Meter) -> StageCosts:
    """Count the bytes of each distinct layer as a stage, and of each pair of neighbours as a stage, at all sizes.

    Args:
        model: the model.
        policies: recomputation policies for which residuals are counted; "none" is always included.
        meter: counts `parts_of_bytes` parts.
    """
    policies = tuple(dict.fromkeys(("none", *policies)))
    costs: StageCosts = {}
    for name, ids in [*(((layer_id,), (layer_id,)) for layer_id in model.distinct), *model.pairs.items()]:
        costs[name] = {(rows, policy): model.stage(ids, rows, policy).cost for rows in model.sizes for policy in policies}
        meter.step()
    return costs


class Scratch(NamedTuple):
    """Scratch bytes of compiled programs of several layers as a stage.

    Attributes:
        forwards: of the forwards of pairs of neighbours, without recomputation, by rows.
        backwards: of their backwards.
        remaking: of the backwards of layers, pairs and triples of neighbours with full recomputation, of the largest microbatch; empty:
            not known.
    """

    forwards: Mapping[tuple[str, ...], Mapping[int, int]]
    backwards: Mapping[tuple[str, ...], Mapping[int, int]]
    remaking: Mapping[tuple[str, ...], int]


def compile_scratch(model: Model, policies: Sequence[str], device: jax.Device) -> Scratch:
    """Compile the forward and the backward of each pair of neighbours: several layers need more scratch memory than each of them.

    Without recomputation only the smallest and the largest size are compiled; the sizes between are interpolated. With full recomputation,
    if that is among the policies, only the largest: what it adds is proportional to the residuals. There triples of neighbours are compiled
    too, because a compiler for TPUs needs much less for a third layer than for the second one.
    """
    ends, largest = list(dict.fromkeys((model.sizes[0], model.sizes[-1]))), model.sizes[-1]
    pairs: list[tuple[str, ...]] = [*model.pairs.values()]
    kinds: tuple[Literal["forward"], Literal["backward"]] = ("forward", "backward")
    remaking: list[tuple[str, ...]] = []
    if "full" in policies:
        triples = model.triples.values()
        remaking = list(dict.fromkeys([*((one,) for one in model.distinct), *pairs, *triples, *(triple[1:] for triple in triples)]))
    lowered = {(ids, rows, kind): model.stage(ids, rows).trace(kind, device).lower() for ids in pairs for rows in ends for kind in kinds}
    lowered_full = [model.stage(ids, largest, "full").trace("backward", device).lower() for ids in remaking]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # XLA releases Python's lock while it compiles
        full = pool.map(compile_scratch_bytes, lowered_full)
        scratch = dict(zip(lowered, pool.map(compile_scratch_bytes, lowered.values()), strict=True))
        of_remaking = dict(zip(remaking, full, strict=True))

    def by_rows(ids: tuple[str, ...], kind: Literal["forward", "backward"]) -> dict[int, int]:
        at_ends = [scratch[ids, end, kind] for end in ends]
        return {rows: math.ceil(np.interp(rows, ends, at_ends)) for rows in model.sizes}

    forwards, backwards = ({ids: by_rows(ids, kind) for ids in pairs} for kind in kinds)
    return Scratch(forwards, backwards, of_remaking)


def compile_scratch_bytes(program: jax.stages.Lowered) -> int:
    """Compile a program and return its scratch memory; of one that exceeds the memory of a TPU, the bytes that XLA says it needs."""
    try:
        return scratch_bytes(program.compile())
    except jax.errors.JaxRuntimeError as error:
        if (sizes := bytes_beyond_memory(error)) is None:
            raise
        return math.ceil(sizes[0])


def scratch_bytes(program: jax.stages.Compiled) -> int:
    """Return the scratch memory of a program; 0 if the backend does not report it."""
    analysis = program.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes


@dataclass(frozen=True)
class _ScratchParts:
    """The parts of scratch memory that a profile has of each layer.

    Attributes:
        model: the model.
        costs: the costs of each distinct layer at each size.
        stage_costs: the result of `count_bytes`.
        scratch: the result of `compile_scratch`.
    """

    model: Model
    costs: Mapping[tuple[str, int], Costs]
    stage_costs: StageCosts
    scratch: Scratch

    def more(self, equal: str, next_equal: str | None, rows: int) -> int:
        """Return what a layer and the next one need more than the larger of both."""
        if next_equal is None:
            return 0
        pair = self.model.pairs[equal, next_equal]
        both = max(self.scratch.forwards[pair][rows], self.scratch.backwards[pair][rows])
        return max(both - self._larger(equal, next_equal, rows), 0)

    def remaking(self, equal: str, rows: int) -> int | None:
        """Return what a backward needs that makes the residuals of a layer itself."""
        if not self.scratch.remaking:
            return None
        additional = self.scratch.remaking[equal,] - self.costs[equal, self.model.sizes[-1]].temporary
        return max(self.costs[equal, rows].temporary + math.ceil(additional * self._share_of_largest(equal, rows)), 0)

    def remaking_next(self, equal: str, next_equal: str | None, rows: int) -> int:
        """Return what such a backward needs more if a layer comes before the next one, and that is the last one."""
        if next_equal is None or not self.scratch.remaking:
            return 0
        together = self.scratch.remaking[self.model.pairs[equal, next_equal]] - self.scratch.remaking[next_equal,]
        return self._at_rows(together, equal, next_equal, rows)

    def remaking_more(self, equal: str, next_equal: str | None, rows: int) -> int:
        """Return what such a backward needs more if a layer comes before the next one and further ones."""
        triple = None if next_equal is None else self.model.triples.get((equal, next_equal))
        if next_equal is None or triple is None or not self.scratch.remaking:
            return self.remaking_next(equal, next_equal, rows)
        return self._at_rows(self.scratch.remaking[triple] - self.scratch.remaking[triple[1:]], equal, next_equal, rows)

    def _at_rows(self, most: int, equal: str, next_equal: str, rows: int) -> int:
        """Return for a number of rows what a layer adds, from what it adds at the largest: gradients do not depend on the rows."""
        of_gradients, largest = (self._more_backward(equal, next_equal, count) for count in (rows, self.model.sizes[-1]))
        return max(of_gradients + math.ceil((most - largest) * self._share_of_largest(equal, rows)), 0)

    def _more_backward(self, equal: str, next_equal: str, rows: int) -> int:
        return max(self.scratch.backwards[self.model.pairs[equal, next_equal]][rows] - self._larger(equal, next_equal, rows), 0)

    def _larger(self, equal: str, next_equal: str, rows: int) -> int:
        return max(self.costs[one, rows].temporary for one in (equal, next_equal))

    def _share_of_largest(self, equal: str, rows: int) -> float:
        """Return the residuals of a microbatch as a share of those of the largest one."""
        some, most = (self.stage_costs[equal,][count, "none"].residuals for count in (rows, self.model.sizes[-1]))
        return some / most if most else 1.0


def profile_of(model: Model, costs: Mapping[tuple[str, int], Costs], stage_costs: StageCosts, scratch: Scratch, **fields: Any) -> Profile:
    """Return the profile of a model.

    Args:
        model: the model.
        costs: the costs of each distinct layer at each size.
        stage_costs: the result of `count_bytes`.
        scratch: the result of `compile_scratch`.
        fields: the other fields of `Profile`.
    """

    def shared(equal: str, next_equal: str | None, rows: int, policy: str) -> int:
        if next_equal is None:
            return 0
        alone = stage_costs[equal,][rows, policy].residuals + stage_costs[next_equal,][rows, policy].residuals
        return max(alone - stage_costs[equal, next_equal][rows, policy].residuals, 0)

    parts = _ScratchParts(model, costs, stage_costs, scratch)
    for_weights = {equal: _share_for_weights(model, equal) for equal in model.distinct}
    policies = {equal: [policy for rows, policy in stage_costs[equal,] if rows == model.sizes[0]] for equal in model.distinct}
    stashes = {
        equal: {(rows, policy): model.stage([equal], rows, policy).stash_bytes for rows in model.sizes for policy in policies[equal]}
        for equal in model.distinct
    }
    tensor = {equal: _tensor_profile(model, equal, policies[equal]) for equal in model.distinct}
    layers = []
    for layer_id, next_id in itertools.zip_longest(model.stack.ids, model.stack.ids[1:]):
        equal, next_equal = model.first_equal[layer_id], model.first_equal.get(next_id)
        layer_costs = stage_costs[equal,]
        at = tuple(
            AtSize(
                forward=costs[equal, rows].forward,
                backward=costs[equal, rows].backward,
                backward_weight=costs[equal, rows].backward * for_weights[equal],
                stash={policy: bytes_ for (count, policy), bytes_ in stashes[equal].items() if count == rows},
                outputs=layer_costs[rows, "none"].outputs if next_id else 0,
                residuals={policy: cost.residuals for (count, policy), cost in layer_costs.items() if count == rows},
                shared={policy: shared(equal, next_equal, rows, policy) for count, policy in layer_costs if count == rows},
                temporary=costs[equal, rows].temporary,
                temporary_more=parts.more(equal, next_equal, rows),
                remaking=parts.remaking(equal, rows),
                remaking_next=parts.remaking_next(equal, next_equal, rows),
                remaking_more=parts.remaking_more(equal, next_equal, rows),
                flops=costs[equal, rows].flops,
            )
            for rows in model.sizes
        )
        update = statistics.fmean(costs[equal, rows].update for rows in model.sizes)
        cost = layer_costs[model.sizes[0], "none"]
        sizes = {name: getattr(cost, name) for name in ("weights", "frozen", "optimizer", "state")}
        sizes |= {"accumulators": model.gradient_bytes(layer_id), "ahead": model.ahead_bytes(layer_id)}
        layers.append(LayerProfile(id=layer_id, update=update, at=at, tensor=tensor[equal], **sizes))
    inputs, labels = (tuple(_bytes(model.batches[rows][part]) for rows in model.sizes) for part in (0, 1))
    return Profile(sizes=model.sizes, inputs=inputs, labels=labels, layers=tuple(layers), shared=model.shared, **fields)


def _tensor_profile(model: Model, layer_id: str, policies: Sequence[str]) -> TensorProfile:
    """Return what tensor parallelism shards of a layer."""
    rows = model.sizes[0]
    return tensor_profile(lambda policy: model.stage([layer_id], rows, policy), layer_id, rows, policies, jax.local_devices()[0])


def _share_for_weights(model: Model, layer_id: str) -> float:
    """Return the share of a layer's backward that computes the gradients of its weights, by floating-point operations."""
    stage, device = model.stage([layer_id], model.sizes[0]), jax.local_devices()[0]
    traced = [stage.trace(half, device) for half in ("backward_input", "backward_weight")]
    for_inputs, for_weights = (count_flops(half, half.lower()) for half in traced)
    return for_weights / (for_inputs + for_weights) if for_inputs + for_weights else 0.5


def parts_of_bytes(model: Model) -> int:
    """Return the number of parts of `count_bytes`, for a `Meter`."""
    return len(model.distinct) + len(model.pairs)


_INCIDENTAL = re.compile(r"(random_fold_in \S+) \d+:|0x[0-9a-f]+")  # in a trace: the number of a random key, the address of a function


def _without_names(layer: jpipe.Layer, spec: jpipe.model.LayerSpec, key: Any, *, by_use: bool) -> str:
    """Return a layer's trace, shapes, dtypes and logical axes, without the names of its parameters.

    Args:
        layer: the layer.
        spec: its specs.
        key: the spec of a random key.
        by_use: whether its arrays are in the order in which it reads them, which does not depend on their names either.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path((spec.params, spec.state))
    axes = [spec.axes.get(jax.tree_util.keystr(path[1:], simple=True, separator="/")) for path, _ in named]
    num_params = len(jax.tree.leaves(spec.params))

    def traced(order: Sequence[int]) -> Any:
        def apply(arrays: Sequence[Any], x: Tree, key: Any) -> Any:
            values = dict(zip(order, arrays, strict=True))
            params, state = jax.tree.unflatten(treedef, [values[i] for i in range(len(named))])
            y, state = layer.apply(params, state, x, key, True)
            leaves = jax.tree.leaves(state)
            return y, [leaves[i - num_params] for i in order if i >= num_params]

        return jax.make_jaxpr(apply)([named[i][1] for i in order], spec.x, key)

    order = list(range(len(named)))
    closed = traced(order)
    if by_use:
        numbers = {id(var): number for number, var in enumerate(closed.jaxpr.invars[: len(named)])}
        read = [numbers[id(var)] for equation in closed.jaxpr.eqns for var in equation.invars if id(var) in numbers]
        by_first_use = list(dict.fromkeys([*read, *order]))
        order, closed = by_first_use, closed if by_first_use == order else traced(by_first_use)
    arrays = [(named[i][1], axes[i] if i < num_params else None) for i in order]
    return _INCIDENTAL.sub(r"\1", repr((spec.x, arrays, spec.output, num_params)) + str(closed))


def _bytes(specs: Tree) -> int:
    return sum(spec.size * spec.dtype.itemsize for spec in jax.tree.leaves(specs))
