"""Whole models as flat chains of equations."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.context import noting_reads, traced_positions
from jpipe.errors import Problem, callers_code, cause
from jpipe.model._layer import describe, key_spec
from jpipe.model.traced._blocks import Path
from jpipe.model.traced._chain import Chain, chain_of
from jpipe.model.traced.flat._flatten import Leaf, flatten, stack_slices
from jpipe.model.traced.frontends._whole import Whole

Tree = Any


@dataclass(frozen=True)
class Leaves:
    """The parameters and layer state of a traced model, in order: `num_params` parameters, then the state."""

    leaves: tuple[Leaf, ...]  # for each array, its leaf of the trees, or its slice of a leaf
    paths: tuple[Path, ...]  # the path of each array
    shapes: tuple[tuple[int, ...], ...]  # the shape of each array
    num_params: int  # the number of parameters

    @cached_property
    def names(self) -> list[str]:
        """The path of each array as one string."""
        return [".".join(path) for path in self.paths]

    @property
    def axes(self) -> dict[int, tuple[int, ...]]:
        """The axes along which each leaf of the trees is split."""
        return {leaf.number: leaf.axes for leaf in self.leaves}


@dataclass(frozen=True)
class Trace:
    """A model traced for inputs of some shapes, in training or in evaluation."""

    leaves: Leaves  # its parameters and layer state
    chain: Chain  # its equations
    outputs: Callable[[Sequence[Any]], Tree]  # a function that builds the outputs of the model from the results of the chain


def trace_model(whole: Whole, prepare: Callable[[Tree], Tree], inputs: Tree, train: bool, axes: Mapping[int, tuple[int, ...]]) -> Trace:
    """Trace a whole model after applying `prepare` to its parameters. Raise InputError if the model raises an error.

    `axes` has, by number of a stacked leaf, the axes along which another trace splits it.
    """
    words, change = f"the model cannot be traced with inputs {describe(inputs)}", partial(_remedy, whole, inputs, train)
    with callers_code(lambda error: Problem(f"{words}: {cause(error)}", "from_model", change=change())):
        params, state = jax.eval_shape(prepare, whole.specs[0]), whole.specs[1]
        trees = jax.tree.structure((params, state))

        def forward(leaves: Sequence[Any], key: jax.Array, x: Tree) -> Any:
            params, state = jax.tree.unflatten(trees, leaves)
            return whole.layer.apply(params, state, x, key, train)

        closed, (outputs, _) = jax.make_jaxpr(forward, return_shape=True)(jax.tree.leaves((params, state)), key_spec(), inputs)
    num_params, num_outputs = len(jax.tree.leaves(params)), len(jax.tree.leaves(outputs))
    state_numbers = range(num_params, num_params + len(jax.tree.leaves(state)))
    replaces = {num_outputs + i: number for i, number in enumerate(state_numbers)}
    flat = flatten(closed, state_numbers.stop, replaces, axes)
    paths = _sliced(flat.leaves, [*paths_of(params), *paths_of(state)])
    shapes = tuple(var.aval.shape for var in flat.closed.jaxpr.invars[: len(flat.leaves)])
    leaves = Leaves(flat.leaves, paths, shapes, sum(leaf.number < num_params for leaf in flat.leaves))
    number_of = {leaf: number for number, leaf in enumerate(flat.leaves)}
    results = [result for result in flat.results if result.number < num_outputs]
    written = [number_of[replace(result, number=replaces[result.number])] for result in flat.results[len(results) :]]
    chain = chain_of(flat.closed, leaves.num_params, len(flat.leaves), written, len(results))
    return Trace(leaves, chain, partial(_outputs, outputs, results))


def _remedy(whole: Whole, inputs: Tree, train: bool) -> str:
    """Return what to change in a model that raises an error: it may take one row, as most Equinox modules do."""
    row = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape[1:], spec.dtype), inputs)
    try:
        jax.eval_shape(lambda params, state, x, key: whole.layer.apply(params, state, x, key, train), *whole.specs, row, key_spec())
    except Exception:
        return "fix it there"
    return (
        f"it takes one row, {describe(row)}, but a pipeline passes all rows of a microbatch; map it over rows: "
        "from_function(lambda model, x: jax.vmap(model)(x), model, x)"
    )


def _outputs(specs: Tree, results: Sequence[Leaf], values: Sequence[Any]) -> Tree:
    """Return the outputs of a model from their slices."""
    slices: dict[int, dict[Leaf, Any]] = {}
    for result, value in zip(results, values, strict=True):
        slices.setdefault(result.number, {})[result] = value
    leaves, treedef = jax.tree.flatten(specs)
    return jax.tree.unflatten(treedef, [stacked(spec, slices.get(number, {})) for number, spec in enumerate(leaves)])


def stacked(spec: jax.ShapeDtypeStruct, slices: Mapping[Leaf, Any]) -> Any:
    """Return an array from its slices, or its spec if some are missing. Slices on several devices are stacked on the host."""
    if not slices or len(slices) < math.prod(spec.shape[axis] for axis in next(iter(slices)).axes):
        return spec
    parts = list(slices.values())
    in_one_place = any(isinstance(part, jax.core.Tracer) for part in parts) or len({getattr(part, "sharding", None) for part in parts}) == 1
    return stack_slices(slices, jnp.stack if in_one_place else lambda arrays, axis: np.stack([np.asarray(array) for array in arrays], axis))


def paths_of(tree: Tree) -> list[Path]:
    """Return the path of each leaf."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [tuple(jax.tree_util.keystr((part,), simple=True) for part in path) or ("value",) for path, _ in flat]


def _sliced(leaves: Sequence[Leaf], paths: Sequence[Path]) -> tuple[Path, ...]:
    """Return the paths of leaves. The path of a slice contains its index at the point where the stacked part of the tree begins."""
    stacked = {leaf.number: len(leaf.index) for leaf in leaves if leaf.index}
    result = []
    for leaf in leaves:
        path = paths[leaf.number]
        if leaf.index:
            length = next(
                n
                for n in range(len(path) + 1)
                if all(stacked.get(i) == len(leaf.index) for i, other in enumerate(paths) if other[:n] == path[:n])
            )
            path = (*path[:length], *map(str, leaf.index), *path[length:])
        result.append(path)
    return tuple(result)


def context() -> tuple[Any, ...]:
    """Return the settings, apart from the shapes, on which a trace depends."""
    names = (
        "jax_enable_x64",
        "jax_numpy_dtype_promotion",
        "jax_numpy_rank_promotion",
        "jax_default_prng_impl",
        "jax_default_matmul_precision",
    )
    with noting_reads():  # by no layer
        positions = traced_positions()
    return (*(jax.config.values.get(name) for name in names), jax.sharding.get_abstract_mesh(), positions)
