"""The metadata of parameters."""

from typing import Any


def named(*names: str | None) -> dict[str, Any]:
    """Return metadata with the logical axis, or None, of each dim of a parameter, to place it on a mesh."""
    return {"out_sharding": names, "eager_sharding": False}  # eager_sharding: with it Flax would require a mesh
