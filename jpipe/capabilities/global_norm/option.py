"""What updates do with the norm of their gradients, from the arguments of a pipeline: clip, skip batches, adapt the loss scale."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jpipe._numbers import is_number
from jpipe.capabilities.protocol import Exclusion, Option
from jpipe.errors import InputError
from jpipe.schedules import SCHEDULES

if TYPE_CHECKING:
    import jpipe


@dataclass(frozen=True)
class Norms:
    """What updates do with the norm of their gradients.

    Attributes:
        largest: the norm to which gradients are clipped, if they are.
        of_stage: whether that is the norm of the gradients of each stage, and not of all.
        skips: whether an update changes nothing if any gradient of any stage is NaN or infinite.
        counts: for each stage the number of entries (see `Ties`) that it counts.
    """

    largest: float | None
    of_stage: bool
    skips: bool
    counts: tuple[int, ...]

    @property
    def of_all(self) -> bool:
        """Whether updates use the norm of the gradients of all stages."""
        return self.skips or (self.largest is not None and not self.of_stage)


_OF_ALL = "clip_global_norm", "skip_nonfinite", "precision: loss_scale: dynamic"


def check_arguments(plan: "jpipe.Plan", arguments: Mapping[str, Any]) -> None:
    """Check the values of clipping and of skipping, and that the schedule can use the norm of all stages.

    Raises:
        InputError: they are no norms, or the schedule cannot.
    """
    for option in ("clip_global_norm", "clip_stage_norm"):
        if (norm := arguments[option]) is not None and (not is_number(norm) or not 0 < norm < math.inf):
            raise InputError(f"{option}: expected a finite number above 0, found {norm!r}")
    if not isinstance(skip := arguments["skip_nonfinite"] or False, bool):
        raise InputError(f"skip_nonfinite: expected True or False, found {skip!r}")
    for option in _OF_ALL:
        if arguments[option] and (why := SCHEDULES[plan.schedule].norm_refusal(plan)):
            instead = ", or clip_stage_norm, which clips each stage by its own norm" if option == "clip_global_norm" else ""
            raise InputError(f"{option}: {why}{instead}")


def of_arguments(arguments: Mapping[str, Any], entries: Sequence[Sequence[str]]) -> Norms | None:
    """Return what the arguments of a pipeline say, for stages that count these entries; None if updates use no norm."""
    of_all, of_stage, *skips = (arguments.get(name) for name in ("clip_global_norm", "clip_stage_norm", *_OF_ALL[1:]))
    largest = of_all if of_stage is None else of_stage
    if largest is None and not any(skips):
        return None
    return Norms(largest, of_stage is not None, any(skips), tuple(map(len, entries)))


def refusal(plan: "jpipe.Plan", value: bool) -> str:
    """Return why the programs of a plan cannot use the norm, or ""."""
    schedule = SCHEDULES[plan.schedule]
    if plan.has_parallel_pipelines and not schedule.flushes:
        under = f"under the schedule '{plan.schedule}', which does not flush"
        return f"expected none for pipelines that agree {under}; remove it"
    return schedule.norm_refusal(plan)


OPTION = Option(
    room="global_norm",
    field=None,
    check_arguments=check_arguments,
    of_arguments=of_arguments,
    refusal=refusal,
    exclusions=(
        Exclusion("clip_stage_norm", "clip_global_norm", "gradients are clipped by one norm"),
        Exclusion(
            "clip_stage_norm",
            "ties",
            "each stage would clip its copy by another norm",
            "use clip_global_norm, or put the layers that share a parameter into one stage",
        ),
    ),
)
