"""What is to be profiled: a model at several microbatch sizes, which of its layers are equal, and what they hold, from shapes alone."""

import functools
import itertools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import optax

import jpipe
from jpipe import InputError
from planner.profile.profile import AtSize, LayerProfile, Profile

Tree = Any
Batch = Callable[[int], tuple[Tree, Tree]]
"""`rows -> (inputs, labels)` of a microbatch of so many rows; arrays, or `jax.ShapeDtypeStruct`s."""
Progress = Callable[[int, int], None]
"""Called with how many parts of the work are done, and how many there are."""

Held = dict[tuple[str, ...], dict[tuple[int, str], jpipe.programs.StageCost]]
"""By what they equal one layer, or two neighbours, as a stage; by rows and recomputation policy."""

POLICIES = ("none", "full", "dots_with_no_batch_dims_saveable")


class Costs(NamedTuple):
    """What a layer at one size costs besides what follows from its shapes: seconds, scratch bytes, FLOPs of a forward."""

    forward: float
    backward: float
    update: float
    temporary: int
    flops: float


@dataclass(frozen=True)
class Model:
    """A model as profiles see it. Layers are equal where their traces, shapes and optimizer states are; but the first has no input
    gradient and the last has the loss, so that these two equal none.

    Attributes:
        stack: its layers.
        batch: what a microbatch of so many rows looks like.
        loss: `(outputs, labels) -> (sum, weight)`.
        optimizer: any that a `jpipe.Pipeline` takes.
        sizes: the microbatch sizes, in rows.

    Raises:
        InputError: no sizes, or such that are not whole numbers above 0; later whatever does not fit together.
    """

    stack: jpipe.LayerStack
    batch: Batch
    loss: Callable[[Any, Any], tuple[jax.Array, jax.Array]]
    optimizer: optax.GradientTransformation
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or any(not isinstance(rows, int) or rows < 1 for rows in self.sizes):
            raise InputError(f"sizes: expected microbatch sizes, whole numbers of rows above 0, found {list(self.sizes)}")
        object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))

    @cached_property
    def like(self) -> dict[str, str]:
        """For each layer the first one that equals it, which may be itself."""
        key, layerwise = jax.eval_shape(lambda: jax.random.key(0)), self._layerwise
        first: dict[tuple[Any, ...], str] = {}
        found = {}
        for layer_id in self.stack.ids:
            spec, layer = self._first_specs[layer_id], self.stack.layers[layer_id]
            traced = jax.make_jaxpr(lambda p, s, x, k, apply=layer.apply: apply(p, s, x, k, True))(spec.params, spec.state, spec.x, key)
            text = re.sub("0x[0-9a-f]+", "", str(traced))  # where in memory its functions are
            end = layer_id if layer_id in (self.stack.ids[0], self.stack.ids[-1]) else None
            state = jax.eval_shape(functools.partial(layerwise.init, layer_id), spec.params)  # its leaves, for it is keyed by layer id
            found[layer_id] = first.setdefault((end, layer.stochastic, repr(spec), repr(jax.tree.leaves(state)), text), layer_id)
        return found

    @cached_property
    def distinct(self) -> tuple[str, ...]:
        """The layers that equal none before them."""
        return tuple(dict.fromkeys(self.like.values()))

    @cached_property
    def pairs(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Two neighbours of each kind, by what they equal."""
        found: dict[tuple[str, str], tuple[str, str]] = {}
        for pair in itertools.pairwise(self.stack.ids):
            found.setdefault((self.like[pair[0]], self.like[pair[1]]), pair)
        return found

    def stage(self, ids: Sequence[str], rows: int, recompute: str = "none") -> jpipe.stages.StandaloneStage:
        """Consecutive layers as one stage."""
        if recompute not in jpipe.plan.RECOMPUTE:
            raise InputError(
                f"policies: unknown recomputation policy '{recompute}'; {jpipe.errors.nearest(recompute, jpipe.plan.RECOMPUTE)}"
            )
        stage = jpipe.Stage(layers=tuple(ids), recompute=recompute)
        return jpipe.stages.StandaloneStage(self.stack, stage, self._specs[rows], self.batches[rows][1], self.loss, self._layerwise)

    @cached_property
    def batches(self) -> dict[int, tuple[Tree, Tree]]:
        """Shapes and dtypes of (inputs, labels), by size."""
        return {rows: jax.eval_shape(lambda batch: batch, self.batch(rows)) for rows in self.sizes}

    @cached_property
    def _first_specs(self) -> dict[str, jpipe.model.LayerSpec]:
        return self.stack.specs(self.batches[self.sizes[0]][0])

    @cached_property
    def _specs(self) -> dict[int, dict[str, jpipe.model.LayerSpec]]:
        """Of all layers at all sizes, each distinct one traced once a size."""
        specs = {self.sizes[0]: self._first_specs}
        for rows in self.sizes[1:]:
            x = self.batches[rows][0]
            found: dict[str, jpipe.model.LayerSpec] = {}
            for layer_id, like in self.like.items():
                known = like in found and found[like].x == x
                found[layer_id] = found[like] if known else self.stack.specs(x, [layer_id])[layer_id]
                x = found[layer_id].output
            specs[rows] = found
        return specs

    @cached_property
    def _layerwise(self) -> jpipe.model.LayerwiseOptimizer:
        return jpipe.model.find_layerwise(self.optimizer, {layer_id: spec.params for layer_id, spec in self._first_specs.items()})


class Meter:
    """Counts parts of work for a `Progress`."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def step(self) -> None:
        """One more is done."""
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)


def count_bytes(model: Model, policies: Sequence[str], meter: Meter) -> Held:
    """What each distinct layer holds as a stage of its own, and each pair of neighbours as one, at all sizes.

    Args:
        model: what is profiled.
        policies: for which the residuals are counted; "none" in any case.
        meter: counts `parts_of_bytes` parts.
    """
    policies = tuple(dict.fromkeys(("none", *policies)))
    held: Held = {}
    for name, ids in [*(((layer_id,), (layer_id,)) for layer_id in model.distinct), *model.pairs.items()]:
        held[name] = {(rows, policy): model.stage(ids, rows, policy).cost for rows in model.sizes for policy in policies}
        meter.step()
    return held


def profile_of(model: Model, costs: Mapping[tuple[str, int], Costs], held: Held, **fields: Any) -> Profile:
    """The profile.

    Args:
        model: what is profiled.
        costs: of each distinct layer at each size.
        held: what `count_bytes` found.
        fields: of `Profile`, what is not known here.
    """

    def shared(like: str, after: str | None, rows: int, policy: str) -> int:
        if after is None:
            return 0
        alone = held[like,][rows, policy].residuals + held[after,][rows, policy].residuals
        return max(alone - held[like, after][rows, policy].residuals, 0)

    layers = []
    for layer_id, behind in itertools.zip_longest(model.stack.ids, model.stack.ids[1:]):
        like, after = model.like[layer_id], model.like.get(behind)
        own = held[like,]
        at = tuple(
            AtSize(
                forward=costs[like, rows].forward,
                backward=costs[like, rows].backward,
                outputs=own[rows, "none"].outputs if behind else 0,
                residuals={policy: cost.residuals for (count, policy), cost in own.items() if count == rows},
                shared={policy: shared(like, after, rows, policy) for count, policy in own if count == rows},
                temporary=costs[like, rows].temporary,
                flops=costs[like, rows].flops,
            )
            for rows in model.sizes
        )
        update = statistics.fmean(costs[like, rows].update for rows in model.sizes)
        cost = own[model.sizes[0], "none"]
        sizes = {"weights": cost.weights, "optimizer": cost.optimizer, "state": cost.state}
        layers.append(LayerProfile(id=layer_id, update=update, at=at, **sizes))
    inputs, labels = (tuple(_bytes(model.batches[rows][part]) for rows in model.sizes) for part in (0, 1))
    return Profile(sizes=model.sizes, inputs=inputs, labels=labels, layers=tuple(layers), **fields)


def parts_of_bytes(model: Model) -> int:
    """How many parts the counting of bytes has, for a `Meter`."""
    return len(model.distinct) + len(model.pairs)


def _bytes(specs: Tree) -> int:
    return sum(spec.size * spec.dtype.itemsize for spec in jax.tree.leaves(specs))
