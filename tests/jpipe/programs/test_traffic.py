"""Messages and sums over shared ports: each port carries one at a time, from the first time at which all ports of a message are free."""

import dataclasses
import random

import pytest

import jpipe
from jpipe import Link
from jpipe.programs._traffic import Traffic


class PortByPort:
    """The rule for each port by itself: a message begins as early as it can, between or after those that came before it."""

    def __init__(self):
        self.busy = []  # (port, start, end)

    def send(self, ports, ready, seconds):
        taken = [(start, end) for port, start, end in self.busy if port in ports]
        starts = [ready, *(end for _, end in taken if end > ready)]
        start = min(one for one in starts if all(end <= one or begin >= one + seconds for begin, end in taken))
        self.busy += [(port, start, start + seconds) for port in ports]
        return start + seconds


@pytest.mark.parametrize("per_server", [1, 2])
def test_each_port_carries_one_message_at_a_time(per_server):
    def link(source, target):
        return Link(bandwidth=1.0, latency=0.0, ports=(("out", source // per_server), ("in", target // per_server)))

    for seed in range(40):
        draw, traffic, rule = random.Random(seed), Traffic(link), PortByPort()
        for _ in range(40):
            ranks, ready, seconds = draw.sample(range(6), draw.choice([2, 2, 3, 6])), draw.randrange(40), draw.randint(1, 4)
            ring = [*zip(ranks, ranks[-1:] + ranks[:-1], strict=True)] if len(ranks) > 2 else [tuple(ranks)]
            ports = {port for pair in ring for port in link(*pair).ports}
            used, lasts, _ = traffic.ring(ranks, seconds) if len(ranks) > 2 else traffic.link(*ranks, seconds)
            assert traffic.occupy(used, ready, lasts) == rule.send(ports, ready, seconds)


def test_what_all_replicas_send_to_a_compressed_sum_is_held_together():
    plan = jpipe.Plan.even("a", 1, "gpipe", 2, replicas=2, links={"sums": "int8"})
    cost = jpipe.programs.StageCost(weights=1, accumulators=4)
    peaks = [jpipe.simulate(jpipe.lower(plan, 1), [dataclasses.replace(cost, gathered=(sent,))]).peak_bytes for sent in (100, 101)]
    assert peaks[0] == (205, 205)  # weights, accumulators, and 100 from each of two
    assert peaks[1] == (207, 207)
