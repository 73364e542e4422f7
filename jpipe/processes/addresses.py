"""The addresses at which the processes of a run listen: loopback addresses if they suffice, otherwise all networks of a host."""

import ipaddress
import secrets
import socket

__all__ = [
    "is_loopback",
    "listen_everywhere",
    "private_loopback",
]


def is_loopback(host: str) -> bool:
    """Return whether `host` is `localhost` or a loopback address, which only this machine can reach. Other names are not resolved."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def private_loopback() -> str:
    """Choose a loopback address for this process alone, if the system has more than one; otherwise return 127.0.0.1.

    A program that tries the ports of 127.0.0.1, as scanners do, does not find listeners at this address.
    """
    address = str(ipaddress.IPv4Address("127.0.0.0") + 2 + secrets.randbelow(2**24 - 4))
    try:
        with socket.create_server((address, 0)):
            return address
    except OSError:  # macOS has only 127.0.0.1
        return "127.0.0.1"


def listen_everywhere(port: int = 0) -> socket.socket:
    """Open a socket that listens on all networks, with both IPv4 and IPv6 if the system has both.

    Args:
        port: the port; 0 for a free port.

    Raises:
        OSError: the port is in use.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
