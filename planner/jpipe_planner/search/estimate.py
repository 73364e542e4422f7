"""Estimates of plans with one stage on each rank: recomputation, memory, and seconds in closed form.

Estimates only choose which plans to simulate, so a rough ranking is enough.
"""

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from jpipe.plan import Agreement
from jpipe.schedules import PlainShape
from jpipe_planner.cost.links import KeepTogether, StageLinks, find_links
from jpipe_planner.cost.memory import stage_bytes, waiting_gradients, waiting_inputs
from jpipe_planner.cost.price import Times, all_reduce_seconds, batch_seconds
from jpipe_planner.cost.shape import ScheduleFacts, schedule_facts
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.search.candidate import NO_EXTRAS, Candidate, Extras
from jpipe_planner.search.stages import Layers, Stages

STAYING = 2  # the number of microbatches with residuals that stay on the device if other residuals wait in host memory


class Estimates:
    """Estimates of the plans of a profile, of the mean slice if rows are cut into slices, on the devices of a topology."""

    def __init__(self, profile: Profile, topology: Topology, extras: Extras = NO_EXTRAS) -> None:
        if extras.slices is not None:
            profile = profile.in_slices(profile.slice_lengths(extras.slices))
        self.profile, self.topology, self.extras, self.layers = profile, topology, extras, Layers(profile)
        self.links = lru_cache(maxsize=4096)(partial(find_links, topology))
        self._stages = lru_cache(maxsize=4096)(self.layers.cut)
        first = self.layers.policies.index(profile.cheapest_policy(topology))
        self._order = np.array([first, *(n for n in range(len(self.layers.policies)) if n != first)])  # in which policies are tried

    def candidate(
        self, shape: PlainShape, rows: int, starts: tuple[int, ...], keep_together: KeepTogether = "replicas"
    ) -> Candidate | None:
        """Return a plan with its estimate and the cheapest recomputation that fits, or least memory; None if its schedule cannot run it."""
        facts = schedule_facts(shape)
        if facts is None:
            return None
        replicas, links = np.array(shape.replicas), self.links(shape.replicas, keep_together)
        stages, extras = self._stages(starts, rows), self.extras.of_pipelines(shape.replicas[0], shape.depth)
        memory = memory_of(stages, facts, replicas, extras)
        fits = (memory <= links.limits)[self._order]
        policy = np.where(fits.any(0), self._order[fits.argmax(0)], memory.argmin(0))
        chosen, backward = (np.take_along_axis(values, policy[None], 0)[0] for values in (memory, stages.backward))
        updates = np.array([shape.microbatches / shape.microbatches_per_update(s) for s in range(shape.depth)])
        summed = (
            stages.accumulators if extras.agree is None else _ring_bytes(extras.agree, stages.weights - stages.frozen, shape.replicas[0])
        )
        times = self._times(stages, backward, np.where(facts.fused, stages.fusing, 1.0), links, shape, summed, updates, extras)
        seconds, bound = batch_seconds(shape, times.overlapping(self.topology.device.overlap), facts.in_flight, facts.hidden)
        computing = shape.microbatches * (times.forward + times.backward).sum() + (replicas * updates * times.update).sum()
        if (cores := self.topology.cores) is not None and computing / cores > seconds * (1 + 1e-9):  # or the difference is a rounding error
            seconds, bound = float(computing / cores), "the cores"
        microbatches = shape.microbatches // shape.row_slices
        sent = (updates * 2 * (replicas - 1) * summed + replicas * stages.sent).sum() / (rows * microbatches)
        over = chosen - links.limits
        worst = int(over.argmax())
        return Candidate(
            schedule=shape.schedule,
            rows=rows,
            microbatches=microbatches,
            starts=starts,
            replicas=shape.replicas,
            policies=tuple([self.layers.policies[number] for number in policy.tolist()]),
            options=shape.options,
            keep_together=keep_together,
            seconds=seconds,
            bubble=float(1 - computing / (replicas.sum() * seconds)),
            memory=tuple(chosen.tolist()),
            sent=float(sent + 2 * shape.row_slices * sum(extras.message_bytes(stages.outputs.tolist())) / rows),
            bound=bound,
            over=(worst, math.ceil(over[worst])) if over[worst] > 0 else None,
            agree=extras.agree,
            links=extras.links,
            slices=extras.slices,
        )

    def lacks_in_host(self, candidate: Candidate) -> bool:
        """Return whether a plan does not fit even if optimizer states and most residuals wait in host memory."""
        facts = schedule_facts(candidate.shape)
        assert facts is not None, "a candidate is legal"
        memory = memory_in_host(self._stages(candidate.starts, candidate.rows), facts, np.array(candidate.replicas))
        return bool((memory.min(0) > self.links(candidate.replicas, candidate.keep_together).limits).any())

    def _times(
        self, stages: Stages, backward: Any, fusing: Any, links: StageLinks, shape: PlainShape, summed: Any, updates: Any, extras: Extras
    ) -> Times:
        """Return the times of the stages on their devices. Agreements are spread evenly over all updates."""
        messages = np.array(extras.message_bytes(stages.outputs[:-1].tolist()))
        sums = zip(summed.tolist(), shape.replicas, links.rings, strict=True)
        every = 1 if extras.agree is None else extras.agree.every
        return Times(
            forward=links.slowness * fusing * stages.forward,
            backward=links.slowness * fusing * backward,
            update=links.slowness * stages.update,
            all_reduce=np.array([all_reduce_seconds(every * size, replicas, ring) / every for size, replicas, ring in sums]),
            messages=messages / links.bandwidths,
            latencies=links.latencies,
            sending=links.port_seconds(shape.microbatches, messages, 0 * summed),
            port=links.port_seconds(shape.microbatches, messages, updates * summed),
        )


def _ring_bytes(agree: Agreement, trained: Any, pipelines: int) -> Any:
    """Return the bytes for each update with which a sum in a ring sends as much as agreements on these weights."""
    return agree.sent_share(pipelines) * pipelines / (2 * (pipelines - 1)) * trained / agree.every


def memory_of(
    stages: Stages, facts: ScheduleFacts, replicas: Any, extras: Extras = NO_EXTRAS, *, waiting: Any = None, gradients: Any = None
) -> Any:
    """Return the peak bytes by policy and stage. `waiting` and `gradients` are needed if these are not all stages of a plan."""
    trained, agree = stages.weights - stages.frozen, extras.agree
    # the agreed weights, their momentum, changes that are applied late, and rounding errors
    copies = 0 if agree is None else 1 + bool(agree.outer.momentum) + bool(agree.delay) + bool(agree.bits)
    exchanged = 0 if agree is None or agree.delay else trained
    if agree is not None and agree.bits:
        exchanged = exchanged + np.ceil(replicas * agree.sent_share(2) * trained).astype(np.int64)
    if waiting is None:
        waiting = waiting_inputs(facts.in_flight, replicas, np.append(0, (facts.in_flight * replicas)[:-1]))
    return stage_bytes(
        trained,
        stages.optimizer + copies * trained,
        stages.state + stages.frozen,
        np.where(facts.fused, 0, stages.residuals),
        stages.inputs,
        stages.outputs,
        np.where(facts.fused, stages.fused, stages.temporary),
        stages.labels,
        versions=facts.versions,
        in_flight=facts.in_flight,
        waiting=waiting,
        accumulators=stages.accumulators,
        replicas=replicas if agree is None else 1,
        gradients=facts.early + (waiting_gradients(replicas, np.append(replicas[1:], 0)) if gradients is None else gradients),
        exchanged=stages.exchanged + exchanged,
        ahead=stages.ahead,
    )


def memory_in_host(stages: Stages, facts: ScheduleFacts, replicas: Any, **waiting: Any) -> Any:
    """Return the same as `memory_of` if optimizer states, and the residuals of all but `STAYING` microbatches, wait in host memory."""
    staying = facts._replace(in_flight=np.minimum(facts.in_flight, STAYING))
    computing = memory_of(replace(stages, optimizer=0 * stages.optimizer), staying, replicas, **waiting)
    return np.maximum(computing, memory_of(stages, facts._replace(in_flight=0 * facts.in_flight), replicas, **waiting))
