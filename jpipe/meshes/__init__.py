"""The devices of each worker, one or a mesh, and the sharding of its stage's arrays over them."""

from jpipe.meshes._partition import shard_bytes
from jpipe.meshes._place import Place

__all__ = ["Place", "shard_bytes"]
