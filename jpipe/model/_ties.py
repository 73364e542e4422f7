"""Parameters that several layers share: one array in two or more places of the model."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jpipe.errors import InputError, nearest
from jpipe.model._layer import describe

Tree = Any


@dataclass(frozen=True)
class Tie:
    """One parameter in two places of the model, such as an embedding that is also the projection to logits.

    A place is (layer id, path): the keys from the layer's parameters to the array, joined by "/", as in "token/embedding". Several ties
    may have the same `first`.

    Attributes:
        first: the place where the parameter is initialized, trained, saved and exported.
        second: the place that uses it, too; what its layer makes there is dropped.
    """

    first: tuple[str, str]
    second: tuple[str, str]


class Ties:
    """The ties of a model. A shared parameter has an entry of its own among parameters, gradients and optimizer states.

    Entries are the layers, without the shared parameters (None in their places), and the shared parameters, by name.

    Args:
        ties: as the user gave them.
        ids: of all layers, in order.

    Raises:
        InputError: no ties, a layer that is not in the model, one place twice, or a chain.
    """

    def __init__(self, ties: Iterable[Tie], ids: Sequence[str]) -> None:
        self.first: dict[str, tuple[str, str]] = {}  # the first place, by name
        self.places: dict[str, dict[str, str]] = {}  # by layer id: the name of the shared parameter by path
        self._order = {layer_id: number for number, layer_id in enumerate(ids)}
        firsts, seconds = dict[tuple[str, str], str](), dict[tuple[str, str], str]()
        for tie in _checked(ties, ids):
            name = f"{tie.first[0]} shared {tie.first[1]}"
            if name in self._order:
                raise InputError(f"ties: the name '{name}' is that of a layer; rename the layer")
            if tie.second in seconds:
                raise InputError(f"ties: {_words(tie.second)} is the second place of two ties; give each place once")
            firsts[tie.first], seconds[tie.second] = name, name
            self.first[name] = tie.first
            for layer_id, path in (tie.first, tie.second):
                self.places.setdefault(layer_id, {})[path] = name
        for place in firsts:
            if place in seconds:
                raise InputError(
                    f"ties: {_words(place)} is the first place of one tie and the second of another; "
                    f"tie all of them to {_words(self.first[seconds[place]])}"
                )

    def names(self, ids: Iterable[str]) -> tuple[str, ...]:
        """The shared parameters that these layers use, in the order of their first use."""
        return tuple(dict.fromkeys(name for layer_id in ids for name in sorted(self.places.get(layer_id, {}).values())))

    def entries(self, ids: Sequence[str]) -> tuple[str, ...]:
        """The layers, and before the first one that uses it each shared parameter."""
        found: dict[str, None] = {}
        for layer_id in ids:
            found |= dict.fromkeys((*self.names([layer_id]), layer_id))
        return tuple(found)

    def split(self, params: Mapping[str, Tree], first: Callable[[str], Tree] | None = None) -> dict[str, Tree]:
        """The entries of some layers from their whole parameters.

        Args:
            params: by layer id.
            first: gives the whole parameters of a layer that is not among them and holds the first place of a shared one.
        """
        found: dict[str, Tree] = {}
        for layer_id, tree in params.items():
            found |= {name: None for name in self.names([layer_id]) if name not in found}
            found[layer_id] = _replaced(tree, dict.fromkeys(self.places.get(layer_id, {})))
        for name, (layer_id, path) in self.first.items():
            if name in found:
                whole = params[layer_id] if layer_id in params or first is None else first(layer_id)
                found[name] = _leaf(whole, path)
        return found

    def whole(self, layer_id: str, entries: Mapping[str, Tree]) -> Tree:
        """The parameters of a layer, shared ones included, from the entries."""
        places = self.places.get(layer_id)
        if not places:
            return entries[layer_id]
        return _replaced(entries[layer_id], {path: entries[name] for path, name in places.items()})

    def check(self, params: Mapping[str, Tree]) -> None:
        """Refuse ties that do not fit the parameters of the layers.

        Args:
            params: specs of all parameters, by layer id.

        Raises:
            InputError: a path that is not there, or two places of different shapes or dtypes.
        """
        leaves = {layer_id: dict(_paths(params[layer_id])) for layer_id in self.places}
        for layer_id, places in self.places.items():
            for path, name in places.items():
                if path not in leaves[layer_id]:
                    near = difflib.get_close_matches(path, leaves[layer_id], n=3, cutoff=0)
                    raise InputError(f"ties: layer '{layer_id}' has no parameter '{path}'; the nearest are {', '.join(near) or 'none'}")
                first_id, first_path = self.first[name]
                if first_path not in leaves[first_id]:
                    continue  # reported in its place
                expected, found = leaves[first_id][first_path], leaves[layer_id][path]
                if (expected.shape, expected.dtype) != (found.shape, found.dtype):
                    raise InputError(
                        f"ties: {_words((layer_id, path))} is {describe(found)}, {_words((first_id, first_path))} is {describe(expected)}; "
                        "both must have the same shape and dtype"
                    )


def _checked(ties: Iterable[Tie], ids: Sequence[str]) -> list[Tie]:
    if isinstance(ties, (str, Mapping)) or not isinstance(ties, Iterable):
        raise InputError(f"ties: expected a list of jpipe.Tie, found {type(ties).__name__}")
    found = list(ties)
    for tie in found:
        if not isinstance(tie, Tie):
            raise InputError(f"ties: expected a jpipe.Tie, found {type(tie).__name__}; give Tie((layer id, path), (layer id, path))")
        for place in (tie.first, tie.second):
            if not isinstance(place, tuple) or len(place) != 2 or not all(isinstance(part, str) and part for part in place):
                raise InputError(f"ties: a place is (layer id, path), two non-empty strings, found {place!r}")
            if place[0] not in ids:
                raise InputError(f"ties: the model has no layer '{place[0]}'; {nearest(place[0], ids)}")
        if tie.first == tie.second:
            raise InputError(f"ties: {_words(tie.first)} is tied to itself")
    return found


def _words(place: tuple[str, str]) -> str:
    return f"'{place[1]}' of layer '{place[0]}'"


def _paths(tree: Tree) -> list[tuple[str, Any]]:
    """(path, leaf) of all leaves; None is a leaf here."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in found]


def _leaf(tree: Tree, path: str) -> Any:
    return dict(_paths(tree))[path]


def _replaced(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """The tree with other values at these paths."""
    if not values:
        return tree
    treedef = jax.tree.structure(tree, is_leaf=lambda leaf: leaf is None)
    return jax.tree.unflatten(treedef, [values.get(path, leaf) if path in values else leaf for path, leaf in _paths(tree)])
