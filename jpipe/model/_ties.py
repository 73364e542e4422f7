"""Parameters that several layers share: one array in two or more places of the model."""

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from jpipe.errors import InputError, nearest
from jpipe.model._layer import describe
from jpipe.model._subset import EVERYTHING, Subset

Tree = Any


@dataclass(frozen=True)
class StageEntries:
    """The entries (see `Ties`) of the stages of a plan."""

    # a pair (stages, names of parameters) for each set of two or more stages that hold the same parameters
    groups: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
    # for each stage the entries that no earlier stage has; it counts these in sums that count each entry once
    counted: tuple[tuple[str, ...], ...]

    @property
    def in_several(self) -> list[str]:
        """The names of the parameters that two or more stages hold."""
        return [name for _, names in self.groups for name in names]

    def without(self, names: Iterable[str]) -> "StageEntries":
        """Return a copy without these parameters in the groups, because their gradients are not computed."""
        remaining = ((stages, tuple(name for name in group if name not in names)) for stages, group in self.groups)
        return StageEntries(tuple((stages, group) for stages, group in remaining if group), self.counted)


@dataclass(frozen=True)
class Tie:
    """One parameter in two places of the model, such as an embedding that is also the projection to logits.

    A place is (layer id, path): the keys from the layer's parameters to the array, joined by "/", as in "token/embedding". Several ties
    may have the same `first`.

    Attributes:
        first: the place where the parameter is initialized, trained, saved and exported.
        second: the place that also uses this parameter. The parameter that the layer initializes there is dropped.
    """

    first: tuple[str, str]
    second: tuple[str, str]


class Ties:
    """The ties of a model.

    Parameters, gradients and optimizer states are dicts by entry. There is an entry for each layer, with None in place of shared
    parameters, and an entry for each shared parameter, under its name.

    Args:
        ties: the ties of the user, an iterable of `Tie`.
        ids: the ids of all layers, in order.

    Raises:
        InputError: `ties` are not ties, name a layer that is not in the model, use one second place twice, or form a chain.
    """

    def __init__(self, ties: Any, ids: Sequence[str]) -> None:
        self.first: dict[str, tuple[str, str]] = {}  # the first place of each shared parameter, by name
        self.shared: dict[str, dict[str, str]] = {}  # by layer id: the names of its shared parameters, by path
        self._index = {layer_id: number for number, layer_id in enumerate(ids)}
        firsts, seconds = dict[tuple[str, str], str](), dict[tuple[str, str], str]()
        for tie in _checked(ties, ids):
            name = f"{tie.first[0]} shared {tie.first[1]}"
            if self.first.get(name, tie.first) != tie.first:
                raise InputError(f"ties: {_words(tie.first)} and {_words(self.first[name])} would both be named '{name}'; rename a layer")
            if name in self._index:
                raise InputError(f"ties: a layer has the name '{name}' of a tie; rename the layer")
            if tie.second in seconds:
                raise InputError(f"ties: {_words(tie.second)} is the second place of two ties; give each place once")
            firsts[tie.first], seconds[tie.second] = name, name
            self.first[name] = tie.first
            for layer_id, path in (tie.first, tie.second):
                self.shared.setdefault(layer_id, {})[path] = name
        for place in firsts:
            if place in seconds:
                raise InputError(
                    f"ties: {_words(place)} is the first place of one tie and the second of another; "
                    f"tie all of them to {_words(self.first[seconds[place]])}"
                )

    def names(self, ids: Iterable[str]) -> tuple[str, ...]:
        """Return the shared parameters that these layers use, in the order of their first use."""
        return tuple(dict.fromkeys(name for layer_id in ids for name in sorted(self.shared.get(layer_id, {}).values())))

    def entries(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Return the entries of these layers: the layer ids, with each shared parameter before the first layer that uses it."""
        entries: dict[str, None] = {}
        for layer_id in ids:
            entries |= dict.fromkeys((*self.names([layer_id]), layer_id))
        return tuple(entries)

    def sharers(self, ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return, for each parameter that two or more of these layers share, the layers that use it, by the name of the parameter."""
        users = {name: tuple(layer_id for layer_id in ids if name in self.shared.get(layer_id, {}).values()) for name in self.first}
        return {name: layers for name, layers in users.items() if len(layers) > 1}

    def in_stages(self, stages: Sequence[Sequence[str]]) -> StageEntries:
        """Return the entries of stages with these layers."""
        stages_of = {name: tuple(s for s, ids in enumerate(stages) if name in self.names(ids)) for name in self.first}
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, holders in stages_of.items():
            if len(holders) > 1:
                groups.setdefault(holders, []).append(name)
        counted = tuple(tuple(name for name in self.entries(ids) if stages_of.get(name, (s,))[0] == s) for s, ids in enumerate(stages))
        return StageEntries(tuple((holders, tuple(names)) for holders, names in groups.items()), counted)

    def split(self, params: Mapping[str, Tree], ids: Sequence[str] | None = None) -> dict[str, Tree]:
        """Split whole parameters of the layers `ids`, by default of all, into entries.

        `params` must have the layers with the first places of shared parameters, too, unless they are specs.
        """
        entries: dict[str, Tree] = {}
        for layer_id in params if ids is None else ids:
            for path, name in self.shared.get(layer_id, {}).items():
                place = self.first[name] if self.first[name][0] in params else (layer_id, path)
                entries.setdefault(name, _leaf(params[place[0]], place[1]))
            entries[layer_id] = _replaced(params[layer_id], dict.fromkeys(self.shared.get(layer_id, {})))
        return {name: entries[name] for name in self.entries(tuple(params if ids is None else ids))}

    def whole(self, layer_id: str, entries: Mapping[str, Tree]) -> Tree:
        """Return the parameters of a layer, including shared parameters, from the entries."""
        shared = self.shared.get(layer_id)
        if not shared:
            return entries[layer_id]
        return _replaced(entries[layer_id], {path: entries[name] for path, name in shared.items()})

    def in_layers(self, subset: Subset, entries: Mapping[str, Tree], ids: Iterable[str]) -> Subset:
        """Convert a subset of the leaves of entries to one of the leaves of whole layers; `entries` has their parameters or specs."""
        if subset.is_all:
            return subset
        by_layer, part = {}, subset.part(entries)
        for layer_id in ids:
            chosen = {path for path, leaf in _paths(self.whole(layer_id, part)) if leaf is not None}
            by_layer[layer_id] = tuple(path in chosen for path, leaf in _paths(self.whole(layer_id, entries)) if leaf is not None)
        return Subset({layer_id: leaves for layer_id, leaves in by_layer.items() if not all(leaves)})

    def by_place(self, params: Mapping[str, Tree]) -> Iterator[tuple[str, Tree]]:
        """Yield (entry, tree) pairs from whole layers; a shared parameter occurs once for each of its places."""
        for layer_id, tree in params.items():
            shared = self.shared.get(layer_id, {})
            for path, name in shared.items():
                yield name, _leaf(tree, path)
            yield layer_id, _replaced(tree, dict.fromkeys(shared))

    def parts(self, params: Mapping[str, Tree], trained: Subset = EVERYTHING) -> dict[str, dict[str, Tree]]:
        """Return each entry for an optimizer: its arrays in the structure of its layer, with masked nodes elsewhere.

        `params` is by layer id; parameters in second places are dropped. Masked nodes also replace parameters that are not in `trained`.
        """
        firsts = {place: name for name, place in self.first.items()}
        parts: dict[str, dict[str, Tree]] = {}
        for layer_id, tree in params.items():
            parts[layer_id] = {layer_id: _masked(tree, self.shared.get(layer_id, {}))}
            for path in self.shared.get(layer_id, {}):
                if (layer_id, path) in firsts:
                    parts[firsts[layer_id, path]] = {layer_id: _masked(tree, [other for other, _ in _paths(tree) if other != path])}
        for entry, flags in trained.chosen.items():
            leaves, treedef = jax.tree.flatten(parts.get(entry, {}))
            if leaves:
                masked = [leaf if is_trained else optax.MaskedNode() for leaf, is_trained in zip(leaves, flags, strict=True)]
                parts[entry] = jax.tree.unflatten(treedef, masked)
        return parts

    def without_seconds(self, params: Mapping[str, Tree]) -> dict[str, Tree]:
        """Return parameters by layer id, with masked nodes in second places."""
        firsts = set(self.first.values())
        return {
            layer_id: _masked(tree, [path for path in self.shared.get(layer_id, {}) if (layer_id, path) not in firsts])
            for layer_id, tree in params.items()
        }

    def check(self, params: Mapping[str, Tree]) -> None:
        """Check that ties fit the specs of all layers' parameters."""
        leaves = {layer_id: dict(_paths(params[layer_id])) for layer_id in self.shared}
        for layer_id, shared in self.shared.items():
            times = Counter(path for path, _ in _paths(params[layer_id]))
            for path in shared:
                if times[path] > 1:
                    raise InputError(f"ties: layer '{layer_id}' has {times[path]} parameters '{path}'; rename all but one")
        for layer_id, shared in self.shared.items():
            for path, name in shared.items():
                if path not in leaves[layer_id]:
                    if "" in leaves[layer_id]:
                        raise InputError(f"ties: the parameters of layer '{layer_id}' are one array, which has no path; put it into a dict")
                    near = difflib.get_close_matches(path, leaves[layer_id], n=3, cutoff=0)
                    raise InputError(f"ties: layer '{layer_id}' has no parameter '{path}'; the nearest are {', '.join(near) or 'none'}")
                first_id, first_path = self.first[name]
                if first_path not in leaves[first_id]:
                    continue  # another iteration reports the missing first place
                first, second = leaves[first_id][first_path], leaves[layer_id][path]
                if (first.shape, first.dtype) != (second.shape, second.dtype):
                    raise InputError(
                        f"ties: {_words((layer_id, path))} is {describe(second)}, {_words((first_id, first_path))} is {describe(first)}; "
                        "both must have the same shape and dtype"
                    )

    def with_firsts(self, params: Mapping[str, Tree]) -> dict[str, Tree]:
        """Copy the values of first places to all places of a tie, and return the parameters by layer id."""
        return {
            layer_id: _replaced(
                tree, {path: _leaf(params[self.first[name][0]], self.first[name][1]) for path, name in self.shared[layer_id].items()}
            )
            if layer_id in self.shared
            else tree
            for layer_id, tree in params.items()
        }

    def check_values(self, params: Mapping[str, Tree]) -> None:
        """Check that parameters that the user passes, or specs for missing ones, have the same values in all places of a tie."""
        for layer_id, shared in self.shared.items():
            for path, name in shared.items():
                value, first = _leaf(params[layer_id], path), _leaf(params[self.first[name][0]], self.first[name][1])
                if isinstance(value, jax.ShapeDtypeStruct):
                    continue
                where = f"params: {_words((layer_id, path))} is {_words(self.first[name])} (they are tied)"
                if isinstance(first, jax.ShapeDtypeStruct):
                    raise InputError(f"{where}, which has no values; give the values there")
                if np.asarray(value).tobytes() != np.asarray(first).tobytes():
                    raise InputError(f"{where}, but has other values; give the same values, or leave out {_words((layer_id, path))}")


def _checked(ties: Any, ids: Sequence[str]) -> list[Tie]:
    if isinstance(ties, (str, Mapping)) or not isinstance(ties, Iterable):
        raise InputError(where="ties", expected="a list of jpipe.Tie", found=type(ties).__name__)
    all_ties = list(ties)
    for tie in all_ties:
        if not isinstance(tie, Tie):
            raise InputError(f"ties: expected a jpipe.Tie, found {type(tie).__name__}; give Tie((layer id, path), (layer id, path))")
        for place in (tie.first, tie.second):
            if not isinstance(place, tuple) or len(place) != 2 or not all(isinstance(part, str) and part for part in place):
                raise InputError(f"ties: a place is (layer id, path), two non-empty strings, found {place!r}")
            if place[0] not in ids:
                raise InputError(f"ties: the model has no layer '{place[0]}'; {nearest(place[0], ids)}")
        if tie.first == tie.second:
            raise InputError(f"ties: {_words(tie.first)} is tied to itself")
    return all_ties


def _words(place: tuple[str, str]) -> str:
    return f"'{place[1]}' of layer '{place[0]}'"


def _paths(tree: Tree) -> list[tuple[str, Any]]:
    """Return the (path, leaf) of each leaf; None counts as a leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _masked(tree: Tree, paths: Iterable[str]) -> Tree:
    """Replace the values at these paths with `optax.MaskedNode()`, which holds no arrays."""
    return _replaced(tree, {path: optax.MaskedNode() for path in paths})


def _leaf(tree: Tree, path: str) -> Any:
    return dict(_paths(tree))[path]


def _replaced(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """Replace the values at the paths of `values`."""
    if not values:
        return tree
    treedef = jax.tree.structure(tree, is_leaf=lambda leaf: leaf is None)
    return jax.tree.unflatten(treedef, [values.get(path, leaf) for path, leaf in _paths(tree)])


NO_TIES = Ties((), ())


# The tree of a whole model --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelTree:
    """The tree of parameters of a whole model that was cut into layers."""

    structures: tuple[Any, ...]  # the possible structures of this tree, all with the same leaves in the same order
    shapes: tuple[tuple[int, ...], ...]  # the shapes of the leaves
    # for each layer id a tree like the layer's parameters, with a `Leaf` in place of each array, which names a leaf or slice of the whole
    # tree
    layers: Mapping[str, Tree]

    def axes(self) -> dict[int, tuple[int, ...]]:
        """Return, by number of the leaf, the axes along which stacked leaves are split into slices."""
        return {place.number: place.axes for place in jax.tree.leaves(dict(self.layers)) if place.axes}
