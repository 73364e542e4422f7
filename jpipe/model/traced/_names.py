"""The layers of a cut model: their ids and arrays, from the paths of parameters."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jpipe.model.traced._blocks import Path, common_beginning, is_numbered
from jpipe.model.traced._trace_model import Leaves


@dataclass(frozen=True)
class CutLayer:
    """One layer of a cut model."""

    id: str  # the id of the layer
    # the parameters that it reads, and parameters that no layer reads but that it keeps, in nested dicts with numbers in place of arrays
    params: dict[str, Any]
    state: dict[str, Any]  # the layer state that it reads or writes, in the same form

    def numbers(self) -> tuple[list[int], list[int]]:
        """Return the numbers of the layer's parameters and of its state, in the order of the leaves of these trees."""
        return jax.tree.leaves(self.params), jax.tree.leaves(self.state)


def paths_in(tree: Mapping[str, Any]) -> dict[int, str]:
    """Return the path of each number in `CutLayer.params` or `CutLayer.state`, joined by "/", in the order of the numbers."""
    return dict(sorted((number, "/".join(path)) for path, number in flatten_dict(tree).items()))


def _layer_ids(first_read: Sequence[Sequence[Path]], read: Sequence[Sequence[Path]], named: Mapping[int, str]) -> list[str]:
    """Return a unique id for each layer, or the id that the user chose in `named`.

    The id is the shortest unique prefix of the path of the largest parameter that the layer is the first to read. It includes the first
    number in the common path of all such parameters, as in "blocks.3".
    """
    owners: dict[Path, set[int]] = {}
    for number, paths in enumerate(first_read):
        for path in paths:
            for length in range(1, len(path) + 1):
                owners.setdefault(path[:length], set()).add(number)
    ids: list[str] = []
    for number, (first, everything) in enumerate(zip(first_read, read, strict=True)):
        path = (first or everything or [("layer",)])[0]
        lengths = range(1 + next((i for i, part in enumerate(_common(first)) if is_numbered(part)), 0), len(path) + 1)
        length = next((n for n in lengths if owners.get(path[:n]) == {number}), max(len(path) - 1, 1))
        ids.append(_unique(named.get(number, ".".join(path[:length])), {*ids, *named.values()} - {named.get(number)}))
    return ids


def _common(paths: Sequence[Path]) -> Path:
    """Return the common beginning of paths, without the last part."""
    return common_beginning([path[:-1] for path in paths])


def _with_numbers(path: Path) -> list[list[Any]]:
    """Return a path with parts that sort by the numbers in them: "Dense_9" before "Dense_10"."""
    return [[int(text) if i % 2 else text for i, text in enumerate(re.split(r"(\d+)", part))] for part in path]


def _unique(name: str, used: Iterable[str | None]) -> str:
    used, count, unique = set(used), 1, name
    while unique in used:
        count += 1
        unique = f"{name}_{count}"
    return unique


def parts_of(read: Sequence[set[int]], leaves: Leaves, named: Mapping[int, str]) -> tuple[CutLayer, ...]:
    """Return the layers, given the parameters and state that each one reads or writes, and the ids that the user chose."""
    is_param = [number < leaves.num_params for number in range(len(leaves.leaves))]
    sizes = [math.prod(shape) for shape in leaves.shapes]
    for number in range(len(leaves.leaves)):
        if not any(number in each for each in read):
            read[_nearest(number, read, leaves)].add(number)
    seen: set[int] = set()
    firsts, alls = [], []
    for each in read:
        params = sorted(
            (number for number in each if is_param[number]),
            key=lambda number: (-sizes[number], _with_numbers(leaves.paths[number]), number),
        )
        alls.append([leaves.paths[number] for number in params])
        firsts.append([leaves.paths[number] for number in params if number not in seen])
        seen.update(params)

    def tree(numbers: Sequence[int]) -> dict[str, Any]:
        """Return the numbers in nested dicts, by their paths without the common beginning."""
        begin = len(_common([leaves.paths[number] for number in numbers]))
        return unflatten_dict({leaves.paths[number][begin:]: number for number in numbers})

    return tuple(
        CutLayer(layer_id, *(tree([number for number in sorted(each) if is_param[number] == kind]) for kind in (True, False)))
        for layer_id, each in zip(_layer_ids(firsts, alls, named), read, strict=True)
    )


def _nearest(number: int, read: Sequence[set[int]], leaves: Leaves) -> int:
    """Return the layer with the parameter path closest to the path of a leaf that no layer reads."""
    path = leaves.paths[number]
    common = [max((len(common_beginning([path, leaves.paths[other]])) for other in each), default=0) for each in read]
    return common.index(max(common))
