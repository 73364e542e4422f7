"""The options for the norm of gradients: clip the gradients, skip batches that are not finite, adapt the loss scale."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jpipe._numbers import is_number
from jpipe.capabilities.protocol import Exclusion, Option
from jpipe.errors import InputError


@dataclass(frozen=True)
class Norms:
    """What updates do with the norm of their gradients."""

    largest: float | None  # the norm to which gradients are clipped; None if gradients are not clipped
    of_stage: bool  # whether each stage clips its gradients by the norm of this stage alone; otherwise by the norm of all stages
    skips: bool  # whether an update changes nothing if any gradient of any stage is NaN or infinite
    counts: tuple[int, ...]  # for each stage the number of entries (see `Ties`) that it squares and sums

    @property
    def of_all(self) -> bool:
        """Whether updates use the norm of the gradients of all stages."""
        return self.skips or (self.largest is not None and not self.of_stage)


@dataclass(frozen=True, kw_only=True)
class NormCosts:
    """The additional costs of a stage if updates use the norm of all stages.

    Attributes:
        squares: the bytes of the sums of squares of the stage's gradients.
    """

    squares: int = 0


_OF_ALL = {"clip_global_norm": ", or clip_stage_norm, which clips each stage by its own norm"}
_OF_ALL |= dict.fromkeys(("skip_nonfinite", "precision: loss_scale: dynamic"), "")
"""The options that need the norm of all stages; for each, the end of the advice if a schedule cannot compute it."""


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the values of clipping and of skipping."""
    for option in ("clip_global_norm", "clip_stage_norm"):
        if (norm := arguments[option]) is not None and (not is_number(norm) or not 0 < norm < math.inf):
            raise InputError(where=option, expected="a finite number above 0", found=repr(norm))
    if not isinstance(skip := arguments["skip_nonfinite"], bool):
        raise InputError(where="skip_nonfinite", expected="True or False", found=repr(skip))


def of_arguments(arguments: Mapping[str, Any], entries: Any) -> Norms | None:
    """Return the norms that a pipeline's arguments ask for, if its stages have these entries; None if updates use no norm."""
    of_all, *skips = map(arguments.get, _OF_ALL)
    of_stage = arguments.get("clip_stage_norm")
    largest = of_all if of_stage is None else of_stage
    if largest is None and not any(skips):
        return None
    return Norms(largest, of_stage is not None, any(skips), tuple(map(len, entries.counted)))


_TOO_EARLY = "the last stage updates before the first one has computed its gradients"
_TOO_OFTEN = "a stage would update before the batch has all of its gradients"

EXCLUSIONS = (
    Exclusion("clip_stage_norm", "clip_global_norm", "gradients are clipped by one norm"),
    Exclusion(
        "clip_stage_norm",
        "ties",
        "each stage would clip its copy by another norm",
        "use clip_global_norm, or put the layers that share a parameter into one stage",
    ),
    *(
        exclusion
        for option, instead in _OF_ALL.items()
        for exclusion in (
            Exclusion(option, "early updates", _TOO_EARLY, f"use vertical_sync, 'pipedream_2bw' or a schedule that flushes{instead}"),
            Exclusion(option, "update_every", _TOO_OFTEN, "use 'batch' with as many microbatches as the stages have replicas"),
        )
    ),
)

OPTION = Option(
    room="global_norm",
    field=None,
    stands_for="skip_nonfinite",
    check_arguments=check_arguments,
    of_arguments=of_arguments,
    used=lambda norms: norms.of_all,
    exclusions=EXCLUSIONS,
)
