"""Whole models as flat chains of equations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jpipe.errors import callers_code, cause
from jpipe.model._layer import Layer, describe, key_spec
from jpipe.model.traced._chain import Chain, chain_of
from jpipe.model.traced._cuts import Path
from jpipe.model.traced._flatten import Leaf, flatten

Tree = Any


@dataclass(frozen=True)
class Leaves:
    """The parameters and layer state of a traced model, in order: `num_params` parameters, then the state.

    Attributes:
        leaves: which leaf of the trees each is, or which slice of one.
        paths: of each.
        shapes: of each.
        num_params: how many are parameters.
    """

    leaves: tuple[Leaf, ...]
    paths: tuple[Path, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_params: int

    @cached_property
    def names(self) -> list[str]:
        """The path of each in one string."""
        return [".".join(path) for path in self.paths]


@dataclass(frozen=True)
class Trace:
    """A model traced for inputs of some shapes, in training or in evaluation."""

    leaves: Leaves
    chain: Chain
    outputs: Any  # their treedef


def trace_model(whole: Layer, prepare: Callable[[Tree], Tree], inputs: Tree, train: bool) -> Trace:
    """Trace a whole model."""
    with callers_code(lambda error: f"from_model: the model cannot be traced with inputs {describe(inputs)}: {cause(error)}; fix it there"):
        params, state = jax.eval_shape(whole.init, key_spec(), inputs)
        params = jax.eval_shape(prepare, params)
        trees = jax.tree.structure((params, state))

        def forward(leaves: Sequence[Any], key: jax.Array, x: Tree) -> Any:
            params, state = jax.tree.unflatten(trees, leaves)
            return whole.apply(params, state, x, key, train)

        closed, (outputs, _) = jax.make_jaxpr(forward, return_shape=True)(jax.tree.leaves((params, state)), key_spec(), inputs)
    count, num_params = len(jax.tree.leaves((params, state))), len(jax.tree.leaves(params))
    flat = flatten(closed, count)
    paths = _sliced(flat.leaves, [*paths_of(params), *paths_of(state)])
    shapes = tuple(var.aval.shape for var in flat.closed.jaxpr.invars[: len(flat.leaves)])
    leaves = Leaves(flat.leaves, paths, shapes, sum(leaf.number < num_params for leaf in flat.leaves))
    number_of = {leaf: number for number, leaf in enumerate(flat.leaves)}
    num_outputs = len(jax.tree.leaves(outputs))
    results = flat.results[num_outputs:]
    written = [number_of[Leaf(result.number - num_outputs + num_params, result.index)] for result in results]
    chain = chain_of(flat.closed, leaves.num_params, len(flat.leaves), written, num_outputs)
    return Trace(leaves, chain, jax.tree.structure(outputs))


def paths_of(tree: Tree) -> list[Path]:
    """Return the path of each leaf."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [tuple(jax.tree_util.keystr((part,), simple=True) for part in path) or ("value",) for path, _ in flat]


def _sliced(leaves: Sequence[Leaf], paths: Sequence[Path]) -> tuple[Path, ...]:
    """Return the paths of leaves; that of a slice has its index where the stacked part of the tree begins."""
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
    """Return what a trace depends on besides the shapes."""
    names = (
        "jax_enable_x64",
        "jax_numpy_dtype_promotion",
        "jax_numpy_rank_promotion",
        "jax_default_prng_impl",
        "jax_default_matmul_precision",
    )
    return (*(jax.config.values.get(name) for name in names), jax.sharding.get_abstract_mesh())
