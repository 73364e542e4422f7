"""Search for the plans that a request allows, and print which plans were left out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jpipe
from jpipe import InputError
from jpipe.plan import excluded
from jpipe_planner import Plans, Profile, Topology, find_plans
from jpipe_planner.cost.shape import needs_vertical_sync, planned_schedules
from jpipe_planner.profile.sharded import NO_MESH, Degrees, mesh_refusal, possible_degrees
from jpipe_planner.ranking.choose import Choice, Ranked
from jpipe_planner.search.candidate import Candidate
from jpipe_planner.search.candidates import find_candidates, has_searchable_stages
from jpipe_train.config.config import MOST_MICROBATCHES
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count
from jpipe_train.plan.inputs import ALL, Request

_FASTER = 0.01  # the least relative gain for which a faster plan with delayed weights is mentioned
_NEEDS = {"skip_nonfinite": "optimizer.clip_global_norm, skip_nonfinite or a dynamic loss scale", "ties": "shared parameters"}
_SMALL = jpipe.Plan.even(["a", "b"], 2, replicas=2)  # a plan to find out what each schedule excludes


def refused_schedules(request: Request, global_norm: bool, shares: bool = False) -> tuple[str, dict[str, str]]:
    """Return the requirements that restrict schedules, and why each unusable one is refused. Raise InputError if none is left."""
    arguments, reasons = {"skip_nonfinite": global_norm, "ties": shares}, dict[str, str]()
    needs = " or ".join(_NEEDS[option] for option, is_set in arguments.items() if is_set)
    for name in request.allowed:
        if request.extras.slices is not None and not jpipe.schedules.SCHEDULES[name].takes_slices:
            reasons[name] = "it has no order for slices"
            continue
        fields = {"schedule": name, "agree": request.extras.agree, "vertical_sync": bool(needs) and needs_vertical_sync(name)}
        if problem := excluded(_SMALL.model_copy(update=fields), **arguments):
            reasons[name] = problem._replace(where="").text()
    if all(name in reasons for name in request.allowed):
        names = {why: ", ".join(name for name in reasons if reasons[name] == why) for why in reasons.values()}
        raise InputError(
            "--schedules: " + "; ".join(f"{name} cannot be used with {needs or 'plan.slices'}: {why}" for why, name in names.items())
        )
    return needs, reasons


def search(profile: Profile, topology: Topology, batch: int, request: Request, global_norm: bool, reporter: Reporter) -> Plans:
    """Find and rank all plans that a request allows; `batch` counts the rows between two updates.

    Not all schedules support the `global_norm` of the gradients of all stages. `reporter` prints which plans were left out. Raise
    InputError if no plan has this batch size, or no requested schedule supports the norm or shared parameters.
    """
    needs, reasons = refused_schedules(request, global_norm, bool(profile.shared))
    schedules = tuple(name for name in request.allowed if name not in reasons)
    for name, why in reasons.items():
        reporter.say(f"left out, because of {needs or 'plan.slices'}: {name}: {why}")
    for name in filter(needs_vertical_sync, schedules if needs else ()):
        reporter.say(f"{name} is tried with vertical_sync and equal pipelines only, because of {needs}")
    if "pipedream" in schedules and request.extras.agree is not None:
        reporter.say("left out: different numbers of replicas per stage, because pipelines that agree have equal stages")
    elif "pipedream" in schedules and not has_searchable_stages(topology):
        reporter.say("left out: different numbers of replicas per stage, because too many devices differ")
    options: dict[str, Any] = {
        "exact": not request.up_to,
        "replicas": request.replicas,
        "global_norm": global_norm,
        "extras": request.extras,
    }
    plans = find_plans(
        *(profile, topology, batch),
        schedules=schedules,
        pipedream=request.pipedream or "batch",
        meshes=_meshes(profile, topology, request, reporter),
        all_devices=request.all_devices,
        most_microbatches=MOST_MICROBATCHES,
        max_delay=request.max_delay,
        share_optimizer=request.share_optimizer,
        offload=request.offload,
        **options,
    )
    if profile.uncut:
        reporter.say(f"left out: slices of rows, because {profile.uncut}")
    if not request.replicas:
        reporter.say("left out: replicas, because layers carry their state from batch to batch")
    if not plans.candidates:
        raise _no_candidate(profile, topology, batch, request, plans.excluded)
    if many := sum(one.microbatches > MOST_MICROBATCHES for one in plans.excluded):
        reporter.say(f"{count(many, 'candidate')} left out, with more than {MOST_MICROBATCHES:,} microbatches")
    if not request.schedules and request.max_delay is None and plans.choice.ranked:
        return replace(plans, delayed=_faster_with_delay(plans.choice, batch, request, options))
    return plans


def _faster_with_delay(choice: Choice, batch: int, request: Request, options: dict[str, Any]) -> Ranked | None:
    """Simulate the best plan, by its estimate, of the schedules that do not flush. Return it if it is faster and has delayed weights."""
    best, names = choice.ranked[0], [name for name in planned_schedules() if not jpipe.schedules.SCHEDULES[name].flushes]
    considered = find_candidates(choice.profile, choice.topology, batch, schedules=names, meshes=[best.candidate.degrees], **options)
    usable = (
        one
        for one in considered
        if one.over is None and one.delay and one.microbatches <= MOST_MICROBATCHES
        if one.devices == choice.topology.num_devices or not request.all_devices
    )
    fastest = next(usable, None)
    delayed = None if fastest is None else choice.simulate(fastest)
    if delayed is None or delayed.simulated is None or delayed.candidate.over is not None:
        return None
    return delayed if delayed.samples_per_second > (1 + _FASTER) * best.samples_per_second else None


def _no_candidate(profile: Profile, topology: Topology, batch: int, request: Request, excluded: Sequence[Candidate]) -> InputError:
    """Return the error if no candidate is left, or no candidate uses the required number of devices."""
    named = () if ALL in request.schedules else request.schedules
    conditions = [" or ".join(named)] if named else []
    if request.max_delay is not None:
        conditions.append(f"a mean delay of at most {request.max_delay:g} updates")
    requested = f" with {' and '.join(conditions)}" if conditions else ""
    devices = count(topology.num_devices, "device")
    allow = "allow " + ("" if request.max_delay is None else "a larger delay, ") + "other " + ("schedules, " if named else "")
    on_all_devices = [one for one in excluded if one.devices == topology.num_devices or not request.all_devices]
    if excluded and not on_all_devices:
        most = max(candidate.devices for candidate in excluded)
        why, change = "", f" devices, or {allow}batches"
        if not request.replicas:
            layers = count(len(profile.layers), "layer")
            why = f": layers carry their state from batch to batch, so stages have no replicas, and {layers} make at most that many stages"
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
    """Return the meshes to try, and print which requested ones are larger than a server. Raise InputError if one does not fit."""
    if request.extras.links is not None:
        return (NO_MESH,)
    if request.degrees is None:
        return possible_degrees(profile, topology)
    for degrees in request.degrees:
        if reason := mesh_refusal(profile, degrees):
            raise InputError(f"--mesh: {reason}")
        topology.groups(degrees.size)  # raises InputError unless these meshes fill the machine
        if degrees.size > topology.most_in_mesh:
            level = f"the {count(topology.most_in_mesh, 'device')} of {topology.levels[0].name or 'the innermost level'}"
            reporter.say(f"--mesh: a mesh ({degrees}) is larger than {level}: its sums and gathers take longer than inside such a group")
    return request.degrees
