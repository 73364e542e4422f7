"""Parallel equal pipelines: every width, depth, schedule, microbatch size and batch, priced in closed form.

PipeDream-2BW (ICML 2021), section 4, for all schedules; data parallelism is a pipeline of one stage.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import numpy as np

import jpipe
from jpipe.schedules import PlanOptions
from jpipe_planner.cost.crossings import Crossings
from jpipe_planner.cost.memory import stage_bytes, waiting_inputs
from jpipe_planner.cost.price import (
    BOUNDS,
    CLOSED_FORMS,
    Price,
    Times,
    all_reduce_seconds,
    paper_price,
    steady_price,
    walked_price,
)
from jpipe_planner.cost.shape import Pipelines, ScheduleFacts, batch_orders, needs_vertical_sync, planned_schedules, schedule_facts
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.search.balance import balance
from jpipe_planner.search.candidate import USUAL, Asked, Candidate
from jpipe_planner.search.stages import Layers, Stages

EXTRA = (0, 1, 2)  # additional microbatches in flight, tried for schedules with that option
_GAIN = 0.002  # relative gain of additional microbatches in flight below which plans that flush are left out
_Orientation = Literal["replicas", "stages"]
_ORIENTATIONS: tuple[_Orientation, ...] = ("replicas", "stages")


def search_parallel(
    profile: Profile,
    topology: Topology,
    batch: int,
    *,
    exact: bool = False,
    schedules: Sequence[str] | None = None,
    price: Literal["closed form", "paper"] = "closed form",
    replicas: bool = True,
    max_delay: float | None = None,
    global_norm: bool = False,
    asked: Asked = USUAL,
) -> list[Candidate]:
    """Price all plans of w pipelines of d stages on all w d devices of the topology; on fewer devices only if no such plan fits.

    Where devices differ, plans are tried with the devices in several orders (`Topology.orders`), and those that leave slow devices idle as
    well. Without replicas: all plans of one pipeline, on any number of the devices.

    Each depth has the cut that balances compute best or, if that does not fit, the best balanced cut that fits. Each stage has the
    cheapest recomputation that fits.

    Args:
        profile: the model's costs.
        topology: the topology.
        batch: the largest number of rows per update.
        exact: whether the batch must have exactly that many rows.
        schedules: the schedules to try, of `planned_schedules`; None: all of them.
        price: "closed form", which approximates `jpipe.simulate`, or "paper", as in the appendix of 2BW.
        replicas: whether stages may have replicas.
        max_delay: the largest mean delay of a plan in updates, see `Candidate.delay`; 0 allows only plans without a delay; None: any.
        global_norm: whether gradients are clipped by their norm over all stages. Then, and if layers share parameters, schedules that
            need it have `vertical_sync`.
        asked: what plans are to do in addition.

    Returns:
        All candidates, best first; those that do not fit are last, sorted by how much they lack. Empty if no plan has such a batch.
    """
    schedules = planned_schedules() if schedules is None else tuple(schedules)
    if topology.differing:
        limits: dict[str, Any] = {"exact": exact, "schedules": schedules, "price": price, "replicas": replicas, "max_delay": max_delay}
        search = partial(_search, profile, batch=batch, global_norm=global_norm, asked=asked, **limits)
        return sorted(in_orders(topology, search), key=lambda candidate: candidate.rank)
    return _search(profile, topology, batch, exact, schedules, price, replicas, max_delay, global_norm, asked)


def in_orders(topology: Topology, search: Callable[[Topology], Iterable[Candidate]]) -> Iterator[Candidate]:
    """Yield the candidates of a search on a topology with its devices in each of its orders."""
    for n, order in enumerate(topology.orders()):
        for candidate in search(topology.ordered(order)):
            yield replace(candidate, placed_on=order) if n else candidate


def _search(
    profile: Profile,
    topology: Topology,
    batch: int,
    exact: bool,
    schedules: tuple[str, ...],
    price: Literal["closed form", "paper"],
    replicas: bool,
    max_delay: float | None,
    global_norm: bool,
    asked: Asked,
) -> list[Candidate]:
    """Do the work of `search_parallel` with the devices in their order."""
    run = _Sweep(profile, topology, batch, exact, schedules, price, max_delay, global_norm or bool(profile.shared), asked)
    shapes = run.full() if replicas else run.single()
    candidates = [candidate for width, depth in shapes for candidate in run.candidates(width, depth)]
    if replicas and all(candidate.over for candidate in candidates):
        for width, depth in run.smaller():
            fewer = list(run.candidates(width, depth))
            candidates += fewer
            if fewer and all(candidate.over for candidate in fewer):
                break  # less depth needs even more memory
    return sorted(_without_useless_extra(candidates), key=lambda candidate: candidate.rank)


def _without_useless_extra(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Leave out plans that flush with additional microbatches in flight that are no faster than without, where links cost little."""
    without = {_but_extra(candidate): candidate.seconds for candidate in candidates if not candidate.options.extra_in_flight}

    def is_useless(candidate: Candidate) -> bool:
        flushes = candidate.options.extra_in_flight and jpipe.schedules.SCHEDULES[candidate.schedule].flushes
        return bool(flushes) and candidate.seconds >= without.get(_but_extra(candidate), math.inf) * (1 - _GAIN)

    return [candidate for candidate in candidates if not is_useless(candidate)]


def _but_extra(candidate: Candidate) -> tuple[object, ...]:
    """Return what plans have in common that differ in the number of microbatches in flight, and so in memory."""
    return candidate.schedule, candidate.rows, candidate.microbatches, candidate.starts, candidate.replicas, candidate.keep_together


def pipelines_seconds(profile: Profile, topology: Topology, candidate: Candidate) -> float:
    """Return the seconds per batch of a plan from `search_parallel` in closed form, without the effect of shared cores.

    Args:
        profile: the costs, possibly others than in the search.
        topology: the links, possibly others than in the search.
        candidate: equal pipelines that update together.
    """
    width, depth, layers = candidate.replicas[0], candidate.depth, Layers(profile)
    topology = candidate.in_order(topology)
    stages = layers.cut(candidate.starts, profile.sizes.index(candidate.rows))
    crossing = Crossings.find(topology, width, depth, candidate.keep_together)
    backward = _slowed(crossing, stages.backward[[layers.policies.index(policy) for policy in candidate.policies], range(depth)])
    times = _times(stages, width, crossing, candidate.asked)._replace(backward=backward)
    options = PlanOptions(extra_in_flight=candidate.options.extra_in_flight, vertical_sync=candidate.options.vertical_sync)
    pipelines = Pipelines(candidate.schedule, width, depth, options)
    return float(_price(pipelines, schedule_facts(pipelines, (candidate.microbatches // width,)), times).seconds[0])


def _price(pipelines: Pipelines, facts: ScheduleFacts, times: Times) -> Price:
    """Return the price of a batch, for each number of microbatches of a pipeline."""
    m, rules = np.array(facts.microbatches)[:, None], jpipe.schedules.SCHEDULES[pipelines.schedule]
    if not rules.flushes:
        return steady_price(times, m, facts.hidden, pipelines.options.extra_in_flight)
    if rules.closed_form is None:
        return walked_price(times, m, lambda count: batch_orders(pipelines, count))
    extra = pipelines.options.extra_in_flight
    return CLOSED_FORMS[rules.closed_form](times, m, **({"extra": extra} if extra else {}))


@dataclass(frozen=True)
class _Fit:
    """What the schedule says, the chosen recomputation, the bytes, and by how many they are too many, by stage for each legal m."""

    facts: ScheduleFacts
    policy: Any  # its index in Layers.policies
    memory: Any
    over: Any


def _slowed(crossing: Crossings, seconds: Any) -> Any:
    """Return the seconds of the stages on their devices."""
    return seconds if crossing.slowness is None else seconds * np.array(crossing.slowness)


def _times(stages: Stages, width: int, crossing: Crossings, asked: Asked) -> Times:
    """Return the times that do not depend on the schedule, without recomputation.

    Agreements are spread over all updates. Those that are applied late are priced as if they were applied at once, so that a plan may be
    faster: the simulation tells how much of their sums later batches hide.
    """
    messages = np.array(asked.message_bytes(stages.outputs[:-1].tolist()))
    one_way, both_ways = crossing.ports(messages)
    sizes, every = (stages.accumulators, 1) if asked.agree is None else (stages.weights - stages.frozen, asked.agree.every)
    all_reduce = [all_reduce_seconds(size, width, ring) / every for size, ring in zip(sizes.tolist(), crossing.rings, strict=True)]
    return Times(
        forward=_slowed(crossing, stages.forward),
        backward=_slowed(crossing, stages.backward[0]),
        update=_slowed(crossing, stages.update),
        all_reduce=np.array(all_reduce),
        sharing=crossing.sharing if width > 1 else (),
        messages=messages / crossing.bandwidths,
        latencies=crossing.latencies,
        one_way=one_way,
        both_ways=both_ways,
    )


def _extras(schedule: jpipe.schedules.Schedule) -> tuple[int, ...]:
    """Return the numbers of additional microbatches in flight to try."""
    return EXTRA if "extra_in_flight" in schedule.options else (0,)


class _Sweep:
    def __init__(
        self,
        profile: Profile,
        topology: Topology,
        batch: int,
        exact: bool,
        schedules: tuple[str, ...],
        price: str,
        max_delay: float | None,
        is_restricted: bool,
        asked: Asked,
    ) -> None:
        self.profile, self.topology, self.batch, self.exact, self.price = profile, topology, int(batch), exact, price
        self.max_delay, self.is_restricted, self.asked = max_delay, is_restricted, asked
        self.layers = Layers(profile)
        self.tried = tuple((name, extra) for name in schedules for extra in _extras(jpipe.schedules.SCHEDULES[name]))
        self.cut = cache(self._cut)

    def full(self) -> Iterator[tuple[int, int]]:
        """Yield each (w, d) with all devices; where they differ, the most pipelines for each depth, also on the faster devices alone."""
        count = self.topology.num_devices
        depths = range(1, min(len(self.profile.ids), count) + 1)
        if not self.topology.differing:
            return ((count // depth, depth) for depth in depths if count % depth == 0)
        slowness = self.topology.slowness
        leading = {count, *(np.flatnonzero(np.diff(slowness)) + 1).tolist()}  # all, and those before a change of speed
        return iter(sorted({(some // depth, depth) for depth in depths for some in leading if some >= depth}))

    def single(self) -> Iterator[tuple[int, int]]:
        """Yield (1, d) for all depths."""
        return ((1, depth) for depth in range(1, min(len(self.profile.ids), self.topology.num_devices) + 1))

    def smaller(self) -> Iterator[tuple[int, int]]:
        """Yield the largest number of pipelines for each depth that leaves devices idle, deepest first."""
        count = self.topology.num_devices
        for depth in range(min(len(self.profile.ids), count), 0, -1):
            widths = {self._width(rows, count // depth) for rows in self.profile.sizes} - {0, count / depth}
            yield from ((width, depth) for width in sorted(widths))

    def _width(self, rows: int, most: int) -> int:
        """Return the largest number of pipelines for which the batch has enough microbatches; 0: not enough for one."""
        whole, remainder = divmod(self.batch, rows)
        if not self.exact or not whole:
            return min(most, whole)
        return 0 if remainder else max(width for width in range(1, most + 1) if whole % width == 0)

    def candidates(self, width: int, depth: int) -> Iterator[Candidate]:
        """Yield all plans of w pipelines of d stages."""
        together = _ORIENTATIONS if min(width, depth, len(self.topology.levels)) > 1 else _ORIENTATIONS[:1]
        crossings = [(keep, Crossings.find(self.topology, width, depth, keep)) for keep in together]
        if crossings[0][1].slowness is None:
            yield from self._candidates(width, depth, crossings)
        else:  # the stages have other devices, and so other cuts
            for crossing in crossings:
                yield from self._candidates(width, depth, [crossing])

    def _candidates(self, width: int, depth: int, crossings: Sequence[tuple[_Orientation, Crossings]]) -> Iterator[Candidate]:
        """Yield all plans of w pipelines of d stages that are on equal devices with each of these crossings."""
        slowness, limits = crossings[0][1].slowness, crossings[0][1].limits
        for n, rows in enumerate(self.profile.sizes):
            numbers = self._microbatches(rows * width, depth)
            for stages in self.cut(depth, n, slowness) if numbers else ():
                links = [
                    (keep, crossing, _times(stages, width, crossing, self.asked.of_pipelines(width, depth))) for keep, crossing in crossings
                ]
                for schedule, extra in self.tried:
                    rules, sync = jpipe.schedules.SCHEDULES[schedule], self.is_restricted and depth > 1 and needs_vertical_sync(schedule)
                    pipelines = Pipelines(schedule, width, depth, PlanOptions(extra_in_flight=extra, vertical_sync=sync))
                    if depth == 1 and (extra or (rules.flushes and not rules.data_parallel)):
                        continue  # the same as another one, because nothing is in flight
                    fit = self._fit(stages, pipelines, numbers, limits)
                    if fit is None:
                        continue
                    for keep, crossing, times in links:
                        chosen = times._replace(backward=_slowed(crossing, np.take_along_axis(stages.backward, fit.policy, 0)))
                        priced = self._priced(stages, rows, pipelines, keep, fit, chosen)
                        yield from (candidate for candidate in priced if candidate.is_within(self.max_delay))

    def _microbatches(self, rows: int, depth: int) -> tuple[int, ...]:
        """Return the numbers of microbatches of a pipeline to try: powers of two, the depth times these, and the largest."""
        most, remainder = divmod(self.batch, rows)
        if self.exact:
            return (most,) if most and not remainder else ()
        numbers = {least << k for least in (1, depth) for k in range(most.bit_length()) if least << k <= most}
        return tuple(sorted(numbers | {most} - {0}))

    def _cut(self, depth: int, n: int, slowness: tuple[float, ...] | None) -> tuple[Stages, ...]:
        """Return the cuts that balance compute best, without and with recomputation; often they are the same."""
        forward, backward = self.layers.forward[n], self.layers.backward[n]
        cuts = {balance((forward * times + backward).tolist(), depth, slowness) for times in (1, 2)}
        return tuple(self.layers.cut(starts, n) for starts in sorted(cuts))

    def _fit(self, stages: Stages, pipelines: Pipelines, numbers: tuple[int, ...], limits: Any) -> _Fit | None:
        """Return for each stage the first policy that fits, or the one that needs least; None: no number of microbatches is legal."""
        facts, width = schedule_facts(pipelines, numbers), pipelines.width
        if not facts.microbatches:
            return None
        in_flight, asked, trained = facts.in_flight, self.asked.of_pipelines(width, pipelines.depth), stages.weights - stages.frozen
        sent = np.concatenate([np.zeros_like(in_flight[:, :1]), in_flight[:, :-1] * width], axis=1)
        memory = stage_bytes(
            trained,
            stages.optimizer + asked.agreed_copies * trained,
            stages.state + stages.frozen,
            np.where(facts.fused, 0, stages.residuals[:, None]),
            stages.inputs,
            stages.outputs,
            np.where(facts.fused, stages.fused, stages.temporary[:, None]),
            stages.labels,
            versions=facts.versions,
            in_flight=in_flight,
            waiting=waiting_inputs(in_flight, width, sent),
            accumulators=stages.accumulators,
            replicas=width if asked.agree is None else 1,
            exchanged=stages.exchanged + (0 if asked.agree is None or asked.agree.delay else trained),
            ahead=stages.ahead,
        )
        fits = memory <= limits
        policy = np.where(fits.any(0), fits.argmax(0), memory.argmin(0))
        chosen = np.take_along_axis(memory, policy[None], 0)[0]
        return _Fit(facts, policy, chosen, chosen - limits)

    def _seconds(self, pipelines: Pipelines, facts: ScheduleFacts, times: Times) -> Price:
        """Return the price of a batch."""
        if self.price == "closed form":
            return _price(pipelines, facts, times)
        m, depth, rules = np.array(facts.microbatches)[:, None], pipelines.depth, jpipe.schedules.SCHEDULES[pipelines.schedule]
        rounds = m * depth if rules.closed_form == "serial" else m + depth - 1 if rules.flushes else m
        return paper_price(times, m, rounds[:, 0])

    def _priced(self, stages: Stages, rows: int, pipelines: Pipelines, keep: Any, fit: _Fit, times: Times) -> Iterator[Candidate]:
        price, (schedule, width, depth, options) = self._seconds(pipelines, fit.facts, times), pipelines
        numbers = np.array(fit.facts.microbatches)
        busy = width * (numbers * times.compute.sum(1) + times.update.sum())
        asked, over, trained = self.asked.of_pipelines(width, depth), fit.over, stages.weights - stages.frozen
        summed = stages.accumulators.sum() if asked.agree is None else trained.sum() / asked.agree.every
        sums = (2 * (width - 1) * summed + width * stages.sent.sum()) / (width * rows * numbers)
        rows_of = zip(
            fit.facts.microbatches,
            price.seconds.tolist(),
            (1 - busy / (width * depth * price.seconds)).tolist(),
            fit.policy.tolist(),
            fit.memory.tolist(),
            (2 * sum(asked.message_bytes(stages.outputs.tolist())) / rows + sums).tolist(),
            price.bound.tolist(),
            price.where.tolist(),
            over.argmax(1).tolist(),
            over.max(1).tolist(),
            strict=True,
        )
        for m, batch_seconds, bubble, policies, memory, sent, bound, where, worst, lacks in rows_of:
            yield Candidate(
                schedule=schedule,
                rows=rows,
                microbatches=m * width,
                starts=stages.starts,
                replicas=(width,) * depth,
                policies=tuple([self.layers.policies[policy] for policy in policies]),
                options=options,
                keep_together=keep,
                seconds=batch_seconds,
                bubble=bubble,
                memory=tuple(memory),
                sent=sent,
                bound=BOUNDS[bound].format(where),
                over=(worst, int(np.ceil(lacks))) if lacks > 0 else None,
                agree=asked.agree,
                links=asked.links,
            ).sharing(self.topology.cores)
