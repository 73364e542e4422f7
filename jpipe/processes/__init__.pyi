from . import addresses, handshake, jax_internals
from ._collectives import Group
from ._connections import Connection, Handover, Reduction
from ._membership import Processes
from ._rendezvous import Address, NotConnected, Rendezvous

__all__ = [
    "Address",
    "Connection",
    "Group",
    "Handover",
    "NotConnected",
    "Processes",
    "Reduction",
    "Rendezvous",
    "addresses",
    "handshake",
    "jax_internals",
]
