"""A whole model as one layer, of which only floating-point arrays are parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.errors import InputError
from jpipe.model._layer import Layer
from jpipe.model.traced.doors._parts import Parts, array_spec, is_array, is_spec, is_trained, matched, path_name, specs_of

Tree = Any

WHERE = "the model"
"""What a whole model is called in messages."""


@dataclass(frozen=True)
class Whole:
    """A whole model as one layer, and the way back.

    With one input the layer's `x` is that input, with several it is their tuple.

    Attributes:
        layer: its `init` uses the key of the run as it is, its `apply` that of the microbatch. Its parameters are the floating-point
            arrays that are trained, in a tree in which None replaces all others; other parameters are in its state.
        params: the arrays that the user gave, in the structure of the layer's parameters; None if there are none yet.
        state: likewise.
        specs: shapes and dtypes of the layer's parameters and state.
        rebuild: `(params, state) ->` the user's model with these arrays: an NNX module, the variables of a Linen module, a callable
            pytree; for a function, its parameters, or the pair of its parameters and its state.
        to_user: parameters of the layer -> the tree that the user knows: nested dicts for NNX, the collection "params" for Linen, the
            pytree that was given for other models and functions.
        from_user: such a tree, or the user's model with its variables -> `(params, state)` in the layer's structures, in which None
            replaces what it does not have.
        structures: of the parameters as an optimizer gets them elsewhere, with equal leaves in the same order: that of the layer's
            parameters first, then others that functions of Flax need.
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
    """Return the whole of a layer whose parameters may have constants and leaves that are no arrays: those are not trained.

    Args:
        layer: its parameters are the user's tree.
        params: this tree, with arrays or specs.
        state: likewise.
        rebuild: `(user's tree, state) -> user's model`.
        trees: what a user gives -> (tree, state).
        others: further structures of the user's tree, with its leaves in the same order.
    """
    parts = Parts.of(params, is_trained)
    _reject_complex(parts.treedef.unflatten(parts.leaves))

    def pack(state: Tree, constants: Tree) -> Tree:
        return {"state": state, "constants": constants} if parts.has_constants else state

    def unpack(params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Return the user's tree and the layer's state."""
        return (parts.joined(params, state["constants"]), state["state"]) if parts.has_constants else (parts.joined(params), state)

    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        tree, state = layer.init(key, x)
        return _canonical(parts.chosen_of(tree)), _canonical(pack(state, parts.constants_of(tree)))

    def apply(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        y, new_state = layer.apply(*unpack(params, state), x, key, train)
        return y, pack(new_state, state["constants"] if parts.has_constants else None)

    full_specs, state_specs = parts.treedef.unflatten(parts.leaves), specs_of(state)
    initial = parts.chosen_of(params), pack(state, parts.constants_of(params))

    def from_user(tree: Any) -> tuple[Tree, Tree]:
        params, state = trees(tree)
        full = matched("params", full_specs, params)
        return parts.chosen_of(full), pack(matched("params: state", state_specs, state), parts.constants_of(full))

    return Whole(
        layer=replace(layer, init=init, apply=apply),
        params=_arrays(initial[0]),
        state=_arrays(initial[1]),
        specs=(specs_of(initial[0]), specs_of(initial[1])),
        rebuild=lambda params, state: rebuild(*unpack(params, state)),
        to_user=lambda chosen: parts.joined(chosen, parts.constants_of(params)),
        from_user=from_user,
        structures=tuple(jax.tree.structure(parts.chosen_in(treedef)) for treedef in (parts.treedef, *others)),
    )


def _arrays(tree: Tree) -> Tree | None:
    """Return a tree of arrays; None if it is one of specs."""
    return None if any(map(is_spec, jax.tree.leaves(tree))) else _canonical(tree)


def _canonical(tree: Tree) -> Tree:
    """Return the arrays in the dtypes that they have on a device: without 64 bits, NumPy's are narrower there."""
    dtypes = jax.tree.map(lambda leaf: array_spec(leaf).dtype, tree)
    return jax.tree.map(lambda leaf, dtype: leaf if leaf.dtype == dtype else leaf.astype(dtype), tree, dtypes)


def _reject_complex(tree: Tree) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise InputError(
                f"{WHERE}: parameter '{path_name(path)}' is {leaf.dtype}: only real floating-point parameters can be trained; keep its "
                "real and imaginary parts as two parameters"
            )
