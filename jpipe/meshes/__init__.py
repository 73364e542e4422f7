"""The devices of a worker, one or a mesh of several, and how the arrays of its stage are sharded over them."""

from jpipe.meshes._partition import shard_bytes
from jpipe.meshes._place import Place

__all__ = ["Place", "shard_bytes"]
