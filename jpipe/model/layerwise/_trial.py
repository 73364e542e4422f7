"""An optimizer run on tiny arrays, whole and layer by layer, to compare updates and states."""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun

from jpipe.errors import cause
from jpipe.model._ties import Ties
from jpipe.model.jaxprs._wanted import without_effects
from jpipe.model.layerwise._optimizer import LayerwiseOptimizer
from jpipe.model.layerwise._trace import Position

Tree = Any

_UPDATES = 8  # that change parameters; an optimizer that accumulates over several steps makes few
_STEPS = 100  # at most
_NAN_STEP = 6
_LAYERS = 12  # that are tried, at most
_EXPONENTS = (-6, 6, 0, -3, 3)  # of the gradients' sizes; the layers take turns
_DELAYS = (0.0, 1.0, 0.75, 3.0)


def sample_layers(ids: list[str]) -> list[str]:
    """Return all of a few layers; of many the first, the last, and some between them."""
    if len(ids) <= _LAYERS:
        return ids
    return [ids[i * (len(ids) - 1) // (_LAYERS - 1)] for i in range(_LAYERS)]


def difference(layerwise: LayerwiseOptimizer, blank: Mapping[str, Tree], params: Mapping[str, Tree], ties: Ties) -> str:
    """Describe how the layers updated one by one differ from the layers updated together, or return an empty string.

    Args:
        layerwise: the optimizer for the layers one by one.
        blank: the structure of the whole model, for the layers together.
        params: the layers.
        ties: shared parameters, which are apart when layers are one by one.
    """
    whole, trained = _Run(layerwise, {**blank, **params}), layerwise.trained
    try:
        parts = {i: part for i, part in ties.parts(params, trained).items() if not trained.excludes(i)}
        split = {i: _Run(layerwise, {**layerwise.blank, **part}) for i, part in parts.items()}
    except Exception as error:
        return f"on one layer alone it fails: {cause(error)}"
    updates = step = 0
    while updates < _UPDATES and step < _STEPS:
        gradients = _gradients(params, step)
        expected = whole.step({**blank, **gradients}, step)
        parts, untouched = ties.parts(gradients, trained), {path for path in expected if path[0].idx == 0}
        for layer_id, run in split.items():
            actual = run.step({**layerwise.blank, **parts[layer_id]}, step)
            if not all(path in expected and _close(expected[path], leaf) for path, leaf in actual.items()):
                return f"after step {step + 1} layer '{layer_id}' is not updated as it is alone"
            untouched -= actual.keys()
        if step < _NAN_STEP and any(np.any(expected[path]) for path in untouched):
            return f"after step {step + 1} a parameter is changed whose update is always zero"
        updates += any(np.any(leaf) for (part, *_), leaf in expected.items() if part.idx == 0)
        step += 1
    return ""


def slice_difference(
    layerwise: LayerwiseOptimizer,
    structure: Any,
    specs: Sequence[Any],
    axes: Mapping[int, tuple[int, ...]],
    shapes: Sequence[tuple[int, ...]],
    reads: Sequence[bool],
    keeps_axes: bool,
) -> bool:
    """Return whether slices of stacked arrays are updated otherwise one by one than in the stacked arrays.

    There are two slices, which take turns in a stacked array, because a rule may count the blocks: "the first three are frozen".

    Args:
        layerwise: the optimizer.
        structure: of the tree of all parameters.
        specs: of its leaves, with one slice of each stacked leaf, which has a dim of size 1 for the blocks.
        axes: of stacked leaves, by number.
        shapes: of the leaves with all slices.
        reads: for each leaf of the state whether updates depend on it; the others are not compared.
        keeps_axes: whether a slice alone has that dim.
    """

    def stack(first: Any, second: Any, rank: int) -> Any:
        return [turns(n, pair, rank) if n in axes else pair[0] for n, pair in enumerate(zip(first, second, strict=True))]

    def turns(n: int, pair: tuple[Any, Any], rank: int) -> jax.Array:
        axis = axes[n][min(rank, len(axes[n]) - 1)]
        return jnp.concatenate([pair[i % 2] for i in range(max(2, shapes[n][axis]))], axis)

    def alone(leaves: Sequence[Any]) -> Tree:
        return structure.unflatten([leaf if keeps_axes or n not in axes else leaf.squeeze(axes[n]) for n, leaf in enumerate(leaves)])

    for rank in range(max(map(len, axes.values()))):
        first = [tiny_array(spec) for spec in specs]
        second = [leaf * 2 if n in axes else leaf for n, leaf in enumerate(first)]
        whole, slices = (
            _Run(layerwise, structure.unflatten(stack(first, second, rank))),
            [_Run(layerwise, alone(leaves)) for leaves in (first, second)],
        )
        updates = step = 0
        while updates < _UPDATES and step < _STEPS:
            gradients = list(_gradients({"first": first, "second": second}, step).values())
            gradients[1] = [leaf if n in axes else gradients[0][n] for n, leaf in enumerate(gradients[1])]
            expected = whole.step(structure.unflatten(stack(gradients[0], gradients[1], rank)), step)
            actual = [run.step(alone(leaves), step) for run, leaves in zip(slices, gradients, strict=True)]
            if any(one.keys() != expected.keys() for one in actual):
                return True
            compared = [True] * len(specs) + list(reads)
            if not all(
                _are_slices(leaf, [one[path] for one in actual])
                for (path, leaf), is_compared in zip(expected.items(), compared, strict=True)
                if is_compared
            ):
                return True
            updates += any(np.any(leaf) for (part, *_), leaf in expected.items() if part.idx == 0)
            step += 1
    return False


def _are_slices(whole: np.ndarray, slices: Sequence[np.ndarray]) -> bool:
    """Return whether an array is equal to two others, or its slices along some axis are by turns equal to them."""
    if all(_close(whole, part) for part in slices):
        return True
    axes = [axis for axis, size in enumerate(whole.shape) if size > 1 and all(whole.size == size * part.size for part in slices)]
    return any(all(_close(part.ravel(), slices[i % 2].ravel()) for i, part in enumerate(np.moveaxis(whole, axis, 0))) for axis in axes)


def has_momentum(layerwise: LayerwiseOptimizer, params: Tree, blank: Mapping[str, Tree] = MappingProxyType({})) -> bool:
    """Return whether an optimizer has momentum: after other gradients, a gradient of zero still moves parameters.

    Parameters are zero, so that weight decay moves nothing. At a step at which no gradient moves any, because the learning rate is zero,
    nothing is known. If that is so at all steps, it counts as an optimizer with momentum.

    Args:
        layerwise: the optimizer.
        params: tiny parameters.
        blank: the remaining layers, without parameters, if `params` are those of some layers by layer id.
    """

    def filled(tree: Tree) -> Tree:
        return {**blank, **tree} if blank else tree

    zeros = filled(jax.tree.map(jnp.zeros_like, params))
    extra = {name: jnp.asarray(1, dtype) for name, dtype in (("delay", np.float32), ("stage", np.int32)) if name in layerwise.accepted}
    state = _prepared(layerwise.transformation.init, zeros)(zeros)
    update = _prepared(lambda gradients, state: layerwise.transformation.update(gradients, state, zeros, **extra), zeros, state)

    def moves(updates: Tree) -> bool:
        return any(np.any(_to_numpy(leaf)) for leaf in jax.tree.leaves(updates))

    has_moved = False
    for step in range(_NAN_STEP):
        if step and moves(update(zeros, state)[0]):
            return True
        updates, state = update(filled(_gradients({"": params}, step)[""]), state)
        has_moved |= step > 0 and moves(updates)
    return not has_moved


class _Run:
    """A run of one optimizer on one tree."""

    def __init__(self, layerwise: LayerwiseOptimizer, params: Tree) -> None:
        def update(gradients: Tree, state: Tree, params: Tree, position: Position) -> tuple[Tree, Tree, Tree]:
            extra = {name: position.get(name, 0) for name in layerwise.accepted}
            updates, state = layerwise.transformation.update(gradients, state, params, **extra)
            return updates, state, optax.apply_updates(params, updates)

        self._params, self._state, self._names = params, _prepared(layerwise.transformation.init, params)(params), layerwise.used
        self._update = _prepared(update, params, self._state, params, self._position(0))

    def _position(self, step: int) -> Position:
        """Return a delay and a stage, each step another one."""
        values = {"delay": np.float32(_DELAYS[step % len(_DELAYS)]), "stage": np.int32(step % 3)}
        return {name: jnp.asarray(values[name]) for name in self._names}

    def step(self, gradients: Tree, step: int) -> dict[Any, np.ndarray]:
        """Return the arrays of the updates and of the new state after a step, by path."""
        updates, self._state, self._params = self._update(gradients, self._state, self._params, self._position(step))
        return {path: _to_numpy(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path((updates, self._state))[0]}


def _prepared(function: Callable[..., Tree], *arguments: Tree) -> Callable[..., Tree]:
    """Trace a function once, to run it operation by operation: far quicker than compiling for a few tiny steps, unless it loops.

    Host callbacks are left out: the steps' values are dummies.
    """
    closed, output = jax.make_jaxpr(function, return_shape=True)(*arguments)
    if closed.effects:
        closed = jax.make_jaxpr(without_effects(function))(*arguments)
    run = jaxpr_as_fun(closed)
    if re.search(r"\b(while|scan|cond)\[", str(closed)):
        run = jax.jit(run)
    treedef = jax.tree.structure(output)
    return lambda *arguments: jax.tree.unflatten(treedef, run(*jax.tree.leaves(arguments)))


def tiny_array(spec: Any) -> jax.Array:
    """Return an array of the dtype and rank of `spec`, with at most two entries in each dim, so small that tiny updates show."""
    shape = tuple(min(size, 2) for size in spec.shape)
    return jnp.asarray(np.linspace(1e-3, 2e-3, int(np.prod(shape))).reshape(shape), spec.dtype)


def _gradients(params: Mapping[str, Tree], step: int) -> dict[str, Tree]:
    generator = np.random.default_rng(step)
    gradients = {}
    for number, (layer_id, tree) in enumerate(params.items()):
        size = 10.0 ** _EXPONENTS[(number + step) % len(_EXPONENTS)]
        if step == _NAN_STEP and number == step % len(params):
            size = np.nan
        gradients[layer_id] = jax.tree.map(lambda leaf, size=size: _noise(generator, leaf, size), tree)
    return gradients


def _noise(generator: np.random.Generator, leaf: jax.Array, size: float) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.zeros_like(leaf)
    largest = float(jnp.finfo(leaf.dtype).max) / 8
    return jnp.asarray(np.clip(size * generator.normal(size=leaf.shape), -largest, largest), leaf.dtype)


def _to_numpy(leaf: Any) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool(np.all(a == b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.abs(a[np.isfinite(a)])
    return bool(np.allclose(a, b, rtol=1e-3, atol=1e-3 * finite.max(initial=0.0), equal_nan=True))
