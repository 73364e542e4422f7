from . import addresses, handshake, jax_internals
from ._collectives import Group
from ._connections import Connection, Handover, Reduction
from ._membership import Processes

__all__ = ["Connection", "Group", "Handover", "Processes", "Reduction", "addresses", "handshake", "jax_internals"]
