"""The model to be profiled at several microbatch sizes: which layers are equal, and their bytes, computed from shapes alone."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import jpipe
from jpipe import InputError
from jpipe_planner.profile.profile import SharedProfile
from jpipe_planner.profile.sizes import count_by_policy

__all__ = ["Batch", "Model"]

Tree = Any
Batch = Callable[[int], tuple[Tree, Tree]]
"""`rows -> (inputs, labels)`: a microbatch of `rows` rows, as arrays or `jax.ShapeDtypeStruct`s."""
Progress = Callable[[int, int], None]
"""Called with the number of finished parts of the work, and their total number."""

StageCosts = dict[tuple[str, ...], dict[tuple[int, str], jpipe.programs.StageCost]]
"""The costs of each distinct layer, and of each distinct pair of neighbours, as a stage; by rows and recomputation policy."""

POLICIES = ("none", "elementwise", "full", "dots_with_no_batch_dims_saveable")


class Costs(NamedTuple):
    """The costs of a layer at one size that do not follow from shapes: the seconds, and the FLOPs of a forward."""

    forward: float
    backward: float
    update: float
    flops: float
    forward_backward: float | None = None
    again: float | None = None


@dataclass(frozen=True)
class Model:
    """A model to be profiled; equal layers are profiled once.

    Layers are equal if their traces, shapes, logical axes and optimizer states are equal. Names of parameters, and constants for random
    keys, may differ, because they do not change the costs of a layer. The first layer, which has no input gradient, and the last layer,
    which includes the loss, never equal other layers.

    Attributes:
        stack: the layers of the model.
        batch: shapes of a microbatch, by its number of rows.
        loss: `(outputs, labels) -> (sum, weight)`.
        optimizer: any optimizer that `jpipe.Pipeline` accepts.
        sizes: the microbatch sizes, in rows.
        precision, ema_decay, delay_correction: as in `jpipe.Pipeline`.
        in_slices: whether the plans cut rows into slices. If not, plans in slices are considered where it is possible.

    Raises:
        InputError: there are no sizes, or not all sizes are integers above 0. Methods raise it if the parts do not fit together.
    """

    stack: jpipe.LayerStack
    batch: Batch
    loss: Callable[[Any, Any], tuple[jax.Array, jax.Array]]
    optimizer: optax.GradientTransformation
    sizes: tuple[int, ...]
    precision: jpipe.Precision = field(default_factory=jpipe.Precision)
    ema_decay: float | None = None
    delay_correction: str | float | None = None
    in_slices: bool = False
    _stages: dict[Any, jpipe.stages.StandaloneStage] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known_specs: dict[int, dict[str, jpipe.model.LayerSpec]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stack", jpipe.model.cast_layers(self.stack, self.precision))
        if not self.sizes or any(not isinstance(rows, int | np.integer) or isinstance(rows, bool) or rows < 1 for rows in self.sizes):
            raise InputError(where="sizes", expected="microbatch sizes, whole numbers of rows above 0", found=list(self.sizes))
        object.__setattr__(self, "sizes", tuple(sorted(set(map(int, self.sizes)))))

    @cached_property
    def first_equal(self) -> dict[str, str]:
        """For each layer the first layer that equals it, possibly the layer itself."""
        key, layerwise = jax.eval_shape(lambda: jax.random.key(0)), self._layerwise
        first: dict[tuple[Any, ...], str] = {}
        equal, texts = {}, dict[tuple[Any, bool], str]()
        for layer_id in self.stack.ids:
            spec, layer = self._first_specs[layer_id], self.stack.layers[layer_id]
            end = layer_id if layer_id in (self.stack.ids[0], self.stack.ids[-1]) else None
            entries = self.stack.ties.split({layer_id: spec.params}, [layer_id])
            trained = layerwise.trained.part(entries)
            states = [jax.eval_shape(functools.partial(layerwise.init, entry), params) for entry, params in trained.items()]
            leaves = tuple(sorted(map(repr, jax.tree.leaves(states))))  # only leaves, because the keys are layer ids
            flags = layerwise.trained.flags(entries)
            gradients = (*flags, *self.stage([layer_id], self.sizes[0], specs=self._first_specs).gradients)
            shares = tuple(self.stack.ties.shared.get(layer_id, {}))
            trace = self.stack.like(layer_id, spec.x), all(flags) and not shares  # layers given as one object are traced once
            if (text := texts.get(trace)) is None:
                text = texts[trace] = _without_names(layer, spec, key, by_use=trace[1])
            equal[layer_id] = first.setdefault((end, layer.stochastic, text, leaves, gradients, shares), layer_id)
        return equal

    @cached_property
    def distinct(self) -> tuple[str, ...]:
        """The layers that do not equal an earlier layer."""
        return tuple(dict.fromkeys(self.first_equal.values()))

    @cached_property
    def pairs(self) -> dict[tuple[str, str], tuple[str, str]]:
        """One pair of neighbours of each kind. The keys are the first layers that equal the two layers."""
        pairs: dict[tuple[str, str], tuple[str, str]] = {}
        for pair in itertools.pairwise(self.stack.ids):
            pairs.setdefault((self.first_equal[pair[0]], self.first_equal[pair[1]]), pair)
        return pairs

    @cached_property
    def triples(self) -> dict[tuple[str, str], tuple[str, str, str]]:
        """For each kind of pair, three neighbours that begin with such a pair, if there are any; if possible three equal layers."""
        triples: dict[tuple[str, str], tuple[str, str, str]] = {}
        for three in zip(self.stack.ids, self.stack.ids[1:], self.stack.ids[2:], strict=False):
            first, second, third = (self.first_equal[layer_id] for layer_id in three)
            if (first, second) not in triples or (third == second and self.first_equal[triples[first, second][2]] != second):
                triples[first, second] = three
        return triples

    def stage(self, ids: Sequence[str], rows: int, recompute: str = "none", specs: Any = None) -> jpipe.stages.StandaloneStage:
        """Return consecutive layers as one stage, traced only once; pass all `specs` until those for all sizes are known."""
        if recompute not in jpipe.plan.RECOMPUTE:
            raise InputError(
                f"policies: unknown recomputation policy '{recompute}'; {jpipe.errors.nearest(recompute, jpipe.plan.RECOMPUTE)}"
            )
        key = tuple(ids), rows, recompute
        if key not in self._stages:
            stage = jpipe.Stage(layers=key[0], recompute=recompute)
            labels, specs = self.batches[rows][1], specs or self._specs(rows)
            self._stages[key] = jpipe.stages.StandaloneStage(self.stack, stage, specs, labels, self.loss, self._layerwise, self.precision)
        return self._stages[key]

    def gradient_bytes(self, layer_id: str) -> int:
        """Return the bytes of a layer's accumulated gradients."""
        entries = self.stack.ties.split({layer_id: self._first_specs[layer_id].params}, [layer_id])
        trained = dict(self._layerwise.trained.part(entries))
        return sum(leaf.size * self._gradient_dtype(leaf).itemsize for leaf in jax.tree.leaves(trained))

    def _ahead_bytes(self, entry: str, spec: Any) -> int:
        if self.delay_correction is None or self._layerwise.trained.excludes(entry):
            return 0
        optimizer = dataclasses.replace(self._layerwise, delay_factor=1.0)
        return tree_bytes(
            optimizer.ahead(jax.eval_shape(functools.partial(optimizer.init, entry), self._layerwise.trained.of(entry, spec)))
        )

    def ahead_bytes(self, layer_id: str) -> int:
        """Return the bytes of a layer's predicted weights; 0 without `delay_correction`."""
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
        optimizer = tree_bytes(jax.eval_shape(functools.partial(self._layerwise.init, name), spec))
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

    def _specs(self, rows: int) -> dict[str, jpipe.model.LayerSpec]:
        """Return the specs of all layers at one size. Each distinct layer is traced once."""
        if rows == self.sizes[0]:
            return self._first_specs
        if rows not in self._known_specs:
            x = self.batches[rows][0]
            layer_specs: dict[str, jpipe.model.LayerSpec] = {}
            for layer_id, first in self.first_equal.items():
                has_names = self._first_specs[first] == self._first_specs[layer_id]
                known = first in layer_specs and has_names and layer_specs[first].x == x
                layer_specs[layer_id] = layer_specs[first] if known else self.stack.specs(x, [layer_id])[layer_id]
                x = layer_specs[layer_id].output
            self._known_specs[rows] = layer_specs
        return self._known_specs[rows]

    @cached_property
    def _layerwise(self) -> jpipe.model.LayerwiseOptimizer:
        params = {layer_id: spec.params for layer_id, spec in self._first_specs.items()}
        optimizer = jpipe.model.find_layerwise(self.optimizer, params, self.precision.has_masters, self.stack.ties, tree=self.stack.tree)
        return dataclasses.replace(optimizer, ema_decay=self.ema_decay)


class Meter:
    """A counter of finished parts of work for a `Progress`. The total may grow while the work goes on."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._futures = list[Future[Any]]()

    def expect(self, parts: int) -> None:
        """Add parts to the total."""
        self._total += parts

    def begin(self, future: Future[Any]) -> None:
        """Add a part to the total that another thread does; `wait` waits for it."""
        self._futures.append(future)
        self.expect(1)

    def wait(self) -> None:
        """Wait for all parts that began in other threads, and count them."""
        futures, self._futures = self._futures, []
        for future in as_completed(futures):
            future.result()
            self.step()

    def step(self) -> None:
        """Count one more finished part."""
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)


def count_bytes(model: Model, policies: Sequence[str], meter: Meter) -> StageCosts:
    """Count the bytes of each distinct layer and pair as a stage, at all sizes; `meter` gets `parts_of_bytes(model)` parts."""
    policies = tuple(dict.fromkeys(("none", *policies)))
    costs, linear = StageCosts(), set[str]()
    for name, ids in [*(((layer_id,), (layer_id,)) for layer_id in model.distinct), *model.pairs.items()]:

        def count(rows: int, policy: str, ids: tuple[str, ...] = ids) -> dict[str, Any]:
            return dataclasses.asdict(model.stage(ids, rows, policy).cost)

        counted, is_linear = count_by_policy(model.sizes, policies, count, is_linear=linear.issuperset(name))
        linear.update(name if is_linear and len(name) == 1 else ())  # a pair may grow linearly even if its layers do not
        costs[name] = {key: jpipe.programs.StageCost(**cost) for key, cost in counted.items()}
        meter.step()
    return costs


def parts_of_bytes(model: Model) -> int:
    """Return the number of parts of `count_bytes`, for a `Meter`."""
    return len(model.distinct) + len(model.pairs)


_INCIDENTAL = re.compile(r"(random_fold_in \S+) \d+:|0x[0-9a-f]+")  # in a trace: the number of a random key, the address of a function


def _without_names(layer: jpipe.Layer, spec: jpipe.model.LayerSpec, key: Any, *, by_use: bool) -> str:
    """Return a layer's trace, shapes, dtypes and logical axes, without parameters' names, in the order of use in the layer (`by_use`)."""
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


def tree_bytes(specs: Tree) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(spec.size * spec.dtype.itemsize for spec in jax.tree.leaves(specs))
