"""Sums of gradients in parts along the layers. Each part begins while the backwards of earlier layers are computed.

The parts of a stage are cut so that its sum ends as early as possible after the backward. If more parts gain almost nothing, fewer are
chosen, because each part is compiled separately and has the latency of a sum.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

import jpipe
from jpipe_planner.cost.links import find_links, ring_share
from jpipe_planner.cost.shape import hidden_passes
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.search.candidate import Candidate

GAIN = 0.002  # a smaller relative gain per batch is not worth parts, or more parts
MOST_PARTS = 8


def with_sum_parts(candidate: Candidate, profile: Profile, topology: Topology) -> Candidate | None:
    """Return a plan with stages that sum their gradients in parts where other work waits for the sums; None if no stage gains time.

    The plan has one stage on each rank. Profile and topology are of its meshes. Parts save time only if sums overlap with computations.
    """
    if (
        topology.device.overlap != "transfers and sums"
        or max(candidate.replicas) == 1
        or candidate.agree is not None
        or candidate.slices is not None
    ):
        return None
    plan = dataclasses.replace(candidate, sum_parts=()).plan(profile.ids)
    layers, rules, stages = profile.costs(candidate.rows), jpipe.schedules.SCHEDULES[plan.schedule], range(plan.depth)
    passes = [cost.forward + cost.backward for cost in profile.stage_costs(plan, candidate.rows)]
    if rules.flushes:  # the last backwards and the next forwards of earlier stages hide a sum
        hidden = [sum(passes[:s]) for s in stages]
    else:  # the computations with older weights hide a sum
        hidden = [passes[s] * hidden_passes(candidate.shape, s, rules.in_flight(candidate.shape, s)) for s in stages]
    rings = find_links(topology.ordered(candidate.placed_on), candidate.replicas, candidate.keep_together).rings
    parts: list[tuple[int, ...]] = [()] * plan.depth
    for s, stage in enumerate(plan.stages):
        if stage.replicas > 1:
            costs = [layers[layer_id] for layer_id in stage.layers]
            per_byte, fixed = ring_share(stage.replicas) / rings[s].bandwidth, 2 * (stage.replicas - 1) * rings[s].latency
            least = GAIN * candidate.seconds / plan.updates_per_batch(s)
            parts[s] = cut_sum([cost.backward for cost in costs], [per_byte * cost.summed for cost in costs], fixed, hidden[s], least)
    return dataclasses.replace(candidate, sum_parts=tuple(parts)) if any(parts) else None


def cut_sum(backward: Sequence[float], sending: Sequence[float], fixed: float, hidden: float, least: float) -> tuple[int, ...]:
    """Return how many layers each part of a sum has, in the order of the layers; () if parts do not gain `least` seconds.

    Each layer has a `backward` and its gradients take `sending` seconds. Each part takes `fixed` seconds more. For `hidden` seconds after
    the backward no other work waits for the sum.
    """
    count = len(backward)
    ends = np.concatenate([[0.0], np.cumsum(backward[::-1])])  # when the backwards end, from the last layer to the first
    sent = np.concatenate([[0.0], np.cumsum(sending[::-1])])
    before = np.tri(count + 1, k=-1, dtype=bool)  # whether a part can begin at a layer and end at another one
    enough = ends[-1] + hidden
    summed, begins = [ends + sent + fixed], list[Any]()  # when sums of 1, 2, ... parts end, by the number of layers
    while len(summed) < min(MOST_PARTS, count) and summed[-1][-1] > enough:
        # a part begins when its backward has ended and the links are free
        times = np.maximum(summed[-1][None, :], ends[:, None]) + sent[:, None] - sent[None, :] + fixed
        times = np.where(before & (sent[None, :] > 0), times, np.inf)
        begins.append(times.argmin(1))
        summed.append(times.min(1))
    best = max(min(times[-1] for times in summed), enough)
    number = next(n for n, times in enumerate(summed) if times[-1] <= best + least)
    cuts = [count]
    for begin in begins[:number][::-1]:
        cuts.append(int(begin[cuts[-1]]))
    return tuple(b - a for a, b in zip([*cuts[1:], 0], cuts, strict=True)) if number else ()
