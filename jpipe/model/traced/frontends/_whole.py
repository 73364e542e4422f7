"""A whole model as one layer; only its floating-point arrays are parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.errors import InputError, nearest
from jpipe.model._layer import Layer, describe, spec_of, untrainable

Tree = Any

WHERE = "the model"
"""The name of a whole model in messages."""


@dataclass(frozen=True)
class Whole:
    """A whole model as one layer, and conversions back to the user's model.

    If the model has one input, the layer's `x` is this input; if it has several, `x` is a tuple of them.

    Attributes:
        layer: the layer. Its `init` uses the key of the run unchanged, its `apply` the key of the microbatch. Its parameters are the
            floating-point arrays, which are trained, in a tree with None in place of all other leaves; other parameters are in its state.
        params: the arrays that the user gave, in the structure of the layer's parameters; None if the user gave none.
        state: the state that the user gave, in the same form.
    specs: shapes and dtypes of the layer's parameters and state.
        rebuild: a function of (params, state) that returns the user's model with these arrays: an NNX module, the variables of a Linen
            module, a callable pytree; for a function, its parameters, or the pair of its parameters and its state.
        to_user: a function from the layer's parameters to the user's tree: nested dicts for NNX, the collection "params" for Linen, and for
            other models and functions a pytree like the given one.
        from_user: a function from such a tree, or from the user's model with its variables, to `(params, state)` in the layer's structures,
            with None in place of missing arrays.
        structures: structures that the parameters may have when an optimizer gets them, with equal leaves in the same order: first the
            structure of the layer's parameters, then others that functions of Flax need.
    """

    layer: Layer
    params: Tree | None
    state: Tree | None
    specs: tuple[Tree, Tree]
    rebuild: Callable[[Tree, Tree], Any]
    to_user: Callable[[Tree], Tree]
    from_user: Callable[[Any], tuple[Tree, Tree]]
    structures: tuple[Any, ...]


def whole(
    layer: Layer,
    params: Tree,
    state: Tree,
    rebuild: Callable[[Tree, Tree], Any],
    trees: Callable[[Any], tuple[Tree, Tree]],
    others: Sequence[Any] = (),
) -> Whole:
    """Return the `Whole` of a layer. Among its parameters, constants and leaves that are not arrays are not trained.

    `params` is the user's tree. `rebuild` makes the user's model from (tree, state), and `trees` makes (tree, state) from a model or tree.
    `others` are further structures of the user's tree, with its leaves in the same order.
    """
    full_specs, state_specs = specs_of(params), specs_of(state)
    _reject_complex(full_specs)
    static = only(params, lambda leaf: not is_array(leaf))
    has_constants = any(map(is_constant, jax.tree.leaves(params)))

    def pack(tree: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Return the layer's parameters and state from the user's tree and state."""
        return only(tree, is_trained), {"state": state, "constants": only(tree, is_constant)} if has_constants else state

    def unpack(params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Return the user's tree and state from the layer's parameters and state."""
        return (joined(params, state["constants"], static), state["state"]) if has_constants else (joined(params, static), state)

    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        params, state = pack(*layer.init(key, x))
        return _canonical(params), _canonical(state)

    def apply(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        y, new_state = layer.apply(*unpack(params, state), x, key, train)
        return y, {**state, "state": new_state} if has_constants else new_state

    def from_user(tree: Any) -> tuple[Tree, Tree]:
        params, state = trees(tree)
        return pack(matched("params", full_specs, params), matched("params: state", state_specs, state))

    initial = pack(params, state)
    structures = jax.tree.structure(params), *others
    return Whole(
        layer=replace(layer, init=init, apply=apply),
        params=_arrays(initial[0]),
        state=_arrays(initial[1]),
        specs=(specs_of(initial[0]), specs_of(initial[1])),
        rebuild=lambda params, state: rebuild(*unpack(params, state)),
        to_user=lambda chosen: joined(chosen, only(params, lambda leaf: not is_trained(leaf))),
        from_user=from_user,
        structures=tuple(jax.tree.structure(only(each.unflatten(jax.tree.leaves(params)), is_trained)) for each in structures),
    )


def _arrays(tree: Tree) -> Tree | None:
    """Return a tree of arrays; None if its leaves are specs."""
    return None if any(map(is_spec, jax.tree.leaves(tree))) else _canonical(tree)


def _canonical(tree: Tree) -> Tree:
    """Return the arrays with the dtypes that they get on a device, where JAX makes them narrower if it has no 64-bit types."""
    dtypes = jax.tree.map(lambda leaf: array_spec(leaf).dtype, tree)
    return jax.tree.map(lambda leaf, dtype: leaf if leaf.dtype == dtype else leaf.astype(dtype), tree, dtypes)


def _reject_complex(tree: Tree) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise untrainable(repr(path_name(path)), leaf.dtype).at(WHERE)


# Parts of a user's tree: the arrays that are trained, constant arrays, and everything else --------------------------------


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array or the spec of one."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def is_spec(leaf: Any) -> bool:
    """Return whether a leaf is the spec of an array."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def array_spec(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the spec of an array, which may hold random keys."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_key else spec_of(leaf)


def specs_of(tree: Tree) -> Tree:
    """Return the specs of a tree's arrays; other leaves stay."""
    return jax.tree.map(lambda leaf: array_spec(leaf) if is_array(leaf) else leaf, tree)


def is_trained(leaf: Any) -> bool:
    """Return whether a leaf is an array of floating-point numbers."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def path_name(path: tuple[Any, ...]) -> str:
    """Return the path to a leaf as text, with keys joined by "/"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_constant(leaf: Any) -> bool:
    """Return whether a leaf is an array that is not trained."""
    return is_array(leaf) and not is_trained(leaf)


def only(tree: Tree, choose: Callable[[Any], bool]) -> Tree:
    """Return a tree with None in place of the leaves that are not chosen."""
    return jax.tree.map(lambda leaf: leaf if choose(leaf) else None, tree)


def joined(*parts: Tree) -> Tree:
    """Return the whole tree from its parts, each with None in place of the leaves that it lacks."""
    return jax.tree.map(
        lambda *leaves: next((leaf for leaf in leaves if leaf is not None), None), *parts, is_leaf=lambda leaf: leaf is None
    )


def matched(where: str, specs: Tree, tree: Tree, *, any_float: bool = False) -> Tree:
    """Return the arrays of a tree in the structure of `specs`, found by their paths, with None in place of missing arrays.

    Leaves of `specs` that are no specs are left out. With `any_float` floating-point arrays may have another floating-point dtype. Raise
    InputError for an array that `specs` does not have, or with another shape or dtype.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(specs)
    arrays = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    leaves: list[Any] = []
    for path, spec in flat:
        leaf = arrays.pop(path_name(path), None)
        if not is_array(spec) or leaf is None:
            leaves.append(None)
            continue
        if not is_array(leaf):
            raise InputError(where=where, expected=f"an array as '{path_name(path)}'", found=type(leaf).__name__)
        has_dtype = leaf.dtype == spec.dtype or (any_float and is_trained(leaf) and is_trained(spec))
        if leaf.shape != spec.shape or not has_dtype:
            raise InputError(where=where, expected=f"'{path_name(path)}' as in the model, {describe(spec)}", found=describe(leaf))
        leaves.append(leaf)
    if unknown := next((name for name, leaf in arrays.items() if is_array(leaf)), None):
        names = [path_name(path) for path, spec in flat if is_array(spec)]
        raise InputError(f"'{unknown}' is not in the model", where=where, change=nearest(unknown, names))
    return jax.tree.unflatten(treedef, leaves)
