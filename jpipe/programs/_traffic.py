"""The arrival times of messages and sums, over links that may share ports."""

import math
from bisect import bisect_right, insort
from collections.abc import Hashable, Sequence
from functools import cache

from jpipe.programs._costs import Link, Network


class _Ports:
    """Ports that have been busy at the same times.

    Attributes:
        busy: from when to when they are busy, in order.
        count: the number of ports.
    """

    __slots__ = ("busy", "count")

    def __init__(self, busy: Sequence[tuple[float, float]], count: int) -> None:
        self.busy, self.count = list(busy), count


class Traffic:
    """The transfers between ranks, in any order of time.

    Args:
        network: the link between any two ranks.
    """

    def __init__(self, network: Network) -> None:
        self._network = cache(network)
        self._ring = cache(self._find_ring)
        self._ports: dict[Hashable, _Ports] = {}
        self._divided = 0  # how often ports that were together have been divided
        self._known: dict[tuple[Hashable, ...], tuple[int, list[_Ports]]] = {}  # what `_together` has found, and `_divided` then

    def send(self, source: int, to: int, ready: float, size: int) -> tuple[float, float, float]:
        """Return when a message of `size` bytes that can be sent from `ready` on begins, ends and arrives."""
        link = self._network(source, to)
        seconds = size / link.bandwidth
        end = self._occupy(tuple(link.ports) or ((source, to),), ready, seconds)
        return end - seconds, end, end + link.latency

    def all_reduce(self, ranks: Sequence[int], ready: float, size: float, rounds: int = 2) -> tuple[float, float, float]:
        """Return the same of a sum that can begin at `ready`; each rank sends `size` bytes to its neighbour in a ring.

        `rounds` is how often something goes all the way around, each time with the latency of all links but one.
        """
        ports, bandwidth, latency = self._ring(tuple(ranks))
        seconds = size / bandwidth
        end = self._occupy(ports, ready, seconds)
        return end - seconds, end, end + rounds * (len(ranks) - 1) * latency

    def _find_ring(self, ranks: tuple[int, ...]) -> tuple[tuple[Hashable, ...], float, float]:
        """Return the ports of a ring, its smallest bandwidth and its largest latency."""
        ring: dict[tuple[int, int], Link] = {(rank, ranks[n - 1]): self._network(rank, ranks[n - 1]) for n, rank in enumerate(ranks)}
        ports = tuple(dict.fromkeys(port for pair, link in ring.items() for port in link.ports or (pair,)))
        return ports, min(link.bandwidth for link in ring.values()), max(link.latency for link in ring.values())

    def _occupy(self, names: tuple[Hashable, ...], ready: float, seconds: float) -> float:
        """Occupy the ports from the first time after `ready` at which all are free for `seconds`, and return the end."""
        if seconds == 0:
            return ready
        together = self._together(names)
        start, is_free = ready, False
        while not is_free:
            is_free = True
            for ports in together:
                busy = ports.busy
                place = max(bisect_right(busy, (start, math.inf)) - 1, 0)
                while place < len(busy) and busy[place][0] < start + seconds:
                    if busy[place][1] > start:
                        start, is_free = busy[place][1], False
                    place += 1
        for ports in together:
            insort(ports.busy, (start, start + seconds))
        return start + seconds

    def _together(self, names: tuple[Hashable, ...]) -> list[_Ports]:
        """Return the ports in groups that have been busy at the same times; the thousands of a large sum are few groups."""
        divided, together = self._known.get(names, (-1, []))
        if divided == self._divided:
            return together
        groups: dict[_Ports | None, list[Hashable]] = {}
        for name in dict.fromkeys(names):
            groups.setdefault(self._ports.get(name), []).append(name)
        together = []
        for ports, members in groups.items():
            if ports is None or len(members) < ports.count:
                if ports is not None:
                    ports.count -= len(members)
                    self._divided += 1
                ports = _Ports(ports.busy if ports else (), len(members))
                self._ports.update(dict.fromkeys(members, ports))
            together.append(ports)
        self._known[names] = self._divided, together
        return together
