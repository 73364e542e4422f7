"""Stages whose busiest device has least to do, on devices with equal links.

The closed forms of a pipeline count each cut by itself. But a device sends the activations of one cut, the gradients of another one and its
part of a sum through one port. Where links are slow, other stages are fastest then.
"""

import dataclasses
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np

import jpipe
from jpipe.plan import repeats_forward
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.search.candidate import Candidate

_MOST_WORK = 1e8  # numbers to compare, which take about a second
_MOST_DEPTH = 32
_INFINITE = float("inf")


def least_loaded(candidate: Candidate, profile: Profile, topology: Topology) -> Iterator[Candidate]:
    """Yield for each number of stages, 2 or more, the plan whose busiest device has least to do, the best one first.

    They have the schedule and the microbatches of the candidate, and as many devices. There are none for schedules that flush, for
    pipelines that agree, for links of several kinds, and for too many layers and devices.

    Args:
        candidate: a plan of one stage on each rank.
        profile: the profile of its layers.
        topology: the devices.
    """
    bandwidths, flushes = (
        {level.bandwidth for level in topology.levels if level.count > 1},
        jpipe.schedules.SCHEDULES[candidate.schedule].flushes,
    )
    if flushes or candidate.agree is not None or candidate.options.update_every != "batch" or len(bandwidths) != 1 or topology.differing:
        return
    counts = [count for count in range(1, candidate.num_ranks + 1) if candidate.microbatches % count == 0]
    layers, depth = len(profile.ids), min(len(profile.ids), candidate.num_ranks, _MOST_DEPTH)
    if layers**2 * candidate.num_ranks * depth * len(counts) > _MOST_WORK:
        return
    loads = {count: _loads(candidate, profile, count, min(bandwidths)) for count in counts}
    for _, starts, replicas in sorted(_best_stages(loads, layers, candidate.num_ranks, depth)):
        policies = candidate.policies[:1] * len(starts)
        yield dataclasses.replace(candidate, starts=starts, replicas=replicas, policies=policies, keep_together="replicas", sum_parts=())


def _loads(candidate: Candidate, profile: Profile, replicas: int, bandwidth: float) -> Any:
    """Return for each range of layers the seconds that one of some replicas computes or sends in a batch; infinity if it is empty."""
    costs, each = list(profile.costs(candidate.rows).values()), candidate.microbatches / replicas
    again = float(repeats_forward(candidate.policies[0]))
    work, updates, summed = (
        np.array([0.0, *accumulate(values)])
        for values in (
            [(1 + again) * cost.forward + cost.backward for cost in costs],
            [cost.update for cost in costs],
            [float(cost.summed) for cost in costs],
        )
    )
    crossing = np.array([0.0, *(cost.outputs for cost in costs[:-1]), 0.0])  # at the beginning of each layer, and at the end
    computes = work[None, :] - work[:, None] + 2 * profile.dispatch
    sends = 2 * (replicas - 1) / replicas * (summed[None, :] - summed[:, None]) / bandwidth
    loads = each * computes + updates[None, :] - updates[:, None]
    loads = np.maximum(loads, each * (crossing[None, :] + crossing[:, None]) / bandwidth + sends)
    return np.where(np.tri(len(costs) + 1, dtype=bool).T & ~np.eye(len(costs) + 1, dtype=bool), loads, _INFINITE)


def _best_stages(loads: dict[int, Any], layers: int, devices: int, depth: int) -> Iterator[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """Yield for each number of stages from 2 on the smallest load of the busiest device, the first layers of the stages, and replicas."""
    best = np.full((devices + 1, layers + 1), _INFINITE)  # by the devices and the layers that the stages so far have
    best[0, 0] = 0.0
    choices = list[tuple[Any, Any]]()
    for _ in range(depth):
        longer, begin, count = np.full_like(best, _INFINITE), np.zeros(best.shape, int), np.zeros(best.shape, int)
        for replicas, load in loads.items():
            for used in range(replicas, devices + 1):
                times = np.maximum(best[used - replicas][:, None], load)
                first = times.argmin(0)
                least = times[first, np.arange(layers + 1)]
                better = least < longer[used]
                longer[used][better], begin[used][better], count[used][better] = least[better], first[better], replicas
        best = longer
        choices.append((begin, count))
        if len(choices) > 1 and best[devices, layers] < _INFINITE:
            starts, replicas_of, used, end = list[int](), list[int](), devices, layers
            for begins, counts in reversed(choices):
                replicas_of.append(int(counts[used, end]))
                starts.append(int(begins[used, end]))
                used, end = used - replicas_of[-1], starts[-1]
            yield float(best[devices, layers]), tuple(starts[::-1]), tuple(replicas_of[::-1])
