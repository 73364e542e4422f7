"""Variants: plans with several stages on a rank, split backwards, sums in parts, or options that save memory.

The search over all cuts is only for plans with one stage on each rank and whole backwards. Variants are derived from such plans, because
the gain of interleaving and split backwards depends little on the cut. They have no estimates: all variants of the best plan are simulated,
and then only the fastest kinds of variants for the other plans.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jpipe
from jpipe import InputError
from jpipe.plan import excluded, repeats_forward
from jpipe_planner.cost.devices import slowed, slowness_of
from jpipe_planner.cost.shape import is_planned, needs_vertical_sync
from jpipe_planner.ranking.choose import EQUAL, Choice, Ranked, in_order
from jpipe_planner.ranking.sum_parts import with_sum_parts
from jpipe_planner.search.balance import balance
from jpipe_planner.search.candidate import Candidate

BASE = "pipedream_flush"
BASES = 3  # the most plans for which variants are made
FASTEST = 4  # the number of fastest kinds of variants of the first plan that are tried for the other plans
EARLY = 2  # the most plans of each schedule that are tried with `split_backward` "early"
SAVING = 3  # the most plans of each schedule that are tried with fewer microbatches in flight, or with a shared optimizer
IN_PARTS = 6  # the most plans that are tried with sums in parts
MOST_CHUNKS = 3
MOST_OF_VARIANTS = 8_000  # forwards, after which no further variant is simulated
MOST_MICROBATCHES = 1024  # the most microbatches of a plan for which variants are made
NEAR = 0.3  # variants are made for plans that are slower than the fastest plan by at most this share


def variant_schedules() -> tuple[str, ...]:
    """Return the schedules of the plans that `find_variants` makes. Without a flush it makes only plans with several chunks."""
    return tuple(name for name, rules in jpipe.schedules.SCHEDULES.items() if not is_planned(name) or rules.layout == "looped")


def find_variants(
    choice: Choice,
    candidates: Sequence[Candidate],
    schedules: Sequence[str],
    tried: dict[Candidate, Ranked],
    *,
    max_delay: float | None = None,
    share_optimizer: bool = True,
) -> None:
    """Simulate plans that are derived from the plans of a ranking, as long as the simulations do not take too long.

    `candidates` are these plans, and plans of `pipedream_flush` without a simulation, the best estimates first. New simulations are added
    to `tried`. A moving average of the weights does not allow replicas to `share_optimizer`.
    """
    run = _Variants(choice, schedules, tried, max_delay)
    usable = [one for one in candidates if one.microbatches <= MOST_MICROBATCHES]
    fastest = choice.ranked[0].samples_per_second if choice.ranked else 0.0
    waiting = [
        one
        for one in in_order([one for one in tried.values() if one.candidate.schedule in schedules and one.candidate.over is None])
        if max(choice.computing(one.candidate)) < one.seconds * (1 - EQUAL)  # otherwise nothing can be gained
    ]
    near = [one.candidate for one in waiting if one.samples_per_second * (1 + NEAR) >= fastest]
    splitting = (one for one in near if one.depth > 1)
    early = [
        base.with_options(split_backward="early", extra_in_flight=extra)
        for base in _bases(splitting, EARLY)
        if "split_backward" in jpipe.schedules.SCHEDULES[base.schedule].options and not base.sum_parts
        for extra in sorted({0, base.options.extra_in_flight})
    ]
    run.simulate(early, 0.5)
    tight = (one for one in usable if lacks_memory(one) and one.schedule in schedules and len(set(one.replicas)) == 1)
    saving = _bases((one for one in tight if one.samples_per_second * (1 + NEAR) >= fastest), SAVING)
    sharing = [base for base in saving if share_optimizer and max(base.replicas) > 1 and base.agree is None]
    run.simulate((one for base in sharing for one in run.with_policies(base, dataclasses.replace(base, shard_optimizer=True))), 0.6)
    run.simulate((one for base in saving for one in run.with_fewer(base)), 0.4)
    whole = dict[object, Candidate]()
    for base in (one.candidate for one in waiting if one.candidate.has_one_stage_each and not one.candidate.sum_parts):
        whole.setdefault((base.starts, base.replicas, base.keep_together), base)
    in_parts = (with_sum_parts(base, *choice.meshes.of(base.degrees)) for base in whole.values())
    run.simulate(itertools.islice((one for one in in_parts if one is not None), IN_PARTS), 0.5)
    straight = (one for one in usable if one.schedule == BASE and one.depth > 1 and not one.options.extra_in_flight)
    kinds: list[tuple[object, ...]] | None = None
    for base in _bases(straight, BASES):
        found = run.simulate(run.of_ranks(base, kinds))
        if kinds is None and found:
            kinds = list(dict.fromkeys(_kind(one.candidate) for one in in_order(found)))[:FASTEST]


def lacks_memory(candidate: Candidate) -> bool:
    """Return whether a plan does not fit, or repeats forwards so that it does."""
    return candidate.over is not None or any(map(repeats_forward, candidate.policies))


def _kind(candidate: Candidate) -> tuple[object, ...]:
    """Return the properties that variants of one kind have in common, even if they are derived from different plans."""
    return candidate.schedule, candidate.chunks, (candidate.options.order_limit or 0) // candidate.depth


def _bases(candidates: Iterable[Candidate], most: int) -> list[Candidate]:
    """Return for each schedule the best `most` plans; of plans that differ only in their cut, only the best one counts."""
    best: dict[str, dict[tuple[object, ...], Candidate]] = {}
    for candidate in candidates:
        if candidate.has_one_stage_each and candidate.options.update_every == "batch":
            plans = best.setdefault(candidate.schedule, {})
            plans.setdefault((candidate.rows, candidate.replicas, candidate.policies[0], candidate.degrees), candidate)
    return [candidate for plans in best.values() for candidate in list(plans.values())[:most]]


def is_legal(candidate: Candidate, ids: tuple[str, ...], needs: Mapping[str, bool]) -> bool:
    """Return whether a plan of the layers `ids` can be run; `needs` are arguments of `excluded`."""
    try:
        return not excluded(candidate.plan(ids), **needs)
    except InputError:  # such as an option that cannot be combined with slices
        return False


class _Variants:
    """The search for variants, which simulates up to a limited number of forwards."""

    def __init__(self, choice: Choice, schedules: Sequence[str], tried: dict[Candidate, Ranked], max_delay: float | None) -> None:
        self._choice, self._schedules, self._tried, self._max_delay = choice, schedules, tried, max_delay
        self._is_restricted = choice.global_norm or bool(choice.profile.shared)
        self._spent = 0

    def simulate(self, variants: Iterable[Candidate], share: float = 1.0) -> list[Ranked]:
        """Simulate legal variants that may win, and return the plans that fit. `share` limits the remaining forwards."""
        ids, needs = self._choice.profile.ids, self._choice.needs
        legal = [one for one in variants if one.is_within(self._max_delay) and is_legal(one, ids, needs)]
        fitting, most = list[Ranked](), self._spent + share * (MOST_OF_VARIANTS - self._spent)
        rules = jpipe.schedules.SCHEDULES
        for candidate in sorted(legal, key=lambda one: (self._least(one), rules[one.schedule].flushes, self._choice.forwards(one))):
            effort = self._choice.forwards(candidate)
            if self._spent + effort > most or not self._may_win(candidate):
                continue
            self._spent += effort
            one = self._choice.simulate(dataclasses.replace(candidate, bound=""))  # other things may limit its speed
            if one.simulated is not None:
                self._tried[candidate] = one
                fitting += [one] if one.candidate.over is None else []
        return fitting

    def _least(self, candidate: Candidate) -> float:
        """Return the least seconds per row: the busiest rank computes; with a flush and whole backwards it also waits for other ranks."""
        rules, shape, busy = jpipe.schedules.SCHEDULES[candidate.schedule], candidate.shape, max(self._choice.computing(candidate))
        waits = rules.flushes and not any(rules.splits(shape, s) for s in range(shape.depth))
        steps = (candidate.num_pipeline_ranks - 1) / candidate.chunks if waits else 0.0  # while the pipeline fills and drains
        return busy * (1 + steps * candidate.replicas[0] / shape.microbatches) / candidate.batch

    def _may_win(self, candidate: Candidate) -> bool:
        """Return whether a plan may be as fast as its rival."""
        return self._least(candidate) * self._choice.rival(candidate) * (1 - EQUAL) <= 1

    def with_fewer(self, base: Candidate) -> Iterator[Candidate]:
        """Yield the plan with fewer microbatches in flight; with fewer than half, recomputation would be faster."""
        rules, usual = jpipe.schedules.SCHEDULES[base.schedule], base.with_options(extra_in_flight=0).shape
        most = max(rules.in_flight(usual, s) for s in range(base.depth))
        parts = ((1, 2, 3) if base.over else (3,)) if "max_in_flight" in rules.options and most > 1 else ()
        for limit in sorted({max(most * part // 4, 1) for part in parts}):
            yield from self.with_policies(base, base.with_options(max_in_flight=limit, extra_in_flight=0))

    def with_policies(self, base: Candidate, saving: Candidate) -> Iterator[Candidate]:
        """Yield the plan `saving`, which saves memory, with the fastest policy; if `base` does not fit, also with its policies."""
        fastest = (self._choice.profile.cheapest_policy(self._choice.topology),) * base.depth
        for policies in dict.fromkeys((fastest, base.policies) if base.over else (fastest,)):
            yield dataclasses.replace(saving, policies=policies)

    def of_ranks(self, base: Candidate, kinds: Sequence[tuple[object, ...]] | None) -> Iterator[Candidate]:
        """Yield legal plans of the schedules on the ranks of a plan; if `kinds` is not None, only plans of these kinds."""
        for name in [name for name in self._schedules if name in variant_schedules()]:
            rules = jpipe.schedules.SCHEDULES[name]
            if "order" in rules.options:
                yield from self._ordered(base, name, kinds) if base.slices is None else ()
                continue
            for chunks in {"straight": (1,), "v": (2,)}.get(rules.layout, range(1 if rules.flushes else 2, MOST_CHUNKS + 1)):
                if kinds is None or (name, chunks, 0) in kinds:
                    yield from self._chunked(base, name, chunks, self._is_restricted and needs_vertical_sync(name))

    def _ordered(self, base: Candidate, schedule: str, kinds: Sequence[tuple[object, ...]] | None) -> Iterator[Candidate]:
        """Yield plans with an order made for the times of their stages, for the activations of 1F1B's first rank or twice as many."""
        for layout, chunks in (("zb_h1", 1), ("zb_v", 2)):
            for candidate in self._chunked(base, layout, chunks):
                # making an order takes as long as a simulation
                if self._spent + self._choice.forwards(candidate) > MOST_OF_VARIANTS or not self._may_win(candidate):
                    continue
                profile, topology = self._choice.meshes.of(base.degrees)
                width = base.replicas[0]
                narrow = dataclasses.replace(
                    candidate,
                    replicas=(1,) * candidate.depth,
                    microbatches=candidate.microbatches // width,
                    degrees=type(base.degrees)(),
                    agree=None,  # one pipeline alone
                )
                plan = narrow.plan(profile.ids)
                costs = slowed(plan, profile.stage_costs(plan, base.rows), topology)
                link = topology.levels[-1]
                latency = link.latency + max(cost.outputs for cost in costs) / link.bandwidth
                for times in (1, 2) if kinds is None else [times for times in (1, 2) if (schedule, chunks, times) in kinds]:
                    limit = times * base.depth * chunks
                    order = jpipe.schedules.greedy_order(plan, costs, limits=limit, latency=latency)
                    yield dataclasses.replace(candidate.with_options(order=order, order_limit=limit), schedule=schedule)

    def _chunked(self, base: Candidate, schedule: str, chunks: int, vertical_sync: bool = False) -> Iterator[Candidate]:
        """Yield the plan with `chunks` stages on each rank, if it is legal."""
        stages, (profile, topology) = base.depth * chunks, self._choice.meshes.of(base.degrees)
        if stages > len(profile.ids):
            return
        recomputes = int(repeats_forward(base.policies[0]))
        seconds = [(1 + recomputes) * cost.forward + cost.backward for cost in profile.costs(base.rows).values()]
        candidate = dataclasses.replace(
            base,
            schedule=schedule,
            starts=base.starts if chunks == 1 else balance(seconds, stages),
            replicas=base.replicas[:1] * stages,
            policies=base.policies if chunks == 1 else base.policies[:1] * stages,
            chunks=chunks,
            options=base.options.model_copy(update={"vertical_sync": vertical_sync}),
        )
        try:
            plan = candidate.plan(profile.ids)
        except InputError:
            return
        if chunks > 1 and topology.differing:
            candidate = dataclasses.replace(candidate, starts=balance(seconds, stages, slowness_of(plan, topology)))
        yield candidate
