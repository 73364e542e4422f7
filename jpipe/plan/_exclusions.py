"""Options that cannot be combined: pairs of options of a plan or of a pipeline, each with the reason."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jpipe.capabilities.protocol import Exclusion
from jpipe.capabilities.registry import OPTIONS
from jpipe.errors import Problem, short
from jpipe.plan._stage import Stage
from jpipe.schedules import SCHEDULES

if TYPE_CHECKING:
    import jpipe


_EARLY = "early updates"  # a property of a schedule, not an option
EXCLUSIONS = (
    Exclusion("max_in_flight", "extra_in_flight", "one lowers the number that the other raises"),
    Exclusion("max_in_flight", "chunks_per_rank", "the order of several stages on a rank says how many are in flight"),
    Exclusion("extra_in_flight", "chunks_per_rank", "the order of several stages on a rank says how many are in flight"),
    Exclusion("flush_first", "update_every", "a flush ends a batch with one update of all stages", "change one of them"),
    Exclusion("accumulate_batches", "update_every", "stages update several times in a batch", "change one of them"),
    Exclusion(
        "delay_correction",
        "accumulate_batches",
        "the correction assumes that every batch makes an update",
        "use more microbatches instead",
    ),
    Exclusion("stash", "offload.versions", "host memory keeps the versions that backwards read"),
    *(exclusion for option in OPTIONS for exclusion in option.exclusions),
)
"""All exclusions. The folders of capabilities declare their own."""

_PROPERTIES: Mapping[str, Callable[["jpipe.Plan"], Any]] = MappingProxyType(
    {
        "chunks_per_rank": lambda plan: most if (most := max(map(len, plan.pipeline_ranks))) > 1 else None,
        "update_every": lambda plan: plan.update_every if max(map(plan.updates_per_batch, range(plan.depth))) > 1 else None,
        "stash": lambda plan: None if plan.stash else "false",
        _EARLY: lambda plan: SCHEDULES[plan.schedule].updates_early(plan) or None,
    }
)
"""For properties that are not fields, or count as set only if they change something: functions from a plan to the value; None: not set."""

_STAGE = Stage.model_fields


def excluded(plan: "jpipe.Plan | None", exclusions: Sequence[Exclusion] = EXCLUSIONS, /, **arguments: Any) -> Problem | None:
    """Return why two options that are set cannot be combined, or None.

    Args:
        plan: a plan, which need not be legal; None: only the arguments are checked.
        exclusions: the pairs that cannot be combined.
        arguments: options outside the plan, by key; None or False means that an option is not set.

    Returns:
        For the first pair that is set: what was expected, what was found, why, and what to change.
    """
    for exclusion in exclusions:
        if exclusion.without_flush and (plan is None or SCHEDULES[plan.schedule].flushes):
            continue
        if not (values := _by_stage(plan, arguments, exclusion.option)):
            continue
        others = _by_stage(plan, arguments, exclusion.other)
        if both := values.keys() & others.keys():
            s = min(both)
            return _problem(plan, arguments, exclusion, s, values[s], others[s])
    return None


def _by_stage(plan: "jpipe.Plan | None", arguments: Mapping[str, Any], key: str) -> dict[int, Any]:
    """Return the value of an option by stage, for the stages that set it; an option of the whole plan counts for all stages."""
    name, _, part = key.partition(".")
    value, default = arguments.get(key), None
    if plan is not None and key not in arguments:
        fields = type(plan).model_fields
        if name == "stages":
            by_stage = {s: getattr(stage, part) for s, stage in enumerate(plan.stages) if part in _STAGE}
            return {s: value for s, value in by_stage.items() if value != _STAGE[part].default}
        if key in _PROPERTIES:
            value = _PROPERTIES[key](plan)
        elif name in fields:
            value, default = getattr(plan, name), fields[name].default
            if part and value is not None:
                value, default = getattr(value, part), type(value).model_fields[part].default
    if value == default or value is False:
        return {}
    return dict.fromkeys(value if part and isinstance(value, tuple) else range(1 if plan is None else plan.depth), value)


def _problem(plan: "jpipe.Plan | None", arguments: Mapping[str, Any], exclusion: Exclusion, s: int, value: Any, found: Any) -> Problem:
    option, other = (key.replace("stages.", f"stages.{s}.") for key in (exclusion.option, exclusion.other))
    fields = {} if plan is None else type(plan).model_fields
    default = fields[other].default if other in fields else None
    beside = f" with {short(value)}" if option in arguments and value is not True else ""
    name = f"plan.{other}" if option in arguments and other not in arguments and other != _EARLY else other
    expected = f"{name} {default!r}" if isinstance(default, str) else f"no {name}"
    is_schedule = exclusion.without_flush or other == _EARLY
    under = f" under the schedule '{plan.schedule}'" if plan is not None and is_schedule else ""
    is_short = found is not True and isinstance(found, (str, int, float, tuple, list))
    found_words = f", found {short(found)}" if is_short else ""
    return Problem(f"expected {expected}{beside}{under}{found_words}: {exclusion.why}", option, change=exclusion.change)
