"""The names of a model's parameters in a file of another program."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jpipe_train.checkpoint.source import Names, Source

_NUMBER = re.compile(r"\{(\w+)\}")


def name_in_file(name: str, names: Mapping[str, str]) -> str:
    """Return what a parameter is called in a file.

    Args:
        name: in the model, such as "block_0/qkv/kernel".
        names: by the start of a name in the model, of whole parts between slashes, the start in the file. `{n}` stands for a number, the
            same in both, and an empty start fits every name. The first entry that fits counts; other names stay.
    """
    for start, instead in names.items():
        pattern = "".join(rf"(?P<{part}>\d+)" if i % 2 else re.escape(part) for i, part in enumerate(_NUMBER.split(start.rstrip("/"))))
        if match := re.match(rf"{pattern}(?=/|$)" if pattern else "", name):
            begin = _NUMBER.sub(lambda number: match[number[1]], instead.rstrip("/"))
            return f"{begin}/{name[match.end() :].removeprefix('/')}".strip("/")
    return name


def renamed(source: Source, names: Mapping[str, str], wanted: list[str]) -> Source:
    """Return a source with the names of the model in place of those of the file.

    Args:
        source: the arrays in the file.
        names: as in `name_in_file`.
        wanted: the names in the model.
    """
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

    def digest() -> str:
        return hashlib.sha256((source.digest() + json.dumps(names)).encode()).hexdigest()

    return Source(source.where, specs, read, digest, source.converts, source.optional, in_file)
