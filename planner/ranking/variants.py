"""Plans with several stages on a rank, or with backwards in two halves, made from the best plans that have neither.

The search over all cuts is for one stage on each rank. What interleaving and split backwards gain depends little on the cut, so the best
cuts of `pipedream_flush` are taken, for a few microbatch sizes, widths and recomputations, and cut on into equal chunks. Each such plan is
simulated, for these schedules have no closed form.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jpipe
from jpipe import InputError
from planner.cost.shape import is_planned
from planner.cost.simulated import Simulated, forwards, network, simulated
from planner.machine.topology import Topology
from planner.profile.profile import Profile
from planner.search.balance import balance
from planner.search.candidate import Candidate
from planner.search.parallel import sweep

BASES = 4  # plans of one stage on each rank that are varied
MOST_CHUNKS = 3
MOST_MICROBATCHES = 1024  # of plans that are varied
MOST_IN_ALL = 60_000  # forwards of all simulations: some seconds
BASE = "pipedream_flush"


def variant_schedules() -> tuple[str, ...]:
    """The schedules of which `find_variants` makes plans; those without a flush with several chunks only."""
    return tuple(name for name, rules in jpipe.schedules.SCHEDULES.items() if not is_planned(name) or rules.layout == "looped")


def find_variants(
    profile: Profile,
    topology: Topology,
    batch: int,
    *,
    exact: bool = True,
    schedules: Sequence[str] | None = None,
    all_devices: bool = False,
    global_norm: bool = False,
) -> dict[Candidate, Simulated]:
    """Plans of these schedules with their simulations.

    Args:
        profile: the model's costs.
        topology: the topology.
        batch: the largest number of rows per update.
        exact: whether the batch must have exactly that many rows.
        schedules: those to try, of `variant_schedules`; None: all of them.
        all_devices: whether plans must use all devices.
        global_norm: whether gradients are clipped by their norm over all stages, for which updates wait.
    """
    schedules = variant_schedules() if schedules is None else [name for name in schedules if name in variant_schedules()]
    found: dict[Candidate, Simulated] = {}
    if not schedules:
        return found
    straight = sorted(sweep(profile, topology, batch, exact=exact, schedules=[BASE]), key=lambda candidate: candidate.rank)
    straight = [c for c in straight if c.microbatches <= MOST_MICROBATCHES and (not all_devices or c.devices == topology.num_devices)]
    spent = 0
    for base in _bases(straight):
        for candidate in _variants(profile, topology, base, schedules):
            plan = candidate.plan(profile.ids)
            rules = jpipe.schedules.SCHEDULES[candidate.schedule]
            if (global_norm or profile.shared) and rules.norm_refusal(plan):
                continue
            spent += forwards(plan)
            if spent > MOST_IN_ALL:
                return found
            costs = profile.stage_costs(plan, candidate.rows)
            known = simulated(plan, costs, topology, global_norm)
            if known is not None:
                found[_priced(candidate, plan, costs, known, topology)] = known
    return found


def _bases(straight: Sequence[Candidate]) -> list[Candidate]:
    """The best plans that differ in more than their cut; those that fit come first."""
    best: dict[tuple[object, ...], Candidate] = {}
    for candidate in straight:
        if candidate.depth > 1:
            best.setdefault((candidate.rows, candidate.replicas, candidate.policies[0]), candidate)
    return list(best.values())[:BASES]


def _variants(profile: Profile, topology: Topology, base: Candidate, schedules: Sequence[str]) -> Iterator[Candidate]:
    """Legal plans of these schedules on the ranks of a plan."""
    for name in schedules:
        rules = jpipe.schedules.SCHEDULES[name]
        if "order" in rules.options:
            yield from _ordered(profile, topology, base, name)
            continue
        for chunks in {"straight": (1,), "v": (2,)}.get(rules.layout, range(1 if rules.flushes else 2, MOST_CHUNKS + 1)):
            yield from _chunked(profile, base, name, chunks)


def _chunked(profile: Profile, base: Candidate, schedule: str, chunks: int) -> Iterator[Candidate]:
    """The plan of so many chunks for each rank, if it is legal: one, or none."""
    stages = base.depth * chunks
    if stages > len(profile.ids):
        return
    costs = profile.costs(base.rows).values()
    again = 0 if base.policies[0] == "none" else 1
    starts = base.starts if chunks == 1 else balance([(1 + again) * cost.forward + cost.backward for cost in costs], stages)
    candidate = dataclasses.replace(
        base,
        schedule=schedule,
        starts=starts,
        replicas=base.replicas[:1] * stages,
        policies=base.policies if chunks == 1 else base.policies[:1] * stages,
        chunks=chunks,
    )
    try:
        candidate.plan(profile.ids)
    except InputError:
        return
    yield candidate


def _ordered(profile: Profile, topology: Topology, base: Candidate, schedule: str) -> Iterator[Candidate]:
    """Plans with an order made for the times of their stages, with the activations of 1F1B's first rank, and with twice as many."""
    for like, chunks in (("zb_h1", 1), ("zb_v", 2)):
        for candidate in _chunked(profile, base, like, chunks):
            plan = candidate.plan(profile.ids)
            costs, link = profile.stage_costs(plan, candidate.rows), network(plan, topology)
            between = range(len(plan.rank_stages) - 1)
            latency = max((link(p, p + 1).latency + costs[p].outputs / link(p, p + 1).bandwidth for p in between), default=0.0)
            for limit in (base.depth * chunks, 2 * base.depth * chunks):
                order = jpipe.schedules.greedy_order(plan, costs, limits=limit, latency=latency)
                yield dataclasses.replace(candidate, schedule=schedule, order=order)


def _priced(
    candidate: Candidate, plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], known: Simulated, topology: Topology
) -> Candidate:
    """The candidate with its simulation's numbers."""
    width, limit = candidate.replicas[0], topology.device.memory
    memory = tuple(max(known.peak_bytes[p * width : (p + 1) * width]) for p in range(candidate.ranks))
    worst = max(range(len(memory)), key=memory.__getitem__)
    busy = [sum(costs[s].forward + costs[s].backward for s in stages) for stages in plan.rank_stages]
    return dataclasses.replace(
        candidate,
        seconds=known.batch_seconds,
        bubble=known.bubble,
        memory=memory,
        sent=sum(known.sent_bytes) / candidate.batch,
        bound=f"rank {max(range(len(busy)), key=busy.__getitem__)} computes",
        over=(worst, round(memory[worst] - limit)) if limit is not None and memory[worst] > limit else None,
    )
