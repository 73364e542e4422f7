"""Parts of a user's tree: the arrays that are trained, other arrays, and everything else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.errors import InputError, nearest
from jpipe.model._layer import describe, spec_of

Tree = Any


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


@dataclass(frozen=True)
class Parts:
    """How the leaves of a tree divide into chosen arrays, other arrays, and leaves that are no arrays.

    A part of a tree is the tree with None for the leaves of other parts.

    Attributes:
        treedef: the structure of the tree.
        leaves: those that are no arrays; specs of the arrays.
        chosen: whether each leaf is chosen.
    """

    treedef: Any
    leaves: tuple[Any, ...]
    chosen: tuple[bool, ...]

    @staticmethod
    def of(tree: Tree, choose: Callable[[Any], bool]) -> "Parts":
        """Return how the leaves of a tree divide.

        Args:
            tree: any pytree.
            choose: whether a leaf is chosen.
        """
        leaves, treedef = jax.tree.flatten(specs_of(tree))
        return Parts(treedef, tuple(leaves), tuple(map(choose, leaves)))

    @property
    def has_constants(self) -> bool:
        """Whether there are arrays that are not chosen."""
        return any(is_array(leaf) and not is_chosen for leaf, is_chosen in zip(self.leaves, self.chosen, strict=True))

    def chosen_of(self, tree: Tree) -> Tree:
        """Return the chosen arrays of a tree."""
        return self._where(tree, self.chosen)

    def chosen_in(self, treedef: Any) -> Tree:
        """Return specs of the chosen arrays in a tree of another structure, with its leaves in the same order."""
        return treedef.unflatten([leaf if is_chosen else None for leaf, is_chosen in zip(self.leaves, self.chosen, strict=True)])

    def constants_of(self, tree: Tree) -> Tree:
        """Return the other arrays of a tree."""
        return self._where(tree, [is_array(leaf) and not is_chosen for leaf, is_chosen in zip(self.leaves, self.chosen, strict=True)])

    def _where(self, tree: Tree, wanted: Any) -> Tree:
        leaves = self.treedef.flatten_up_to(tree)
        return self.treedef.unflatten([leaf if is_wanted else None for leaf, is_wanted in zip(leaves, wanted, strict=True)])

    def joined(self, *parts: Tree) -> Tree:
        """Return the whole tree from parts of it; leaves that are no arrays are the original ones."""
        known = [self.treedef.flatten_up_to(part) for part in parts]
        originals = [None if is_array(leaf) else leaf for leaf in self.leaves]
        return self.treedef.unflatten(
            [next((leaf for leaf in one if leaf is not None), None) for one in zip(*known, originals, strict=True)]
        )


def matched(where: str, specs: Tree, tree: Tree, *, any_float: bool = False) -> Tree:
    """Return the arrays of a tree in the structure of `specs`, found by their paths; None where the tree has none.

    Args:
        where: what the tree is, for messages.
        specs: specs of the arrays; other leaves are left out.
        tree: any pytree with the same names on the path to each array.
        any_float: whether floating-point arrays may have another floating-point dtype than their specs.

    Raises:
        InputError: an array that `specs` does not have, or of another shape or dtype.
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
            raise InputError(f"{where}: expected an array as '{path_name(path)}', found {type(leaf).__name__}")
        has_dtype = leaf.dtype == spec.dtype or (any_float and is_trained(leaf) and is_trained(spec))
        if leaf.shape != spec.shape or not has_dtype:
            raise InputError(f"{where}: expected '{path_name(path)}' as in the model, {describe(spec)}, found {describe(leaf)}")
        leaves.append(leaf)
    if unknown := next((name for name, leaf in arrays.items() if is_array(leaf)), None):
        names = [path_name(path) for path, spec in flat if is_array(spec)]
        raise InputError(f"{where}: '{unknown}' is not in the model; {nearest(unknown, names)}")
    return jax.tree.unflatten(treedef, leaves)
