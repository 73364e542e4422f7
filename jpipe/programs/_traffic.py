"""The arrival times of messages and sums, over links that may share ports."""

import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cache

from jpipe.programs._costs import Link, Network

_Port = list[tuple[float, float]]
"""From when to when it is busy, in order."""


class Traffic:
    """The transfers between ranks, in any order of time.

    Args:
        network: the link between any two ranks.
    """

    def __init__(self, network: Network) -> None:
        self._network = cache(network)
        self._ports: defaultdict[Hashable, _Port] = defaultdict(_Port)

    def send(self, source: int, to: int, ready: float, size: int) -> tuple[float, float, float]:
        """Return when a message of `size` bytes that can be sent from `ready` on begins, ends and arrives."""
        link = self._network(source, to)
        seconds = size / link.bandwidth
        end = self._occupy(link.ports or ((source, to),), ready, seconds)
        return end - seconds, end, end + link.latency

    def all_reduce(self, ranks: Sequence[int], ready: float, size: float) -> tuple[float, float, float]:
        """Return the same of a sum that can begin at `ready`; each rank sends `size` bytes to its neighbour in a ring."""
        ring: dict[tuple[int, int], Link] = {(rank, ranks[n - 1]): self._network(rank, ranks[n - 1]) for n, rank in enumerate(ranks)}
        ports = list(dict.fromkeys(port for pair, link in ring.items() for port in link.ports or (pair,)))
        seconds = size / min(link.bandwidth for link in ring.values())
        end = self._occupy(ports, ready, seconds)
        return end - seconds, end, end + 2 * (len(ranks) - 1) * max(link.latency for link in ring.values())

    def _occupy(self, names: Sequence[Hashable], ready: float, seconds: float) -> float:
        """Occupy the ports from the first time after `ready` at which all are free for `seconds`, and return the end."""
        if seconds == 0:
            return ready
        ports = [self._ports[name] for name in names]
        start, is_free = ready, False
        while not is_free:
            is_free = True
            for port in ports:
                place = max(bisect_right(port, (start, math.inf)) - 1, 0)
                while place < len(port) and port[place][0] < start + seconds:
                    if port[place][1] > start:
                        start, is_free = port[place][1], False
                    place += 1
        for port in ports:
            insort(port, (start, start + seconds))
        return start + seconds
