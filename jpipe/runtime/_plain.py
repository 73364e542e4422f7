"""Conversion of any pytree to nested dicts with string keys, which any program can read, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jpipe.errors import InputError
from jpipe.model._layer import describe

Tree = Any
Plain = dict[str, Any]
"""Nested dicts with string keys and arrays as leaves."""
Names = tuple[str, ...]
Flat = Sequence[tuple[Any, Any]]
"""The (path, leaf) of each leaf of a pytree."""


def to_plain(tree: Tree) -> Plain:
    """Return a pytree as nested dicts. The keys are the keys, names and numbers on the path to each leaf. Random keys become their bits."""
    leaves = {_names(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    is_key = {names: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for names, leaf in leaves.items()}
    return unflatten_dict({names: jax.random.key_data(leaf) if is_key[names] else leaf for names, leaf in leaves.items()})


def from_plain(specs: Tree, plain: Any, where: str, hint: str = "is it of another model?") -> Tree:
    """Convert the result of `to_plain` back to a pytree; `hint` is the likely reason for a missing or additional leaf."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(specs)
    return jax.tree.unflatten(treedef, _leaves(flat, *_by_names(flat, checked_dict(plain, where)), where, hint))


def _leaves(flat: Flat, values: Mapping[Names, Any], unmatched: Mapping[Names, Any], where: str, hint: str) -> list[Any]:
    """Check the leaves and return them in the order of their specs. `unmatched` has the leaves without a spec."""
    leaves = []
    for path, spec in flat:
        name, leaf = "/".join(_names(path)), values.get(_names(path))
        if leaf is None:
            raise InputError(f"{where}: the model's array '{name}', {describe(spec)}, is missing; {hint}")
        is_key = jnp.issubdtype(spec.dtype, jax.dtypes.prng_key)
        wanted = jax.eval_shape(jax.random.key_data, spec) if is_key else spec
        if (leaf.shape, leaf.dtype) != (wanted.shape, wanted.dtype):
            other = "; is it of another precision?" if leaf.shape == wanted.shape else ""
            raise InputError(where=where, expected=f"'{name}' as in the model, {describe(wanted)}", found=f"{describe(leaf)}{other}")
        leaves.append(jax.random.wrap_key_data(jnp.asarray(leaf)) if is_key else leaf)  # JAX's default kind, like all keys of a run
    if unmatched:
        raise InputError(f"{where}: '{'/'.join(next(iter(unmatched)))}' is not in the model; {hint}")
    return leaves


def checked_dict(plain: Any, where: str) -> Plain:
    """Check that `plain` is a dict, and return it."""
    if not isinstance(plain, dict):
        raise InputError(where=where, expected="a dict", found=describe(plain), change="was it written by jpipe?")
    return plain


def filled(specs: Tree, arrays: Tree, where: str) -> Tree:
    """Replace specs with arrays from a pytree of the same structure, or plain dicts, where these have leaves."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(arrays)[0]:
        if not isinstance(leaf, (np.ndarray, np.generic, jax.Array)):
            raise InputError(where=where, expected=f"an array as '{'/'.join(_names(path))}'", found=type(leaf).__name__)
    flat, treedef = jax.tree_util.tree_flatten_with_path(specs)
    values, unmatched = _by_names(flat, to_plain(arrays))
    fresh = {_names(path): spec for path, spec in flat}
    return jax.tree.unflatten(treedef, _leaves(flat, fresh | values, unmatched, where, "is it of another model?"))


def overlaid(plain: Plain, above: Plain) -> Plain:
    """Merge two nested dicts. If both have a leaf, the result has the leaf of `above`."""
    both = {name: overlaid(plain[name], above[name]) for name in plain.keys() & above.keys() if isinstance(above[name], dict)}
    return {**plain, **above, **both}


def _by_names(flat: Flat, plain: Plain) -> tuple[dict[Names, Any], dict[Names, Any]]:
    """Return two dicts of leaves by the names on their paths: the leaves that have a spec, and the remaining leaves.

    A key of `plain` may join several names of a path by "/". Equal paths are matched first, so a tree may have both a parameter "a/b" and a
    parameter "b" inside "a".
    """
    wanted, unmatched = [_names(path) for path, _ in flat], flatten_dict(plain)
    leaves = {names: unmatched.pop(names) for names in wanted if names in unmatched}
    joined = {"/".join(names): names for names in unmatched}
    for names in wanted:
        if names not in leaves and (other := joined.pop("/".join(names), None)) is not None:
            leaves[names] = unmatched.pop(other)
    return leaves, unmatched


def _names(path: tuple[Any, ...]) -> Names:
    """Return the names on a path; "array" if the leaf is the whole tree."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("array",)
