"""All candidates: parallel equal pipelines of all schedules, and PipeDream's stages, each with its own number of replicas."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import jpipe
from jpipe.plan import repeats_forward
from jpipe.schedules import PlanOptions
from jpipe_planner.cost.devices import MOST_DIFFERING, slowed
from jpipe_planner.cost.price import all_reduce_seconds
from jpipe_planner.cost.shape import planned_schedules, updates_early
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.sharded import NO_MESH, Degrees, Meshes
from jpipe_planner.search.candidate import USUAL, Asked, Candidate
from jpipe_planner.search.parallel import EXTRA, in_orders, pipelines_seconds, search_parallel
from jpipe_planner.search.pipedream.paper import search_paper
from jpipe_planner.search.pipedream.partition import SCHEDULE, Partition, Placed, Problem, evaluate_partition
from jpipe_planner.search.pipedream.search import search_pipedream

Updates = Literal["batch", "replicas", "text", "code"]
"""How PipeDream's stages update and are searched; see `find_candidates`."""


def has_searchable_stages(topology: Topology) -> bool:
    """Return whether PipeDream's stages, each with its own number of replicas, are searched: not for very many devices that differ."""
    return not topology.differing or topology.num_devices <= MOST_DIFFERING


def find_candidates(
    profile: Profile,
    topology: Topology,
    batch: int,
    *,
    exact: bool = True,
    schedules: Sequence[str] | None = None,
    pipedream: Updates = "batch",
    meshes: Sequence[Degrees] = (NO_MESH,),
    replicas: bool = True,
    max_delay: float | None = None,
    global_norm: bool = False,
    asked: Asked = USUAL,
) -> list[Candidate]:
    """Return all plans of equal pipelines, and for each microbatch size the best of PipeDream's (1F1B round-robin).

    Schedules that do not flush are tried with 0 to 2 additional microbatches in flight. If layers share a parameter, or gradients are
    clipped by their norm over all stages, those that `updates_early` names are left out, and `pipedream` is tried with `vertical_sync`
    and equal pipelines only. Data parallelism is tried with each schedule that does not flush, too: the sum of an update then overlaps with
    the next computations, and is applied one update late.

    Args:
        profile: the model's costs.
        topology: the topology.
        batch: the largest number of rows per update.
        exact: whether the batch must have exactly that many rows.
        schedules: the schedules to try, of `planned_schedules`; None: all of them.
        pipedream: how PipeDream's stages update and are searched. "batch": all update once per batch, so their replicas divide its
            microbatches. "replicas": each updates after one microbatch of each of its replicas, whose number is then free, as in the
            original; the batch may be smaller. "text" and "code": the same by the paper's own recurrence, with the cost of its text or of
            its code.
        meshes: the meshes to try, each in place of a device; of `possible_degrees`, or others.
        replicas: whether stages may have replicas. Without, plans with fewer stages than devices leave the remaining devices idle.
        max_delay: the largest mean delay of a plan in updates, see `Candidate.delay`; 0 allows only plans without a delay; None: any.
        global_norm: whether gradients are clipped by their norm over all stages.
        asked: what plans are to do in addition. Pipelines that agree are equal ones; messages between meshes cannot be compressed.
    """
    schedules = planned_schedules() if schedules is None else schedules
    is_restricted = global_norm or bool(profile.shared)
    if is_restricted:
        schedules = tuple(name for name in schedules if not updates_early(name))
    views, candidates = Meshes(profile, topology), list[Candidate]()
    for degrees in meshes:
        options: dict[str, Any] = {"exact": exact, "replicas": replicas, "max_delay": max_delay, "global_norm": global_norm}
        options["asked"] = asked
        searched = search_parallel(*views.of(degrees), batch, schedules=schedules, **options)
        of_mesh, machine = views.of(degrees)
        if SCHEDULE.name in schedules and not is_restricted and asked.agree is None and has_searchable_stages(machine):
            found = in_orders(machine, partial(_pipedream, of_mesh, batch=batch, exact=exact, how=pipedream))
            stages = [dataclasses.replace(one, links=asked.of_pipelines(1, one.depth).links) for one in found if one.is_within(max_delay)]
            searched += [one for one in stages if one.depth > 1 or one.options.update_every == "replicas"]  # else among the equal pipelines
        candidates += searched if degrees.size == 1 else [on_meshes(candidate, degrees) for candidate in searched]
    useful = [candidate for candidate in candidates if candidate.depth > 1 or _is_data_parallelism(candidate, schedules)]
    useful = _without_equal_ones(useful)
    return useful if replicas else [candidate for candidate in useful if max(candidate.replicas) == 1]


def _is_data_parallelism(candidate: Candidate, schedules: Sequence[str]) -> bool:
    """Return whether a plan of one stage differs from the remaining ones.

    In one stage there is nothing to pipeline. All schedules that flush are equal there; a schedule that does not applies the sum of the
    gradients of several replicas one update late, so that it overlaps with the next computations.
    """
    rules = jpipe.schedules.SCHEDULES[candidate.schedule]
    return rules.data_parallel or len(schedules) == 1 or candidate.is_late_data_parallel


def _without_equal_ones(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Leave out data parallelism of a schedule that does the same as with an earlier one: late by as much, with as many microbatches."""
    seen, different = set[tuple[object, ...]](), []
    for candidate in candidates:
        if candidate.is_late_data_parallel:
            same = candidate.rows, candidate.microbatches, candidate.replicas, candidate.degrees, candidate.delay
            if same in seen:
                continue
            seen.add(same)
        different.append(candidate)
    return different


def on_meshes(candidate: Candidate, degrees: Degrees) -> Candidate:
    """Return a candidate for meshes from one for their profile and topology."""
    return dataclasses.replace(candidate, degrees=degrees, sent=candidate.sent * degrees.size)


def _pipedream(profile: Profile, topology: Topology, batch: int, exact: bool, how: Updates) -> Iterator[Candidate]:
    if how in ("text", "code") and topology.differing:
        raise jpipe.InputError(
            f"--pipedream {how}: the paper's recurrence is for equal devices, found some that differ; use batch or replicas"
        )
    for n, rows in enumerate(profile.sizes):
        costs = list(profile.costs(rows).values())
        policies = tuple(policy for policy in jpipe.plan.RECOMPUTE if policy == "full" or all(policy in cost.residuals for cost in costs))
        if batch < rows or (exact and batch % rows):
            continue
        microbatches: int | Literal["replicas"] = batch // rows if how == "batch" else "replicas"
        problem = Problem(
            costs,
            topology,
            microbatches,
            inputs=profile.inputs[n],
            labels=profile.labels[n],
            dispatch=profile.dispatch,
            memory=topology.device.limit,
            policies=policies,
        )
        partition = search_paper(problem, how) if how == "text" or how == "code" else search_pipedream(problem)
        for extra in EXTRA if len(partition.stages) > 1 else (0,):
            more = dataclasses.replace(problem, options=PlanOptions(extra_in_flight=extra))
            evaluated = evaluate_partition(more, partition.stages)
            same = dataclasses.replace(partition, memory=evaluated.memory, over=evaluated.over)
            candidate = as_candidate(more, same, rows)
            if candidate.batch <= batch:
                yield candidate


def closed_form(profile: Profile, topology: Topology, candidate: Candidate) -> float:
    """Return the seconds per batch of a plan in closed form, for any costs of its layers and links.

    Args:
        profile: the costs.
        topology: the links, and cores if devices share them.
        candidate: a plan for these layers and devices.
    """
    plan, in_order = candidate.plan(profile.ids), candidate.in_order(topology)
    if set(candidate.replicas) == {candidate.replicas[0]} and candidate.options.update_every == "batch":
        seconds = pipelines_seconds(profile, topology, candidate)
    else:
        every: int | Literal["replicas"] = "replicas" if candidate.options.update_every == "replicas" else candidate.microbatches
        problem = Problem(list(profile.costs(candidate.rows).values()), in_order, every, dispatch=profile.dispatch)
        ends = (*candidate.starts[1:], len(profile.ids))
        firsts = (0, *accumulate(candidate.replicas))
        placed = map(Placed, candidate.starts, ends, firsts, candidate.replicas, candidate.policies)
        seconds = evaluate_partition(problem, list(placed)).seconds * candidate.microbatches
    computing = 0.0
    for s, cost in enumerate(slowed(plan, profile.stage_costs(plan, candidate.rows), topology)):
        updates = plan.microbatches / plan.microbatches_per_update(s)
        computing += plan.microbatches * (cost.forward + cost.backward) + updates * plan.replicas[s] * cost.update
    bubble = 1 - computing / (candidate.num_ranks * seconds)
    return dataclasses.replace(candidate, seconds=seconds, bubble=bubble).sharing(topology.cores).seconds


def as_candidate(problem: Problem, partition: Partition, rows: int) -> Candidate:
    """Return a partition as a candidate.

    Args:
        problem: the problem that it solves.
        partition: the solution.
        rows: rows per microbatch.
    """
    plan = partition.plan([str(n) for n in range(len(problem.layers))], problem)
    seconds = partition.seconds * plan.microbatches
    computing = sent = 0.0
    for stage in partition.stages:
        layers = problem.layers[stage.start : stage.stop]
        recomputation = sum(layer.forward for layer in layers) if repeats_forward(stage.recompute) else 0.0
        slowness = problem.kind(stage).slowness
        each = sum(layer.forward + layer.backward for layer in layers) + recomputation + 2 * problem.dispatch
        computing += plan.microbatches * slowness * each
        updates = plan.microbatches // problem.microbatches_per_update(stage.replicas)
        computing += updates * stage.replicas * slowness * (sum(layer.update for layer in layers) + problem.dispatch)
        sent += updates * 2 * (stage.replicas - 1) * sum(layer.summed for layer in layers)
        sent += plan.microbatches * 2 * layers[-1].outputs if stage.stop < len(problem.layers) else 0
    return Candidate(
        schedule=plan.schedule,
        rows=rows,
        microbatches=plan.microbatches,
        starts=tuple(stage.start for stage in partition.stages),
        replicas=tuple(stage.replicas for stage in partition.stages),
        policies=tuple(stage.recompute for stage in partition.stages),
        options=plan.options,
        keep_together="replicas",
        seconds=seconds,
        bubble=1 - computing / (partition.devices * seconds),
        memory=partition.memory,
        sent=sent / (rows * plan.microbatches),
        bound=_bound(problem, partition),
        over=partition.over,
    ).sharing(problem.topology.cores)


def _bound(problem: Problem, partition: Partition) -> str:
    kind, s = partition.bound
    if kind == "cut":
        return f"cut {s}"
    stage = partition.stages[s]
    layers = problem.layers[stage.start : stage.stop]
    devices = problem.kind(stage)
    summed = all_reduce_seconds(sum(layer.summed for layer in layers), stage.replicas, devices.link)
    computes = devices.slowness * sum(layer.forward + layer.backward for layer in layers)
    return f"sum of stage {s}" if summed > computes else f"stage {s} computes"
