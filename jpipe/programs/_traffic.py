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

    def send(self, source: int, to: int, ready: float, size: int) -> float:
        """Return when a message of `size` bytes arrives that can be sent from `ready` on."""
        link = self._network(source, to)
        return self._occupy(link.ports or ((source, to),), ready, size / link.bandwidth) + link.latency

    def all_reduce(self, ranks: Sequence[int], ready: float, size: float) -> float:
        """Return when a sum that can begin at `ready` ends; each rank sends `size` bytes to its neighbour in a ring."""
        ring: dict[tuple[int, int], Link] = {(rank, ranks[n - 1]): self._network(rank, ranks[n - 1]) for n, rank in enumerate(ranks)}
        ports = list(dict.fromkeys(port for pair, link in ring.items() for port in link.ports or (pair,)))
        sent = self._occupy(ports, ready, size / min(link.bandwidth for link in ring.values()))
        return sent + 2 * (len(ranks) - 1) * max(link.latency for link in ring.values())

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
