"""Map the names of a model's parameters to names in another program's file, or in the whole model from which its layers were cut."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jpipe_train.checkpoint.sources.source import FLOATS, Names, Source, Spec

_NUMBER = re.compile(r"\{(\w+)\}")


def name_in_file(name: str, names: Mapping[str, str]) -> str:
    """Return the name in a file of a parameter such as "block_0/qkv/kernel".

    `names` maps the start of a name in the model to its start in the file; a start consists of whole parts between slashes. `{n}` stands
    for the same number in both, and an empty start matches every name. The first matching entry counts; names without a match stay.
    """
    for start, instead in names.items():
        pattern = "".join(rf"(?P<{part}>\d+)" if i % 2 else re.escape(part) for i, part in enumerate(_NUMBER.split(start.rstrip("/"))))
        if match := re.match(rf"{pattern}(?=/|$)" if pattern else "", name):
            begin = _NUMBER.sub(lambda number: match[number[1]], instead.rstrip("/"))
            return f"{begin}/{name[match.end() :].removeprefix('/')}".strip("/")
    return name


def renamed(source: Source, names: Mapping[str, str], wanted: list[str]) -> Source:
    """Return a source with the model's names in place of the file's names."""
    in_file = {name: name_in_file(name, names) for name in wanted}
    used = set(in_file.values())
    specs = {name: spec for name, spec in source.specs.items() if name not in used and name not in in_file}
    specs |= {name: source.specs[other] for name, other in in_file.items() if other in source.specs}

    def read(layers: Names) -> Iterator[dict[str, Any]]:
        for layer_id, inner in layers.items():
            arrays: dict[str, Any] = {}
            for part in source.read({layer_id: [in_file[name] for name in inner]}):
                arrays |= part
            yield {name: arrays[in_file[name]] for name in inner}

    return Source(source.where, specs, read, _digest_with(source, names), source.converts, source.optional, in_file)


Places = Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...]]]
"""For each name in an export, the array's path in the whole model, and the index and axes of its slice."""


def of_whole_model(source: Source, places: Mapping[str, Places], names: Mapping[str, str], separator: str) -> Source:
    """Convert a source with the paths of a whole model to one with the names of the layers at `places`, which were cut from it.

    Layer state and integers in the file are left out, because they are no parameters. A stack of layers is one array. The parts of a name
    in the file have this separator; `names` has slashes.
    """
    paths = {path for kind in places.values() for path, _, _ in kind.values()}
    in_file = {path: name_in_file(path, names).replace("/", separator) for path in paths}
    counts: dict[str, tuple[int, ...]] = {}  # the number of slices along each axis, by path
    for path, index, _ in places["params"].values():
        counts[path] = tuple(max(i + 1, count) for i, count in zip(index, counts.get(path, index), strict=True))

    def spec_of(name: str) -> Spec:
        path, _, axes = places["params"][name]
        stored = source.specs[in_file[path]]
        if len(stored.shape) <= max(axes, default=-1) or tuple(stored.shape[axis] for axis in axes) != counts[path]:
            return stored  # a model of another depth does not match
        return stored._replace(shape=tuple(size for axis, size in enumerate(stored.shape) if axis not in axes))

    used = set(in_file.values())
    specs = {name: spec for name, spec in source.specs.items() if name not in used and spec.dtype in FLOATS.values()}
    specs |= {name: spec_of(name) for name, (path, _, _) in places["params"].items() if in_file[path] in source.specs}

    def read(layers: Names) -> Iterator[dict[str, Any]]:
        wanted: dict[str, dict[str, list[str]]] = {}  # by the group that is read together, and the name in the file
        for layer_id, inner in layers.items():
            for name in inner:
                path, _, axes = places["params"][name]
                wanted.setdefault(path if axes else f"layer {layer_id}", {}).setdefault(in_file[path], []).append(name)
        for group, users in wanted.items():
            for arrays in source.read({group: list(users)}):
                yield {
                    name: _slice(arrays[stored], places["params"][name])
                    for stored in users.keys() & arrays.keys()
                    for name in users[stored]
                }

    return Source(
        source.where,
        specs,
        read,
        _digest_with(source, names),
        in_file={name: in_file[place[0]] for name, place in places["params"].items()},
    )


def _slice(array: Any, place: tuple[str, tuple[int, ...], tuple[int, ...]]) -> Any:
    _, index, axes = place
    position: list[Any] = [slice(None)] * array.ndim
    for axis, i in zip(axes, index, strict=True):
        position[axis] = i
    return array[tuple(position)] if axes else array


def _digest_with(source: Source, names: Mapping[str, str]) -> Callable[[], str]:
    return lambda: hashlib.sha256((source.digest() + json.dumps(names)).encode()).hexdigest()
