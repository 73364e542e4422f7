"""Search for the plans of a request, and rank them."""

from dataclasses import dataclass
from typing import Any

from jpipe_planner import (
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
    find_variants,
    is_planned,
    mesh_refusal,
    mesh_seconds,
    on_meshes,
    planned_schedules,
    possible_degrees,
    search_parallel,
    sharing_refusal,
)
from jpipe_planner.ranking import table

import jpipe
from jpipe import InputError
from jpipe_train.config.config import MOST_MICROBATCHES
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count
from jpipe_train.plan.inputs import Request

MANY_DEVICES = 4096  # for which a search is announced as a long one


_FASTER = 0.01  # relative difference from which on a faster plan with delayed weights is worth a line
_NEEDS_NORM = "optimizer.clip_global_norm, skip_nonfinite or a dynamic loss scale"


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Attributes:
        choice: the ranking.
        candidates: all that were considered, as estimated.
        known: what simulating or compiling said of some of them.
        left_out: how many plans with chunks or split backwards were not simulated, because all together would take too long.
        delayed: the best plan by its estimate of the schedules that do not flush, if these were not asked for and it is faster.
        compiled: of how many plans at the beginning of the ranking the stages were compiled.
        attempts: the plans whose compiled stages do not fit.
    """

    choice: Choice
    candidates: tuple[Candidate, ...]
    known: dict[Candidate, Ranked]
    left_out: int = 0
    delayed: Candidate | None = None
    compiled: int = 0
    attempts: tuple[Attempt, ...] = ()


def _possible(profile: Profile, request: Request, global_norm: bool, reporter: Reporter) -> tuple[tuple[str, ...], str]:
    """The schedules to try; if each of them can be used with one stage only, why.

    Says which schedules are left out because of options or shared parameters.
    """
    allowed = request.allowed
    used = " or ".join([_NEEDS_NORM] * global_norm + ["shared parameters"] * bool(profile.shared))
    refusals = {name: why for name in allowed if used and (why := sharing_refusal(name))}
    schedules = tuple(name for name in allowed if name not in refusals)
    if schedules:
        for name, why in refusals.items():
            reporter.say(f"left out, because of {used}: {name}: {why}")
        return schedules, ""
    return allowed, "; ".join(f"{name} with more than one stage cannot be used with {used}: {why}" for name, why in refusals.items())


def search(profile: Profile, topology: Topology, batch: int, request: Request, global_norm: bool, reporter: Reporter) -> SearchResult:
    """Find and rank all plans that a run may have.

    Args:
        profile: the model's costs.
        topology: where it is to run.
        batch: rows between two updates.
        request: what else is asked for.
        global_norm: whether updates use the norm of the gradients of all stages, which not all schedules can.
        reporter: prints what was left out.

    Raises:
        InputError: no plan has such a batch, or none of the schedules asked for can use the norm or have shared parameters.
    """
    schedules, why_one_stage = _possible(profile, request, global_norm, reporter)
    if topology.num_devices >= MANY_DEVICES and "pipedream" in schedules:
        reporter.say(
            f"PipeDream's stages are searched exactly, which can take minutes for {topology.num_devices:,} devices; "
            "--schedules without pipedream leaves that out"
        )
    exact = not request.up_to
    planned, meshes = tuple(filter(is_planned, schedules)), _meshes(profile, topology, request, reporter)
    how = request.pipedream or "batch"
    replicas = request.replicas
    found = find_candidates(profile, topology, batch, exact=exact, schedules=planned, pipedream=how, meshes=meshes, replicas=replicas)
    best = min(found, key=lambda candidate: candidate.rank).degrees if found else meshes[0]
    options: dict[str, Any] = {"all_devices": request.all_devices, "global_norm": global_norm, "degrees": best}
    variants = find_variants(profile, topology, batch, exact=exact, schedules=schedules, planned=found, **options)
    found += list(variants.simulated)
    if not replicas:
        found = [candidate for candidate in found if max(candidate.replicas) == 1]
        reporter.say("left out: replicas, because layers carry their state from batch to batch")
    if why_one_stage:
        found = [c for c in found if c.depth == 1 and not (global_norm and _norm_refusal(c.plan(profile.ids)))]
        if not found:
            raise InputError(f"--schedules: {why_one_stage}")
        reporter.say(f"left out: {why_one_stage}")
    used = [candidate for candidate in found if candidate.devices == topology.num_devices or not request.all_devices]
    candidates = [candidate for candidate in used if candidate.microbatches <= MOST_MICROBATCHES]
    if not candidates:
        raise _none_found(profile, topology, batch, request, found, used)
    if len(candidates) < len(used):
        many = count(len(used) - len(candidates), "candidate")
        reporter.say(f"{many} left out, with more than {MOST_MICROBATCHES:,} microbatches")
    known = {candidate: Ranked(candidate, variants.simulated[candidate]) for candidate in candidates if candidate in variants.simulated}
    choice = choose(profile, topology, candidates, global_norm=global_norm, tried=known)
    delayed = None
    if not request.schedules and choice.ranked:
        delayed = _faster_with_delay(profile, topology, batch, request, global_norm, choice.ranked[0])
    return SearchResult(choice, tuple(candidates), known, variants.left_out, delayed)


def _faster_with_delay(
    profile: Profile, topology: Topology, batch: int, request: Request, global_norm: bool, best: Ranked
) -> Candidate | None:
    """The fastest equal pipelines of the schedules that do not flush, by closed form; None if they are not faster than `best`."""
    used, degrees = global_norm or bool(profile.shared), best.candidate.degrees
    names = [name for name in planned_schedules() if not jpipe.schedules.SCHEDULES[name].flushes and not (used and sharing_refusal(name))]
    found = search_parallel(
        *Meshes(profile, topology).of(degrees), batch, exact=not request.up_to, schedules=names, replicas=request.replicas
    )
    used_devices = [c for c in found if c.workers * degrees.size == topology.num_devices or not request.all_devices]
    fitting = [c for c in used_devices if c.over is None and c.depth > 1 and c.microbatches <= MOST_MICROBATCHES]
    fastest = max(fitting, key=lambda candidate: candidate.samples_per_second, default=None)
    if fastest is None or fastest.samples_per_second <= (1 + _FASTER) * best.samples_per_second:
        return None
    return on_meshes(fastest, degrees) if degrees.size > 1 else fastest


def _none_found(
    profile: Profile, topology: Topology, batch: int, request: Request, found: list[Candidate], used: list[Candidate]
) -> InputError:
    """What is said where no plan is left: of those that were found, of those that use as many devices as they must."""
    asked = f" with {' or '.join(request.schedules)}" if request.schedules else ""
    devices, others = count(topology.num_devices, "device"), "schedules, " if asked else ""
    if found and not used:
        most = max(candidate.devices for candidate in found)
        why, change = "", f" devices, or allow other {others}batches"
        if not request.replicas:
            layers = count(len(profile.layers), "layer")
            why = f": layers carry their state from batch to batch, so stages have no replicas, and {layers} make at most as many stages"
            change = " devices, or a model of more layers"
        return InputError(f"plan: no plan{asked} has a batch of {batch} rows on all of {devices}, only on {most}{why}; use {most}{change}")
    limit = f"at most {MOST_MICROBATCHES:,} " if used else ""
    sizes = ", ".join(map(str, profile.sizes))
    return InputError(
        f"plan: no plan{asked} has a batch of {batch} rows in {limit}microbatches of {sizes} rows on {devices}; "
        f"allow other {others}batches or numbers of devices"
    )


def _meshes(profile: Profile, topology: Topology, request: Request, reporter: Reporter) -> tuple[Degrees, ...]:
    """The meshes to try. Says what those cost that are asked for and larger than a server.

    Raises:
        InputError: one that is asked for does not fit the devices or the layers.
    """
    if request.degrees is None:
        return possible_degrees(profile, topology)
    for degrees in request.degrees:
        if reason := mesh_refusal(profile, degrees):
            raise InputError(f"--mesh: {reason}")
        topology.groups(degrees.size)  # refuses what does not fill the machine
        if degrees.size > topology.most_in_mesh:
            rows = max(rows for rows in profile.sizes if rows % degrees.data == 0)
            inside, link = topology.mesh_link(topology.most_in_mesh), topology.mesh_link(degrees.model)
            taken, near = (
                mesh_seconds(profile, rows, degrees, links) for links in ((link, topology.mesh_link(degrees.size)), (inside, inside))
            )
            slower = f", {taken / near:.1f} times as long as over links like those inside one" if near else ""
            level = f"the {count(topology.most_in_mesh, 'device')} of {topology.levels[0].name or 'the innermost level'}"
            reporter.say(
                f"--mesh: a mesh ({degrees}) is larger than {level}: sums and gathers inside it take {1e3 * taken:,.1f} ms for a "
                f"microbatch of {table.rows_of(rows)}{slower}"
            )
    return request.degrees


def _norm_refusal(plan: jpipe.Plan) -> str:
    return jpipe.schedules.SCHEDULES[plan.schedule].norm_refusal(plan)
