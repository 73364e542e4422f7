"""At which addresses the processes of a run listen: at a loopback address where that will do, or on all networks of a host."""

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that host, given as an address or `localhost`; other names may mean other hosts elsewhere."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_everywhere(port: int = 0) -> socket.socket:
    """A socket that listens on all networks, IPv4 and IPv6 where there is both.

    Args:
        port: 0 for a free one.

    Raises:
        OSError: the port is in use.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
