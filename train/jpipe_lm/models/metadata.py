"""The metadata of parameters."""

from typing import Any


def named(*names: str | None) -> dict[str, Any]:
    """Return metadata that name the logical axis of each dimension of a parameter, or None. They place the parameter on a mesh."""
    return {"out_sharding": names, "eager_sharding": False}  # if eager_sharding were true, Flax would require a mesh
