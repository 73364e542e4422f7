from . import handshake, jax_internals
from ._collectives import Group
from ._connections import Connection, DevicePutConnection, Reduction
from ._membership import Processes
from ._rendezvous import Address, NotConnected, Rendezvous

__all__ = [
    "Address",
    "Connection",
    "DevicePutConnection",
    "Group",
    "NotConnected",
    "Processes",
    "Reduction",
    "Rendezvous",
    "handshake",
    "jax_internals",
]
