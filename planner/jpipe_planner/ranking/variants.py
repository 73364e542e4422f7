"""Plans with several stages on a rank, split backwards, sums in parts, or options that save memory, derived from plans without them.

The search over all cuts is for one stage on each rank, with whole backwards. What interleaving and split backwards gain depends little on
the cut, so the best cuts of `pipedream_flush`, for a few microbatch sizes, widths and recomputations, are cut further into equal chunks.
The best plans of the schedules that can send gradients early are tried with split backwards, where links cost time, and those with replicas
with sums in parts. Those that need more memory than a device has, or recompute because of that, are tried with fewer microbatches in
flight, and with replicas that share an optimizer. All these plans are simulated, because they have no closed form.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import jpipe
from jpipe import InputError
from jpipe.plan import excluded, repeats_forward
from jpipe_planner.cost.bound import flush_seconds, has_bounds, order_seconds, port_seconds, rank_seconds, unhindered_seconds
from jpipe_planner.cost.copies import Part, part_of
from jpipe_planner.cost.devices import lacking, limits_of, slowed, slowness_of
from jpipe_planner.cost.shape import is_planned, needs_vertical_sync
from jpipe_planner.cost.simulated import Simulated, forwards, simulate_plan, window
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.sharded import NO_MESH, Degrees, Meshes
from jpipe_planner.ranking.choose import Ranked
from jpipe_planner.ranking.race import SLACK
from jpipe_planner.ranking.sum_parts import with_sum_parts
from jpipe_planner.search.balance import balance
from jpipe_planner.search.candidate import USUAL, Asked, Candidate
from jpipe_planner.search.candidates import on_meshes
from jpipe_planner.search.parallel import search_parallel

BASES = 4  # plans of one stage on each rank that are varied
EARLY = 2  # plans of each schedule that are tried with `split_backward` "early"
SAVING = 2  # plans of each schedule that are tried with fewer microbatches in flight, or with replicas that share an optimizer
IN_PARTS = 4  # plans of each schedule, and as many of one stage, that are tried with sums in parts
MOST_TRIED = 16  # of these, whether parts gain anything
MOST_CHUNKS = 3
MOST_MICROBATCHES = 1024  # most of a plan that is varied
MOST_IN_ALL = 24_000  # most forwards of all simulations, which then take some seconds
FOR_SHOW = MOST_IN_ALL // 4  # of them, after which plans that are slower than a known one are not simulated
_LONG = MOST_IN_ALL  # forwards of a plan that is simulated where one with twice its bound is
_SHARE_OF_BOUND = 1 / 12  # the time to compute a bound that counts messages, relative to that of a simulation
_SHARE_OF_ORDER = 0.3  # the time to find an order for the times of the stages, relative to that of a simulation
_MOST_WORKERS = 512  # of a plan whose bound counts its sums, which takes long for more
BASE = "pipedream_flush"
_SLOW = 0.01  # time of a message, relative to a forward, above which a link slows a plan down


@dataclass(frozen=True)
class Variants:
    """The plans that were derived from others.

    Attributes:
        simulated: the plans with their simulations.
        left_out: the number of plans that were not simulated, because all together would take too long.
    """

    simulated: dict[Candidate, Simulated]
    left_out: int


def variant_schedules() -> tuple[str, ...]:
    """Return the schedules of which `find_variants` makes plans; those without a flush with several chunks only."""
    return tuple(name for name, rules in jpipe.schedules.SCHEDULES.items() if not is_planned(name) or rules.layout == "looped")


def find_variants(
    profile: Profile,
    topology: Topology,
    batch: int,
    *,
    exact: bool = True,
    schedules: Sequence[str] | None = None,
    planned: Sequence[Candidate] = (),
    all_devices: bool = False,
    global_norm: bool = False,
    degrees: Degrees = NO_MESH,
    max_delay: float | None = None,
    best: Ranked | None = None,
    share_optimizer: bool = True,
    asked: Asked = USUAL,
) -> Variants:
    """Return plans of these schedules with their simulations.

    With `best` not all of them are simulated: only those that could be better than it, and one for each schedule, for comparison.

    Args:
        profile: the model's costs.
        topology: the topology.
        batch: the largest number of rows per update.
        exact: whether the batch must have exactly that many rows.
        schedules: the schedules to try, of `variant_schedules`; None: all of them.
        planned: candidates with whole backwards; the best are also tried with early gradients, or with options that save memory.
        all_devices: whether plans must use all devices.
        global_norm: whether gradients are clipped by their norm over all stages, for which updates wait.
        degrees: the degrees of the meshes of all plans; candidates of `planned` with other degrees are ignored.
        max_delay: the largest mean delay of a plan in updates, see `Candidate.delay`; 0 allows only plans without a delay; None: any.
        best: the best known plan that fits, simulated; None: all plans are simulated, up to a limit.
        share_optimizer: whether replicas may share an optimizer, which excludes a moving average of the weights.
        asked: what plans are to do in addition; those of `planned` do it.
    """
    profile, topology = Meshes(profile, topology).of(degrees)
    planned = [dataclasses.replace(candidate, degrees=NO_MESH) for candidate in planned if candidate.degrees == degrees]
    schedules = variant_schedules() if schedules is None else [name for name in schedules if name in variant_schedules()]
    straight = search_parallel(profile, topology, batch, exact=exact, schedules=[BASE], asked=asked) if schedules else []
    run = _Variants(profile, topology, schedules, global_norm, max_delay)
    usable = _usable(planned, topology, all_devices)
    early = [one for base in _bases_with("split_backward", (one for one in usable if one.depth > 1), EARLY) for one in run.early(base)]
    in_parts = list(run.in_parts(usable))
    saving = [one for base in _bases_with(None, filter(lacks_memory, usable), SAVING) for one in run.saving(base, share_optimizer)]
    of_ranks = [one for base in _bases(_usable(straight, topology, all_devices)) for one in run.of_ranks(base)]
    run.simulate([*early, *in_parts, *saving, *of_ranks], best)
    simulated = (
        run.simulations
        if degrees.size == 1
        else {on_meshes(candidate, degrees): simulation for candidate, simulation in run.simulations.items()}
    )
    return Variants(simulated, run.left_out)


def _usable(candidates: Sequence[Candidate], topology: Topology, all_devices: bool) -> list[Candidate]:
    """Return the candidates that may be varied, best first."""
    usable = [c for c in candidates if c.microbatches <= MOST_MICROBATCHES and (not all_devices or c.devices == topology.num_devices)]
    return sorted(usable, key=lambda candidate: candidate.rank)


def _bases(straight: Sequence[Candidate]) -> list[Candidate]:
    """Return the best plans of several stages that differ in more than their cut; those that fit come first."""
    best: dict[tuple[object, ...], Candidate] = {}
    for candidate in straight:
        if candidate.depth == 1 or candidate.options.extra_in_flight:  # schedules with chunks have no such option
            continue
        best.setdefault((candidate.rows, candidate.replicas, candidate.policies[0]), candidate)
    return list(best.values())[:BASES]


def lacks_memory(candidate: Candidate) -> bool:
    """Return whether a plan does not fit, or recomputes so that it does."""
    return candidate.over is not None or any(policy != "none" for policy in candidate.policies)


def _bases_with(option: str | None, planned: Iterable[Candidate], most: int) -> list[Candidate]:
    """Return the best plans of each schedule that has an option, if one is given, which differ in more than their cut."""
    best: dict[str, dict[tuple[object, ...], Candidate]] = {}
    for candidate in planned:
        has_option = option is None or option in jpipe.schedules.SCHEDULES[candidate.schedule].options
        if has_option and candidate.options.update_every == "batch":
            plans = best.setdefault(candidate.schedule, {})
            plans.setdefault((candidate.rows, candidate.replicas, candidate.policies[0]), candidate)
    return [candidate for plans in best.values() for candidate in list(plans.values())[:most]]


class _Variants:
    """The search for variants, which simulates them while they are few enough.

    Attributes:
        simulations: plans with their simulations.
        left_out: the number of plans that were not simulated.
    """

    def __init__(self, profile: Profile, topology: Topology, schedules: Sequence[str], global_norm: bool, max_delay: float | None) -> None:
        self.profile, self.topology, self.schedules, self.global_norm = profile, topology, schedules, global_norm
        self.max_delay, self._is_restricted = max_delay, global_norm or bool(profile.shared)
        self.simulations: dict[Candidate, Simulated] = {}
        self.left_out = 0
        self._spent = 0

    def simulate(self, variants: Sequence["_Variant"], best: Ranked | None) -> None:
        """Simulate variants in the order of their places; see `find_variants`."""
        fastest, delay = (math.inf, 0.0) if best is None else (best.seconds / best.candidate.batch, best.candidate.delay)
        shown, queue = set[str](), [(variant.place, n, variant) for n, variant in enumerate(variants)]
        heapq.heapify(queue)
        while queue:
            _, n, variant = heapq.heappop(queue)
            least = variant.least
            could_be_best = least * (1 + SLACK) < fastest or (delay > variant.candidate.delay and least * (1 - SLACK) <= fastest)
            if not could_be_best and (variant.name in shown or self._spent > FOR_SHOW):
                continue
            if variant.order_limit is not None and variant.candidate.options.order is None:
                if not self._affords(variant.part.plan, _SHARE_OF_ORDER):
                    continue
                variant = self._with_order(variant, variant.order_limit)
                if could_be_best:  # with an order it may no longer be
                    heapq.heappush(queue, (variant.place, n, variant))
                    continue
            if best is not None and could_be_best and not variant.is_bounded:
                variant = self._bounded(variant)
                heapq.heappush(queue, (variant.place, n, variant))
                continue
            if not self._affords(variant.part.plan):
                continue
            has_all = variant.is_bounded and has_bounds(variant.part.plan) and self.topology.cores is None
            bound = variant.least * variant.candidate.batch if has_all else None
            simulation = simulate_plan(variant.plan, variant.costs, self.topology, self.global_norm, bound)
            if simulation is None:
                continue
            found = priced(variant.candidate, variant.plan, variant.costs, simulation, self.topology)
            self.simulations[found] = simulation
            if best is None or found.over is not None:
                continue
            shown.add(variant.name)
            seconds, slack = found.seconds / found.batch, SLACK if found.delay < delay else 0.0
            if seconds * (1 - slack) < fastest:
                fastest, delay = seconds, found.delay

    def _affords(self, plan: jpipe.Plan, share: float = 1.0) -> bool:
        """Return whether a plan is among those to simulate, or do a share of that work for; where there are too many, smaller ones are."""
        count = math.ceil(share * forwards(plan))
        if self._spent + count > MOST_IN_ALL:
            self.left_out += 1
            return False
        self._spent += count
        return True

    def _with_order(self, variant: "_Variant", limit: int) -> "_Variant":
        """Return the variant with an order for the times of its stages, and with a bound for it."""
        latency = _message_seconds(variant.part, variant.costs)
        costs = slowed(variant.plan, variant.costs, self.topology)
        order = jpipe.schedules.greedy_order(variant.part.plan, costs, limits=limit, latency=latency)
        ordered = dataclasses.replace(variant.candidate.with_options(order=order, order_limit=limit), schedule=variant.name)
        return self._variant(ordered, order_limit=limit)

    def _bounded(self, variant: "_Variant") -> "_Variant":
        """Return the variant with the largest of the bounds, which count messages."""
        plan, link, *_ = variant.part
        self._spent += math.ceil(_SHARE_OF_BOUND * forwards(plan))
        costs = slowed(variant.plan, variant.costs, self.topology)
        if has_bounds(plan):
            least = unhindered_seconds(plan, costs, link, *window(plan))
        else:
            least = order_seconds(plan, costs, link, *window(plan), self.global_norm)
        return dataclasses.replace(variant, least=max(variant.least, least / variant.candidate.batch), is_bounded=True)

    def _variant(self, candidate: Candidate, schedule: str = "", order_limit: int | None = None) -> "_Variant":
        plan = candidate.plan(self.profile.ids)
        costs = self.profile.stage_costs(plan, candidate.rows)
        on_devices, part = slowed(plan, costs, self.topology), part_of(plan, self.topology, self._is_restricted)
        least = rank_seconds(part.plan, on_devices, self.topology.cores)
        if len(part.plan.workers) <= _MOST_WORKERS:
            least = max(least, port_seconds(part.plan, on_devices, part.link))
            if order_limit is None or candidate.options.order is not None:
                least = max(least, flush_seconds(part.plan, on_devices, part.link))
        return _Variant(schedule or candidate.schedule, candidate, plan, part, costs, least / candidate.batch, order_limit)

    def _lacks_norm(self, plan: jpipe.Plan) -> bool:
        """Return whether the schedule of a plan cannot do what the model or its optimizer needs."""
        return bool(excluded(plan, skip_nonfinite=self.global_norm, ties=bool(self.profile.shared)))

    def early(self, base: Candidate) -> Iterator["_Variant"]:
        """Yield a plan with split backwards, with and without additional microbatches in flight, if a link costs time."""
        plan = base.plan(self.profile.ids)
        if self._lacks_norm(plan):
            return
        costs = self.profile.stage_costs(plan, base.rows)
        if _message_seconds(part_of(plan, self.topology, self._is_restricted), costs) <= _SLOW * max(cost.forward for cost in costs):
            return
        for extra in sorted({0, base.options.extra_in_flight}):
            candidate = base.with_options(split_backward="early", extra_in_flight=extra)
            if candidate.is_within(self.max_delay):
                yield self._variant(candidate, f"{candidate.schedule} early")

    def saving(self, base: Candidate, share_optimizer: bool) -> Iterator["_Variant"]:
        """Yield the plan with fewer and fewer microbatches in flight, and with replicas that share an optimizer.

        Both without recomputation, and if the plan does not fit with it, with both.
        """
        plan = base.plan(self.profile.ids)
        rules, changed = jpipe.schedules.SCHEDULES[base.schedule], list[tuple[str, Candidate]]()
        usual = base.with_options(extra_in_flight=0).plan(self.profile.ids)
        most = max(rules.in_flight(usual, s) for s in range(base.depth))
        if "max_in_flight" in rules.options and most > 1:
            limits = sorted({max(most * part // 4, 1) for part in (1, 2, 3)})
            changed += [("max_in_flight", base.with_options(max_in_flight=limit, extra_in_flight=0)) for limit in limits]
        if share_optimizer and max(base.replicas) > 1:
            changed.append(("shard_optimizer", dataclasses.replace(base, shard_optimizer=True)))
        without = ("none",) * base.depth
        for policies in dict.fromkeys((without, base.policies) if base.over else (without,)):
            for option, saving in changed:
                candidate = dataclasses.replace(saving, policies=policies)
                if not self._lacks_norm(plan) and candidate.is_within(self.max_delay):
                    yield self._variant(candidate, f"{candidate.schedule}, {option}")

    def in_parts(self, planned: Sequence[Candidate]) -> Iterator["_Variant"]:
        """Yield the best plans of each schedule, and data parallelism, with sums in parts, where something waits for the sums."""
        counts: dict[tuple[str, bool], list[int]] = {}  # of those tried and found
        for base in planned:
            count = counts.setdefault((base.schedule, base.depth == 1), [0, 0])
            if count[1] < IN_PARTS and count[0] < MOST_TRIED:
                count[0] += 1
                if (candidate := with_sum_parts(base, self.profile, self.topology)) is not None:
                    count[1] += 1
                    yield self._variant(candidate, f"{candidate.schedule} in parts")

    def of_ranks(self, base: Candidate) -> Iterator["_Variant"]:
        """Yield legal plans of the schedules on the ranks of a plan."""
        for name in self.schedules:
            rules = jpipe.schedules.SCHEDULES[name]
            if "order" in rules.options:
                yield from self._ordered(base, name)
                continue
            for chunks in {"straight": (1,), "v": (2,)}.get(rules.layout, range(1 if rules.flushes else 2, MOST_CHUNKS + 1)):
                sync = self._is_restricted and needs_vertical_sync(name)
                for candidate in _chunked(self.profile, self.topology, base, name, chunks, sync):
                    if not self._lacks_norm(candidate.plan(self.profile.ids)) and candidate.is_within(self.max_delay):
                        yield self._variant(candidate)

    def _ordered(self, base: Candidate, schedule: str) -> Iterator["_Variant"]:
        """Yield plans with an order for the times of their stages, with the activations of 1F1B's first rank, and with twice as many."""
        for layout, chunks in (("zb_h1", 1), ("zb_v", 2)):
            for candidate in _chunked(self.profile, self.topology, base, layout, chunks):
                yield from (self._variant(candidate, schedule, limit) for limit in (base.depth * chunks, 2 * base.depth * chunks))


@dataclass(frozen=True)
class _Variant:
    """A plan to simulate.

    Attributes:
        name: its schedule, as one of the kinds to show.
        candidate: the plan, without its costs; before it has its order, one of the schedule with the same layout.
        plan: the same.
        part: what is simulated of it.
        costs: the costs of its stages.
        least: a lower bound on its seconds per row.
        order_limit: for which an order is made; None: it has no order of its own.
        is_bounded: whether `least` counts messages, if there is such a bound for the plan.
    """

    name: str
    candidate: Candidate
    plan: jpipe.Plan
    part: Part
    costs: Sequence[jpipe.programs.StageCost]
    least: float
    order_limit: int | None
    is_bounded: bool = False

    @property
    def place(self) -> float:
        """Where it stands in the order: plans with the best bounds come first, but later the longer their simulations take."""
        return self.least * (1 + forwards(self.part.plan) / _LONG)


def _message_seconds(part: Part, costs: Sequence[jpipe.programs.StageCost]) -> float:
    """Return the seconds of the slowest message between the first replicas of neighbouring stages on different ranks."""
    plan, link, *_ = part
    first = [plan.rank_of[workers[0]] for workers in plan.stage_workers]
    crossed = [(link(first[s], first[s + 1]), costs[s].outputs) for s in range(plan.depth - 1) if first[s] != first[s + 1]]
    return max((one.latency + size / one.bandwidth for one, size in crossed), default=0.0)


def _chunked(
    profile: Profile, topology: Topology, base: Candidate, schedule: str, chunks: int, vertical_sync: bool = False
) -> Iterator[Candidate]:
    """Yield the plan with this number of chunks on each rank, if it is legal."""
    stages = base.depth * chunks
    if stages > len(profile.ids):
        return
    costs = profile.costs(base.rows).values()
    recomputes = int(repeats_forward(base.policies[0]))
    seconds = [(1 + recomputes) * cost.forward + cost.backward for cost in costs]
    starts = base.starts if chunks == 1 else balance(seconds, stages)
    candidate = dataclasses.replace(
        base,
        schedule=schedule,
        starts=starts,
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


def priced(
    candidate: Candidate, plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], simulation: Simulated, topology: Topology
) -> Candidate:
    """Return the candidate with its simulation's numbers."""
    costs, memory = slowed(plan, costs, topology), candidate.most_of_replicas(simulation.peak_bytes)
    worst, lacks = lacking(memory, limits_of(plan, topology))
    busy = [sum(costs[s].forward + costs[s].backward for s in stages) for stages in plan.pipeline_ranks]
    return dataclasses.replace(
        candidate,
        seconds=simulation.batch_seconds,
        bubble=simulation.bubble,
        memory=memory,
        sent=sum(simulation.sent_bytes) / candidate.batch,
        bound=f"rank {max(range(len(busy)), key=busy.__getitem__)} computes",
        over=(worst, round(lacks)) if lacks > 0 else None,
    )
