"""The arrival times of messages and sums, over links that may share ports."""

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from functools import cache

from jpipe.programs._costs import Network


class _Ports:
    """A group of ports that have been busy at exactly the same times.

    Attributes:
        starts: the times at which the ports begin to be busy, ascending.
        ends: the times at which they are free again, in the same order.
        count: the number of ports.
    """

    __slots__ = ("count", "ends", "starts")

    def __init__(self, like: "_Ports | None", count: int) -> None:
        self.starts: list[float] = [*like.starts] if like else []
        self.ends: list[float] = [*like.ends] if like else []
        self.count = count


class Traffic:
    """The times at which ports are busy; transfers may be added in any order of time.

    Args:
        network: the link between any two ranks.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._route, self._ring = cache(self._find_route), cache(self._find_ring)
        self._numbers: dict[Hashable, int] = {}  # the number of each port, by its name
        self._ports: dict[int, _Ports] = {}
        self._divided = 0  # how often a group of ports has been divided
        # the results of `_together`, each with the value of `_divided` at that time
        self._known: dict[tuple[int, ...], tuple[int, list[_Ports]]] = {}

    def link(self, source: int, to: int, size: float) -> tuple[tuple[int, ...], float, float]:
        """Return the ports of a link, the seconds for which a message of `size` bytes occupies them, and the latency after that."""
        ports, bandwidth, latency = self._route(source, to)
        return ports, size / bandwidth, latency

    def ring(self, ranks: Sequence[int], size: float, rounds: int = 2) -> tuple[tuple[int, ...], float, float]:
        """Return the ports, the seconds and the latency of a sum: each rank sends `size` bytes to its neighbour in a ring.

        Data goes around the ring `rounds` times, each time with the latency of all links except one.
        """
        ports, bandwidth, latency = self._ring(tuple(ranks))
        return ports, size / bandwidth, rounds * (len(ranks) - 1) * latency

    def _find_route(self, source: int, to: int) -> tuple[tuple[int, ...], float, float]:
        """Return the ports of a link, its bandwidth and its latency."""
        link = self._network(source, to)
        return self._numbered(link.ports or ((source, to),)), link.bandwidth, link.latency

    def _numbered(self, names: Iterable[Hashable]) -> tuple[int, ...]:
        """Return the numbers of ports, without repetitions."""
        return tuple(dict.fromkeys(self._numbers.setdefault(name, len(self._numbers)) for name in names))

    def _find_ring(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], float, float]:
        """Return the ports of a ring, the smallest bandwidth of its links, and their largest latency."""
        ring = [self._route(rank, ranks[n - 1]) for n, rank in enumerate(ranks)]
        ports = tuple(dict.fromkeys(port for link_ports, _, _ in ring for port in link_ports))
        return ports, min(bandwidth for _, bandwidth, _ in ring), max(latency for _, _, latency in ring)

    def occupy(self, numbers: tuple[int, ...], ready: float, seconds: float) -> float:
        """Occupy the ports for `seconds`, from the first time after `ready` at which all are free for that long, and return the end."""
        if seconds == 0:
            return ready
        known = self._known.get(numbers)
        together = known[1] if known is not None and known[0] == self._divided else self._together(numbers)
        start, before = ready, math.inf
        while start != before:
            before = start
            for ports in together:
                starts, ends = ports.starts, ports.ends
                if not ends or ends[-1] <= start:
                    continue
                place = bisect_right(ends, start)
                while place < len(starts) and starts[place] < start + seconds:
                    start = ends[place]
                    place += 1
        end = start + seconds
        for ports in together:
            starts, ends = ports.starts, ports.ends
            place = len(ends) if not ends or ends[-1] <= start else bisect_right(starts, start)
            starts.insert(place, start)
            ends.insert(place, end)
        return end

    def _together(self, numbers: tuple[int, ...]) -> list[_Ports]:
        """Return the ports as groups that have been busy at the same times: a large sum has thousands of ports, but few groups."""
        groups: dict[_Ports | None, list[int]] = {}
        for number in numbers:
            groups.setdefault(self._ports.get(number), []).append(number)
        together = []
        for ports, members in groups.items():
            if ports is None or len(members) < ports.count:
                if ports is not None:
                    ports.count -= len(members)
                    self._divided += 1
                ports = _Ports(ports, len(members))
                self._ports.update(dict.fromkeys(members, ports))
            together.append(ports)
        self._known[numbers] = self._divided, together
        return together
