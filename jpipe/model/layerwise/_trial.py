"""Try an optimizer on tiny arrays, and compare updates and states of stacked blocks with the results for each block alone."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun

from jpipe.model.jaxprs._wanted import without_effects
from jpipe.model.layerwise._trace_optimizer import Position, TracedOptimizer, optax_promotion, read_state

Tree = Any

_UPDATES = 8  # the number of updates that change parameters; an optimizer that accumulates over several steps makes few
_STEPS = 100  # at most
_NAN_STEP = 6
_EXPONENTS = (-6, 6, 0, -3, 3)  # exponents of the sizes of gradients; the layers take turns
_DELAYS = (0.0, 1.0, 0.75, 3.0)


def slice_difference(
    transformation: optax.GradientTransformation,
    traced: TracedOptimizer,
    structure: Any,
    specs: Sequence[Any],
    axes: Mapping[int, tuple[int, ...]],
    shapes: Sequence[tuple[int, ...]],
    keeps_axes: bool,
) -> bool:
    """Return whether slices that are updated one by one differ from slices of stacked arrays.

    Two slices take turns in a stacked array, which has its real number of blocks, because a rule may depend on this number. State that no
    update depends on is not compared. In `specs` stacked leaves have one slice, with a dim of size 1; `shapes` are whole; and `keeps_axes`
    tells whether a slice alone keeps that dim.
    """
    compared = [True] * len(specs) + read_state(traced)

    def alone(leaves: Sequence[Any]) -> Tree:
        return structure.unflatten([leaf if keeps_axes or n not in axes else leaf.squeeze(axes[n]) for n, leaf in enumerate(leaves)])

    def differs(rank: int) -> bool:
        first = [_tiny_array(spec) for spec in specs]
        second = [leaf * 2 if n in axes else leaf for n, leaf in enumerate(first)]

        def stacked(n: int, pair: tuple[Any, Any]) -> Any:
            axis = axes[n][min(rank, len(axes[n]) - 1)]
            return jnp.concatenate([pair[i % 2] for i in range(max(2, shapes[n][axis]))], axis)

        def all_runs() -> Iterator[tuple[Tree, Tree, Tree]]:
            """Yield (stacked arrays, first slice, second slice): first the parameters, and then the gradients of each step."""
            for step in range(-1, _STEPS):
                one, two = (first, second) if step < 0 else (_gradients(first, step, 0), _gradients(second, step, 1))
                two = [leaf if n in axes else one[n] for n, leaf in enumerate(two)]
                pairs = enumerate(zip(one, two, strict=True))
                yield structure.unflatten([stacked(n, pair) if n in axes else pair[0] for n, pair in pairs]), alone(one), alone(two)

        runs, updates = [_run(transformation, traced.position, map(itemgetter(i), all_runs())) for i in range(3)], 0
        for expected, *actual in zip(*runs, strict=True):
            if any(one.keys() != expected.keys() for one in actual):
                return True
            pairs = zip(expected.items(), compared, strict=True)
            if not all(_are_slices(leaf, [one[path] for one in actual]) for (path, leaf), is_compared in pairs if is_compared):
                return True
            updates += any(np.any(leaf) for (part, *_), leaf in expected.items() if part.idx == 0)
            if updates == _UPDATES:
                break
        return False

    with optax_promotion(), jax.debug_nans(False), jax.transfer_guard("allow"):
        return any(map(differs, range(max(map(len, axes.values())))))


def _are_slices(whole: np.ndarray, slices: Sequence[np.ndarray]) -> bool:
    """Return whether an array equals both slices, or its slices along some axis equal the two in turn."""
    if all(_close(whole, part) for part in slices):
        return True
    axes = [axis for axis, size in enumerate(whole.shape) if size > 1 and all(whole.size == size * part.size for part in slices)]
    return any(all(_close(part.ravel(), slices[i % 2].ravel()) for i, part in enumerate(np.moveaxis(whole, axis, 0))) for axis in axes)


def _run(transformation: optax.GradientTransformation, names: Sequence[str], trees: Iterator[Tree]) -> Iterator[dict[Any, np.ndarray]]:
    """Yield the arrays of the updates and of the new state after each step, by path.

    `names` are the `Position` entries that the optimizer gets, with values that change. `trees` are the parameters, and then gradients.
    """

    def update(gradients: Tree, state: Tree, params: Tree, position: Position) -> tuple[Tree, Tree, Tree]:
        updates, state = transformation.update(gradients, state, params, **position)
        return updates, state, optax.apply_updates(params, updates)

    params, run = next(trees), None
    state = _prepared(transformation.init, params)(params)
    for step, gradients in enumerate(trees):
        values = {"delay": np.float32(_DELAYS[step % len(_DELAYS)]), "stage": np.int32(step % 3)}
        arguments = gradients, state, params, {name: jnp.asarray(values[name]) for name in names}
        run = run or _prepared(update, *arguments)
        updates, state, params = run(*arguments)
        yield {path: _to_numpy(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path((updates, state))[0]}


def _prepared(function: Callable[..., Tree], *arguments: Tree) -> Callable[..., Tree]:
    """Trace a function once, to run it operation by operation. For a few tiny steps this is far quicker than compiling, except for loops.

    Host callbacks are left out, because the values of the steps are dummies.
    """
    closed, output = jax.make_jaxpr(function, return_shape=True)(*arguments)
    if closed.effects:
        closed = jax.make_jaxpr(without_effects(function))(*arguments)
    run = jaxpr_as_fun(closed)
    if re.search(r"\b(while|scan|cond)\[", str(closed)):
        run = jax.jit(run)
    treedef = jax.tree.structure(output)
    return lambda *arguments: jax.tree.unflatten(treedef, run(*jax.tree.leaves(arguments)))


def _tiny_array(spec: Any) -> jax.Array:
    """Return an array with the dtype and rank of `spec`, at most two entries in each dim, and numbers small enough for updates to show."""
    shape = tuple(min(size, 2) for size in spec.shape)
    return jnp.asarray(np.linspace(1e-3, 2e-3, int(np.prod(shape))).reshape(shape), spec.dtype)


def _gradients(params: Sequence[jax.Array], step: int, number: int) -> list[jax.Array]:
    """Return random gradients of one of the two slices. Their size varies between steps; the first slice has NaN once."""
    generator = np.random.default_rng((step, number))
    size = np.nan if (step, number) == (_NAN_STEP, 0) else 10.0 ** _EXPONENTS[(number + step) % len(_EXPONENTS)]
    most = [float(jnp.finfo(leaf.dtype).max) / 8 for leaf in params]
    noise = (np.clip(size * generator.normal(size=leaf.shape), -limit, limit) for leaf, limit in zip(params, most, strict=True))
    return [jnp.asarray(array, leaf.dtype) for array, leaf in zip(noise, params, strict=True)]


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
