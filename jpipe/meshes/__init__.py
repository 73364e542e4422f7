"""The devices of each worker (one device or a mesh), and the sharding of its stage's arrays over a mesh."""

from jpipe.meshes._partition import shard_bytes
from jpipe.meshes._place import Place

__all__ = ["Place", "shard_bytes"]
