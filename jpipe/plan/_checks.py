"""Checks of a whole plan: each raises InputError with what was expected, what was found and what to change."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jpipe.capabilities.registry import OPTIONS
from jpipe.errors import InputError, nearest, short
from jpipe.plan._axes import mesh_rules
from jpipe.plan._exclusions import excluded
from jpipe.plan._stage import Stage
from jpipe.schedules import SCHEDULES, PlanOptions

if TYPE_CHECKING:
    import jpipe


def check(plan: "jpipe.Plan") -> None:
    """Raise InputError if parts of a plan do not fit together, or the schedule cannot run it."""
    _check_layers(plan.stages)
    _check_ranks(plan)
    _check_per_rank(plan)
    _check_meshes(plan)
    for option in OPTIONS:
        if option.check is not None and option.is_set(plan):
            option.check(plan)
    _check_options(plan)
    if problem := excluded(plan):
        raise InputError(problem)
    _check_microbatches(plan)
    if reason := SCHEDULES[plan.schedule].refuses(plan.counted):
        raise ValueError(reason)


def _check_layers(stages: Sequence[Stage]) -> None:
    """Check that layer ids can be printed, and that no layer is in two stages."""
    owner: dict[str, int] = {}
    for s, stage in enumerate(stages):
        for layer_id in stage.layers:
            if not layer_id or not layer_id.isprintable():  # a plan may be untrusted, and a terminal shows the ids
                raise InputError(key=f"stages.{s}.layers", expected="names of printable characters", found=short(layer_id))
            if layer_id in owner:
                raise ValueError(
                    f"layer '{layer_id}' is in stage {owner[layer_id]} and again in stage {s}; put every layer into one stage, once"
                )
            owner[layer_id] = s


def _check_ranks(plan: "jpipe.Plan") -> None:
    """Check that the ranks run each stage once, and that the stages of a rank have the same number of replicas."""
    if plan.ranks is None:
        return
    stages_of_ranks, shown = sorted(s for stages in plan.ranks for s in stages), [list(stages) for stages in plan.ranks]
    if stages_of_ranks != list(range(plan.depth)) or not all(plan.ranks):
        expected = f"each of the stages 0 to {plan.depth - 1} once, on ranks of one stage or more"
        raise InputError(key="ranks", expected=expected, found=shown, change="put each stage on one rank, or remove the field ranks")
    for p, stages in enumerate(plan.ranks):
        if list(stages) != sorted(stages):
            raise InputError(key=f"ranks.{p}", expected="the stages of a rank in order", found=list(stages), change=f"use {sorted(stages)}")
        if len({plan.stages[s].replicas for s in stages}) > 1:
            counts = [plan.stages[s].replicas for s in stages]
            expected = f"the same number of replicas for each of the rank's stages {list(stages)}"
            raise InputError(
                key=f"ranks.{p}",
                expected=expected,
                found=counts,
                change="give these stages the same replicas, or put them on different ranks",
            )


_OF_POSITIONS = ("context", "cp", "sequence", "seq")  # usual names of a mesh axis that divides the positions of a row


def _check_meshes(plan: "jpipe.Plan") -> None:
    """Check that rules name the axes of the meshes, and that the stages of a rank have the same mesh."""
    axes = {axis for stage in plan.stages for axis in stage.mesh}
    rules = mesh_rules(plan)
    for s, stage in enumerate(plan.stages):
        for axis in stage.mesh:
            if axis not in rules.values():
                if axis in _OF_POSITIONS:
                    raise InputError(
                        "context parallelism, which divides the positions of a row over devices, is not supported, found the axis "
                        f"'{axis}'",
                        key=f"stages.{s}.mesh",
                        change="divide rows over 'data' and layers over 'model'",
                    )
                named = ", ".join(sorted({f"'{name}'" for name in rules.values() if name is not None}))
                raise InputError(
                    key=f"stages.{s}.mesh",
                    expected=f"axes that the rules name, {named}",
                    found=f"'{axis}', over which nothing would be sharded",
                    change=f"rename the axis, or add a rule such as {{'mlp': '{axis}'}}",
                )
        if stage.fsdp and rules["batch"] not in stage.mesh:
            expected = f"a mesh with the axis '{rules['batch']}', over which the rows are sharded"
            raise InputError(key=f"stages.{s}.fsdp", expected=expected, found=dict(stage.mesh), change="add the axis, or remove fsdp")
    for name, axis_of_rule in plan.rules.items():
        if axis_of_rule is not None and axis_of_rule not in axes:
            meshes = ", ".join(f"'{axis}'" for axis in sorted(axes)) or "no mesh"
            raise InputError(
                key=f"rules.{name}",
                expected=f"an axis of the stages' meshes, {meshes}",
                found=f"'{axis_of_rule}'",
                change="remove the rule or add the axis",
            )
    for p, stages in enumerate(plan.pipeline_ranks):
        if len({(plan.stages[s].shape, plan.stages[s].fsdp) for s in stages}) > 1:
            rank_meshes = [dict(plan.stages[s].mesh) for s in stages]
            expected = f"the same mesh and fsdp for all stages of a rank, {list(stages)}"
            raise InputError(
                key=f"ranks.{p}",
                expected=expected,
                found=rank_meshes,
                change="give them one mesh and fsdp, because they take turns on the rank's devices",
            )


def _check_per_rank(plan: "jpipe.Plan") -> None:
    """Check that placement and prediction have one entry for each rank or stage of the plan."""
    of, ranks = "stages" if plan.depth == len(plan.pipeline_ranks) else "ranks", len(plan.pipeline_ranks)
    if plan.placement is not None:
        counts, expected = [len(devices) for devices in plan.placement], [plan.replicas[stages[0]] for stages in plan.pipeline_ranks]
        if counts != expected:
            raise InputError(key="placement", expected=f"{expected} devices for the {of}, one for each replica", found=counts)
    if (predicted := plan.predicted) is None:
        return
    if len(predicted.peak_bytes) != ranks:
        peaks = len(predicted.peak_bytes)
        raise InputError(key="predicted.peak_bytes", expected=f"one number for each of {ranks} {of}", found=peaks, change="plan again")
    if len(predicted.stage_seconds) not in (0, plan.depth):
        count = len(predicted.stage_seconds)
        raise InputError(
            key="predicted.stage_seconds", expected=f"one number for each of {plan.depth} stages", found=count, change="plan again"
        )
    # a plan may be untrusted, and a terminal shows its texts
    if len(predicted.devices) not in (0, ranks) or not all(map(str.isprintable, predicted.devices)):
        found = short(list(predicted.devices))
        raise InputError(key="predicted.devices", expected=f"a printable text for each of {ranks} {of}", found=found, change="plan again")


def _check_options(plan: "jpipe.Plan") -> None:
    """Check that the schedule reads all options that are set."""
    options = SCHEDULES[plan.schedule].options
    for option, field in PlanOptions.model_fields.items():
        if option in options or getattr(plan, option) == field.default:
            continue
        if option == "extra_in_flight":
            why = f"expected 0, because the schedule '{plan.schedule}' has no in-flight limit to raise"
            raise InputError(why, key=option, found=plan.extra_in_flight)
        supporting = [f"'{name}'" for name, schedule in SCHEDULES.items() if option in schedule.options]
        of = f"schedule{'s' if len(supporting) > 1 else ''} {', '.join(supporting)}"
        raise InputError(f"this is an option of the {of}", key=option, found=f"schedule '{plan.schedule}'", change="remove the option")


def _check_microbatches(plan: "jpipe.Plan") -> None:
    """Check that the replicas of each stage can share the microbatches evenly."""
    common = math.lcm(*plan.replicas)
    if plan.microbatches % common:
        raise InputError(
            key="microbatches",
            expected=f"a multiple of {common}, so that the replicas of each stage, {list(plan.replicas)}, share the microbatches evenly",
            found=plan.microbatches,
            change=f"use {-(-plan.microbatches // common) * common}, or other replicas",
        )


def check_layers_of_model(layers: Sequence[str], ids: Sequence[str]) -> None:
    """Check that a plan and a model have the same layers, in the same order."""
    missing = [layer_id for layer_id in ids if layer_id not in layers]
    unknown = [layer_id for layer_id in layers if layer_id not in ids]
    if missing:
        raise InputError(f"layer '{missing[0]}' of the model is in no stage", where="plan", change="add it to a stage")
    if unknown:
        raise InputError(f"layer '{unknown[0]}' is not in the model", where="plan", change=nearest(unknown[0], ids))
    for actual, expected in zip(layers, ids, strict=True):
        if actual != expected:
            raise InputError(
                f"the stages hold layer '{actual}' where the model has '{expected}'", where="plan", change="keep the model's order"
            )
