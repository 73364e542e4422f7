"""The addresses at which the processes of a run listen: loopback where that suffices, or all networks of a host."""

import ipaddress
import secrets
import socket

__all__ = [
    "is_loopback",
    "listen_everywhere",
    "private_loopback",
]


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host, an address or `localhost`; other names may mean other hosts elsewhere."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def private_loopback() -> str:
    """Choose a loopback address for this process alone, where the system has more than one; 127.0.0.1 elsewhere.

    A program that tries the ports of 127.0.0.1, as scanners do, does not find the listeners there.
    """
    address = str(ipaddress.IPv4Address("127.0.0.0") + 2 + secrets.randbelow(2**24 - 4))
    try:
        with socket.create_server((address, 0)):
            return address
    except OSError:  # macOS has 127.0.0.1 only
        return "127.0.0.1"


def listen_everywhere(port: int = 0) -> socket.socket:
    """Open a socket that listens on all networks, IPv4 and IPv6 where both exist.

    Args:
        port: 0 for a free one.

    Raises:
        OSError: the port is in use.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
