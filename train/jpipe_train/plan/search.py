"""Search for the plans of a request, and rank them."""

from dataclasses import dataclass
from typing import Any

import jpipe
from jpipe import InputError
from jpipe.plan import excluded
from jpipe_planner import (
    NO_MESH,
    Asked,
    Attempt,
    Candidate,
    Choice,
    Degrees,
    Meshes,
    Profile,
    Ranked,
    Topology,
    choose,
    find_candidates,
    find_offloads,
    find_variants,
    has_searchable_stages,
    improve,
    is_planned,
    links_of,
    mesh_refusal,
    mesh_seconds,
    needs_vertical_sync,
    offload_bases,
    on_meshes,
    planned_schedules,
    possible_degrees,
    search_parallel,
    updates_early,
    variant_schedules,
)
from jpipe_planner.ranking import table
from jpipe_train.config.config import MOST_MICROBATCHES
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count
from jpipe_train.plan.inputs import ALL, Request

MANY_DEVICES = 4096  # from this number on, a search is announced as long

MOST_SHOWN = 10  # kinds of plans that are simulated, if only for comparison, of which each schedule of `variant_schedules` is one
LEAST_SHOWN = 3  # of them, those of the other schedules

_FASTER = 0.01  # relative gain above which a faster plan with delayed weights is mentioned
_NEEDS = {"skip_nonfinite": "optimizer.clip_global_norm, skip_nonfinite or a dynamic loss scale", "ties": "shared parameters"}
_SMALL = jpipe.Plan.even(["a", "b"], 2, replicas=2)  # of which each schedule is asked what it excludes


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        choice: the ranking.
        candidates: all candidates with their estimates.
        known: the simulated or compiled results of some candidates.
        left_out: the number of plans with chunks or split backwards that were not simulated, because all would take too long.
        delayed: the best estimated plan of the schedules that do not flush, if these were not requested and it is faster.
        compiled: the number of plans at the top of the ranking whose stages were compiled.
        attempts: the plans whose compiled stages do not fit.
    """

    choice: Choice
    candidates: tuple[Candidate, ...]
    known: dict[Candidate, Ranked]
    left_out: int = 0
    delayed: Candidate | None = None
    compiled: int = 0
    attempts: tuple[Attempt, ...] = ()


def refused_schedules(request: Request, global_norm: bool, shares: bool = False) -> tuple[str, dict[str, str]]:
    """Return which requested schedules cannot be used.

    Args:
        request: the requirements.
        global_norm: as in `search`.
        shares: whether layers share parameters.

    Returns:
        What they cannot be used with, and why, by name.

    Raises:
        InputError: no requested schedule can be used.
    """
    arguments, reasons = {"skip_nonfinite": global_norm, "ties": shares}, dict[str, str]()
    needs = " or ".join(_NEEDS[option] for option, is_set in arguments.items() if is_set)
    for name in request.allowed:
        fields = {"schedule": name, "agree": request.asked.agree, "vertical_sync": bool(needs) and needs_vertical_sync(name)}
        if reason := excluded(_SMALL.model_copy(update=fields), **arguments):
            reasons[name] = reason.partition(": ")[2]
    if all(name in reasons for name in request.allowed):
        names = {why: ", ".join(name for name in reasons if reasons[name] == why) for why in reasons.values()}
        raise InputError("--schedules: " + "; ".join(f"{name} cannot be used with {needs}: {why}" for why, name in names.items()))
    return needs, reasons


def _usable_schedules(profile: Profile, request: Request, global_norm: bool, reporter: Reporter) -> tuple[str, ...]:
    """Return the schedules to try, and print what is left out because of options or shared parameters.

    Raises:
        InputError: no requested schedule can be used.
    """
    needs, reasons = refused_schedules(request, global_norm, bool(profile.shared))
    schedules = tuple(name for name in request.allowed if name not in reasons)
    for name, why in reasons.items():
        reporter.say(f"left out, because of {needs}: {name}: {why}")
    for name in filter(needs_vertical_sync, schedules if needs else ()):
        reporter.say(f"{name} is tried with vertical_sync and equal pipelines only, because of {needs}")
    return schedules


def _say_how_stages_are_searched(topology: Topology, asked: Asked, reporter: Reporter) -> None:
    """Print why PipeDream's stages are not searched, or that it can take minutes."""
    if asked.agree is not None:
        reporter.say("left out: different numbers of replicas per stage, because pipelines that agree have equal stages")
    elif not has_searchable_stages(topology):
        reporter.say("left out: different numbers of replicas per stage, for so many devices that differ")
    elif topology.num_devices >= MANY_DEVICES:
        reporter.say(
            f"PipeDream's stages are searched exactly, which can take minutes for {topology.num_devices:,} devices; "
            "--schedules without pipedream leaves that out"
        )


def search(profile: Profile, topology: Topology, batch: int, request: Request, global_norm: bool, reporter: Reporter) -> SearchResult:
    """Find and rank all plans that a request allows.

    Args:
        profile: the costs of the model's layers.
        topology: the machines to plan for.
        batch: rows between two updates.
        request: further requirements.
        global_norm: whether updates use the norm of the gradients of all stages, which not all schedules support.
        reporter: prints what was left out.

    Raises:
        InputError: no plan has such a batch, or none of the requested schedules supports the norm or shared parameters.
    """
    asked, schedules = request.asked, _usable_schedules(profile, request, global_norm, reporter)
    if "pipedream" in schedules:
        _say_how_stages_are_searched(topology, asked, reporter)
    planned, meshes = tuple(filter(is_planned, schedules)), _meshes(profile, topology, request, reporter)
    updates, replicas = request.pipedream or "batch", request.replicas
    limits: dict[str, Any] = {"exact": not request.up_to, "max_delay": request.max_delay, "global_norm": global_norm, "asked": asked}
    considered = find_candidates(profile, topology, batch, schedules=planned, pipedream=updates, meshes=meshes, replicas=replicas, **limits)
    if not replicas:
        considered = [candidate for candidate in considered if max(candidate.replicas) == 1]
        reporter.say("left out: replicas, because layers carry their state from batch to batch")
    known: dict[Candidate, Ranked] = {}
    on_all_devices, candidates = _allowed(considered, topology, request)
    most = max(MOST_SHOWN - sum(name in schedules for name in variant_schedules()), LEAST_SHOWN)
    choice = choose(profile, topology, candidates, most=most, global_norm=global_norm, tried=known)
    best = next((one for one in choice.ranked[:1] if one.simulated is not None), None)
    fastest = min(considered, key=lambda candidate: candidate.rank).degrees if considered else meshes[0]
    options: dict[str, Any] = {
        "all_devices": request.all_devices,
        "degrees": fastest,
        "best": best,
        "share_optimizer": request.share_optimizer and asked.agree is None,
    }
    variants = find_variants(profile, topology, batch, schedules=schedules, planned=considered, **limits, **options)
    found = {one: Ranked(one, simulated) for one, simulated in variants.simulated.items() if replicas or max(one.replicas) == 1}
    varied_on_all_devices, varied = _allowed(list(found), topology, request)
    considered, on_all_devices, candidates = [*considered, *found], [*on_all_devices, *varied_on_all_devices], [*candidates, *varied]
    if not candidates:
        raise _no_candidate(profile, topology, batch, request, considered, on_all_devices)
    if len(candidates) < len(on_all_devices):
        number = count(len(on_all_devices) - len(candidates), "candidate")
        reporter.say(f"{number} left out, with more than {MOST_MICROBATCHES:,} microbatches")
    known |= {one: found[one] for one in varied}
    choice = improve(choice.with_more([found[one] for one in varied], len(varied)), known, request.max_delay)
    if request.offload or not choice.ranked:
        choice = _with_host_memory(choice, candidates, known)
    searched = set(candidates)
    candidates += [one.candidate for one in choice.ranked if one.candidate not in searched]
    delayed = None
    if not request.schedules and request.max_delay is None and choice.ranked:
        delayed = _faster_with_delay(profile, topology, batch, request, global_norm, choice.ranked[0])
    return SearchResult(choice, tuple(candidates), known, variants.left_out, delayed)


def _with_host_memory(choice: Choice, candidates: list[Candidate], known: dict[Candidate, Ranked]) -> Choice:
    """Return the ranking with plans that keep parts of their state in host memory, and add these to the others."""
    found = find_offloads(choice, offload_bases(candidates))
    candidates += [one.candidate for one in found]
    known |= {one.candidate: one for one in found}
    return choice.with_more(found, len(found))


def _allowed(considered: list[Candidate], topology: Topology, request: Request) -> tuple[list[Candidate], list[Candidate]]:
    """Return the candidates that use all devices, if they must, and those of them that `jpipe train` can run."""
    on_all_devices = [candidate for candidate in considered if candidate.devices == topology.num_devices or not request.all_devices]
    return on_all_devices, [candidate for candidate in on_all_devices if candidate.microbatches <= MOST_MICROBATCHES]


def _faster_with_delay(
    profile: Profile, topology: Topology, batch: int, request: Request, global_norm: bool, best: Ranked
) -> Candidate | None:
    """Return the fastest even pipeline of the schedules that do not flush by closed form, if its weights are delayed and it is faster."""
    is_restricted, degrees = global_norm or bool(profile.shared), best.candidate.degrees
    names = [
        name for name in planned_schedules() if not jpipe.schedules.SCHEDULES[name].flushes and not (is_restricted and updates_early(name))
    ]
    considered = search_parallel(
        *Meshes(profile, topology).of(degrees),
        batch,
        exact=not request.up_to,
        schedules=names,
        replicas=request.replicas,
        global_norm=global_norm,
        asked=request.asked,
    )
    on_all_devices = [c for c in considered if c.num_ranks * degrees.size == topology.num_devices or not request.all_devices]
    fitting = [c for c in on_all_devices if c.over is None and c.delay and c.microbatches <= MOST_MICROBATCHES]
    fastest = next(iter(fitting), None)
    if fastest is None or fastest.samples_per_second <= (1 + _FASTER) * best.samples_per_second:
        return None
    return on_meshes(fastest, degrees) if degrees.size > 1 else fastest


def _no_candidate(
    profile: Profile, topology: Topology, batch: int, request: Request, considered: list[Candidate], on_all_devices: list[Candidate]
) -> InputError:
    """Return the error if no plan is left of all candidates, or of those that use the required number of devices."""
    named = () if ALL in request.schedules else request.schedules
    conditions = [" or ".join(named)] if named else []
    if request.max_delay is not None:
        conditions.append(f"a mean delay of at most {request.max_delay:g} updates")
    requested = f" with {' and '.join(conditions)}" if conditions else ""
    devices = count(topology.num_devices, "device")
    allow = "allow " + ("" if request.max_delay is None else "a larger delay, ") + "other " + ("schedules, " if named else "")
    if considered and not on_all_devices:
        most = max(candidate.devices for candidate in considered)
        why, change = "", f" devices, or {allow}batches"
        if not request.replicas:
            layers = count(len(profile.layers), "layer")
            why = f": layers carry their state from batch to batch, so stages have no replicas, and {layers} make at most as many stages"
            change = " devices, or a model of more layers"
        return InputError(
            f"plan: no plan{requested} has a batch of {batch} rows on all of {devices}, only on {most}{why}; use {most}{change}"
        )
    limit = f"at most {MOST_MICROBATCHES:,} " if on_all_devices else ""
    sizes = ", ".join(map(str, profile.sizes))
    change = f"{allow}batches or numbers of devices"
    if all(batch % size for size in profile.sizes):
        change = f"use a multiple of {' or '.join(map(str, profile.sizes))}, or a profile of other microbatches"
    return InputError(f"plan: no plan{requested} has a batch of {batch} rows in {limit}microbatches of {sizes} rows on {devices}; {change}")


def _meshes(profile: Profile, topology: Topology, request: Request, reporter: Reporter) -> tuple[Degrees, ...]:
    """Return the meshes to try, and print the cost of requested ones that are larger than a server.

    Raises:
        InputError: a requested mesh does not fit the devices or the layers.
    """
    if request.asked.links is not None:
        return (NO_MESH,)
    if request.degrees is None:
        return possible_degrees(profile, topology)
    for degrees in request.degrees:
        if reason := mesh_refusal(profile, degrees):
            raise InputError(f"--mesh: {reason}")
        topology.groups(degrees.size)  # raises InputError unless they fill the machine
        if degrees.size > topology.most_in_mesh:
            rows = max(rows for rows in profile.sizes if rows % degrees.rows == 0)
            inside, links = topology.mesh_link(topology.most_in_mesh), links_of(profile, topology, degrees)
            seconds, seconds_inside = (
                mesh_seconds(profile, rows, degrees, both) for both in (links, links._replace(model=inside, expert=inside, all=inside))
            )
            slower = f", {seconds / seconds_inside:.1f} times as long as over links like those inside one" if seconds_inside else ""
            level = f"the {count(topology.most_in_mesh, 'device')} of {topology.levels[0].name or 'the innermost level'}"
            reporter.say(
                f"--mesh: a mesh ({degrees}) is larger than {level}: sums and gathers inside it take {1e3 * seconds:,.1f} ms for a "
                f"microbatch of {table.rows_of(rows)}{slower}"
            )
    return request.degrees
