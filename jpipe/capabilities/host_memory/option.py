"""What a plan lets wait in the memory of the host, and when it is moved there and back. The numbers are the same.

    optimizer   in host memory except during updates: fetched before the last backward of an update, or before the update itself where that
                waits for other workers; moved out after the update
    versions    moved out before a computation of the stage if neither this one nor the next one reads them; fetched before a computation
                if this one or the next one reads them, and before an update that starts from them
    residuals   likewise, between forward and backward, but they also stay if the computation after the next one reads them
    stash       as residuals, between the halves of a backward

Moves run beside the computations that follow them. What the next step reads is not looked at, so that what it reads soon may leave and come
back. Where the pipeline is empty all versions are on the device, and the optimizer state is in host memory.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from jpipe._numbers import as_python
from jpipe.capabilities.protocol import Exclusion, Option
from jpipe.errors import InputError, short

if TYPE_CHECKING:
    import jpipe

Kept = Literal["optimizer", "versions", "residuals", "stash"]
"""What may wait in host memory."""


def _checked(value: Any) -> Any:
    """Return "all", or stages as a tuple."""
    if isinstance(value, str) and value == "all":
        return value
    if isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping):
        stages = tuple(map(as_python, value))
        if all(type(s) is int and s >= 0 for s in stages):
            return stages
    raise ValueError(f"expected 'all' or a list of stages counted from 0, found {short(value)}")


Stages = Annotated[Literal["all"] | tuple[int, ...], pydantic.BeforeValidator(_checked)]


class HostMemory(pydantic.BaseModel):
    """What waits in host memory while no computation needs it. For each, the stages, counted from 0, or "all"; by default none.

    Attributes:
        optimizer: the optimizer state, between updates.
        versions: weight versions that neither the next computation nor the one after it reads.
        residuals: what forwards leave for backwards that are further away.
        stash: what the first halves of backwards leave for second halves that are further away.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    optimizer: Stages = ()
    versions: Stages = ()
    residuals: Stages = ()
    stash: Stages = ()

    def keeps(self, what: Kept, s: int) -> bool:
        """Return whether something of a stage waits in host memory."""
        stages: Stages = getattr(self, what)
        return stages == "all" or s in stages


def offloads(plan: "jpipe.Plan", what: Kept, s: int) -> bool:
    """Return whether something of stage s waits in host memory while no computation needs it."""
    return plan.offload is not None and plan.offload.keeps(what, s)


def check(plan: "jpipe.Plan") -> None:
    """Check that the stages exist for which something waits in host memory.

    Raises:
        ValueError: it names stages that the plan does not have.
    """
    assert plan.offload is not None
    for part, stages in plan.offload:
        beyond = [s for s in stages if s >= plan.depth] if stages != "all" else []
        if beyond:
            raise InputError(
                key=f"offload.{part}", expected=f"stages from 0 to {plan.depth - 1}, or 'all'", found=beyond[0], change="remove it"
            )


OPTION = Option(
    room="host_memory",
    field="offload",
    check=check,
    exclusions=(
        Exclusion("offload.versions", "shard_optimizer", "its replicas complete their versions later"),
        Exclusion("offload.residuals", "chunks_per_rank", "two stages of a rank may keep the same arrays"),
        Exclusion("offload.residuals", "stages.sum_parts", "the last backward of a batch reads them part by part"),
        Exclusion("offload.stash", "chunks_per_rank", "two stages of a rank may keep the same arrays"),
        Exclusion("offload.stash", "stages.sum_parts", "the last backward of a batch reads it part by part"),
    ),
)
