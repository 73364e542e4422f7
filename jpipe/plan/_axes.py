"""The axes of meshes and of arrays in a plan: their types, and the rules by which arrays are sharded."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import pydantic

from jpipe._frozen import FrozenMapping
from jpipe._numbers import is_int
from jpipe.errors import short

if TYPE_CHECKING:
    import jpipe

RULES: Mapping[str, str | None] = {
    "batch": "data",
    "embed": None,
    "mlp": "model",
    "heads": "model",
    "kv_heads": "model",
    "expert": "expert",
    "vocab": "model",
}
"""For each logical axis, the mesh axis over which it is sharded, or None. `Plan.rules` adds to these rules and overrides them."""


def _mesh(value: Any) -> FrozenMapping[int]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected axes and sizes such as {{'data': 2, 'model': 4}}, found {short(value)}")
    for axis, size in value.items():
        if not isinstance(axis, str) or not axis.isidentifier():
            raise ValueError(f"expected the name of an axis, such as 'model', found {short(axis)}")
        if not is_int(size) or not 1 <= size <= 65536:
            raise ValueError(f"expected a size of 1 to 65536 for the axis '{axis}', found {short(size)}")
    return FrozenMapping({axis: int(size) for axis, size in value.items()})


def _rules(value: Any) -> FrozenMapping[str | None]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected axes of meshes by logical axis, such as {{'mlp': 'model'}}, found {short(value)}")
    for name, axis in value.items():
        if not isinstance(name, str) or not (axis is None or isinstance(axis, str)):
            raise ValueError(f"expected the axis of a mesh or None for {short(name)}, found {short(axis)}")
    return FrozenMapping(value)


def _param_axes(value: Any) -> FrozenMapping[tuple[str | None, ...]]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected logical axes by pattern, such as {{'*/kernel': ['embed', 'mlp']}}, found {short(value)}")
    for pattern, axes in value.items():
        fits = isinstance(axes, (list, tuple)) and all(axis is None or isinstance(axis, str) for axis in axes)
        if not isinstance(pattern, str) or not fits:
            raise ValueError(f"expected a list of a logical axis or None for each dim of {short(pattern)}, found {short(axes)}")
    return FrozenMapping({pattern: tuple(axes) for pattern, axes in value.items()})


def _lists(axes: Mapping[str, tuple[str | None, ...]]) -> dict[str, list[str | None]]:
    return {pattern: list(names) for pattern, names in axes.items()}


Mesh = Annotated[FrozenMapping[int], pydantic.PlainValidator(_mesh), pydantic.PlainSerializer(dict)]
"""The sizes of a mesh's axes, by axis name."""

Rules = Annotated[FrozenMapping[str | None], pydantic.PlainValidator(_rules), pydantic.PlainSerializer(dict)]
"""For each logical axis the axis of a mesh, or None."""

ParamAxes = Annotated[FrozenMapping[tuple[str | None, ...]], pydantic.PlainValidator(_param_axes), pydantic.PlainSerializer(_lists)]
"""For each pattern of parameters a logical axis or None for each dim."""


def mesh_rules(plan: "jpipe.Plan") -> dict[str, str | None]:
    """Return the mesh axis, or None, of each logical axis: `RULES` updated with the rules of the plan."""
    return {**RULES, **plan.rules}
