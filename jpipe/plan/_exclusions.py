"""What cannot be combined: pairs of options of a plan, and of a pipeline with its plan, each once and with the reason."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jpipe.capabilities.protocol import Exclusion
from jpipe.capabilities.registry import OPTIONS
from jpipe.errors import short
from jpipe.plan._stage import Stage
from jpipe.schedules import SCHEDULES

if TYPE_CHECKING:
    import jpipe


EXCLUSIONS = (
    Exclusion("max_in_flight", "extra_in_flight", "one lowers the number that the other raises"),
    Exclusion("flush_first", "update_every", "a flush ends a batch with one update of all stages", "change one of them"),
    *(exclusion for option in OPTIONS for exclusion in option.exclusions),
    Exclusion("clip_stage_norm", "clip_global_norm", "gradients are clipped by one norm"),
    Exclusion(
        "clip_stage_norm",
        "ties",
        "each stage would clip its copy by another norm",
        "use clip_global_norm, or put the layers that share a parameter into one stage",
    ),
)
"""All exclusions: those of capabilities are said in their folders."""

_STAGE = Stage.model_fields


def excluded(plan: "jpipe.Plan", **arguments: Any) -> str:
    """Return why options that are set cannot be combined, or "".

    Args:
        plan: a plan, which need not be legal.
        arguments: what there is beside the plan, by key; None for what is not set.

    Returns:
        For the first pair that is set: where, what was expected, what was found, why, and what to change.
    """
    fields = type(plan).model_fields  # looked up once, because plans are made by the thousand
    for exclusion in EXCLUSIONS:
        if exclusion.without_flush and SCHEDULES[plan.schedule].flushes:
            continue
        if not (values := _by_stage(plan, arguments, fields, exclusion.option)):
            continue
        others = _by_stage(plan, arguments, fields, exclusion.other)
        if both := values.keys() & others.keys():
            s = min(both)
            return _message(plan, arguments, exclusion, s, values[s], others[s])
    return ""


def _by_stage(plan: "jpipe.Plan", arguments: Mapping[str, Any], fields: Mapping[str, Any], key: str) -> dict[int, Any]:
    """Return the value of an option for each stage for which it is set: for all, if it is not an option of single stages."""
    name, _, part = key.partition(".")
    if name == "stages":
        values = {s: getattr(stage, part) for s, stage in enumerate(plan.stages) if part in _STAGE}
        return {s: value for s, value in values.items() if value != _STAGE[part].default}
    value, default = arguments.get(key), None
    if key == "chunks_per_rank":
        value, default = max(map(len, plan.pipeline_ranks)), 1
    elif name in fields:
        value, default = getattr(plan, name), fields[name].default
        if part and value is not None:
            value, default = getattr(value, part), type(value).model_fields[part].default
    if value == default:
        return {}
    return dict.fromkeys(value if part and isinstance(value, tuple) else range(plan.depth), value)


def _message(plan: "jpipe.Plan", arguments: Mapping[str, Any], exclusion: Exclusion, s: int, value: Any, found: Any) -> str:
    option, other = (key.replace("stages.", f"stages.{s}.") for key in (exclusion.option, exclusion.other))
    default = type(plan).model_fields[other].default if other in type(plan).model_fields else None
    beside = f" with {short(value)}" if option in arguments and value is not True else ""
    name = f"plan.{other}" if option in arguments and other not in arguments else other
    expected = f"{name} {default!r}" if isinstance(default, str) else f"no {name}"
    under = f" under the schedule '{plan.schedule}'" if exclusion.without_flush else ""
    is_short = found is not True and isinstance(found, (str, int, float, tuple, list))
    return (
        f"{option}: expected {expected}{beside}{under}{f', found {short(found)}' if is_short else ''}: {exclusion.why}; {exclusion.change}"
    )
