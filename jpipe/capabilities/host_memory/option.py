"""The arrays that a plan moves to host memory, and when they are moved there and back. The numbers of a run do not change.

    optimizer   in host memory except during updates; fetched before the last backward of an update, or before the update itself if the
                update waits for other workers; moved out after the update
    versions    moved out before a computation of the stage if neither it nor the next one reads them; fetched before a computation if it
                or the next one reads them, and before an update that starts from them
    residuals   like versions, between forward and backward, but they also stay if the computation after the next one reads them
    stash       like residuals, between the halves of a backward

Moves overlap with the computations that follow them. The computations of the next step are not considered, so an array that the next step
reads soon may be moved out and back. When the pipeline is empty, all versions are on the device, and the optimizer state is in host memory.
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
"""The kinds of arrays that may stay in host memory."""


def _checked(value: Any) -> Any:
    """Check the value of a field, and return "all" or a tuple of stages."""
    if isinstance(value, str) and value == "all":
        return value
    if isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping):
        stages = tuple(map(as_python, value))
        if all(type(s) is int and s >= 0 for s in stages):
            return stages
    raise ValueError(f"expected 'all' or a list of stages counted from 0, found {short(value)}")


Stages = Annotated[Literal["all"] | tuple[int, ...], pydantic.BeforeValidator(_checked)]


class HostMemory(pydantic.BaseModel):
    """The arrays that stay in host memory while no computation needs them. Each field has the stages, counted from 0, or "all".

    By default every field is empty.

    Attributes:
        optimizer: the stages with their optimizer state in host memory, between updates.
        versions: the stages with weight versions in host memory that neither the next computation nor the one after it reads.
        residuals: the stages with residuals in host memory that forwards leave for later backwards.
        stash: the stages with a stash in host memory that first halves of backwards leave for later second halves.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    optimizer: Stages = ()
    versions: Stages = ()
    residuals: Stages = ()
    stash: Stages = ()


def offloads(plan: "jpipe.Plan", what: Kept, s: int) -> bool:
    """Return whether arrays of this kind of stage s stay in host memory while no computation needs them."""
    stages = () if plan.offload is None else getattr(plan.offload, what)
    return stages == "all" or s in stages


def check(plan: "jpipe.Plan") -> None:
    """Check that the stages in `offload` exist."""
    assert plan.offload is not None
    for part, stages in plan.offload:
        beyond = [s for s in stages if s >= plan.depth] if stages != "all" else []
        if beyond:
            raise InputError(
                key=f"offload.{part}", expected=f"stages from 0 to {plan.depth - 1}, or 'all'", found=beyond[0], change="remove this stage"
            )


OPTION = Option(
    room="host_memory",
    field="offload",
    check=check,
    exclusions=(
        Exclusion("offload.versions", "shard_optimizer", "replicas of a stage complete their versions later"),
        Exclusion("offload.residuals", "chunks_per_rank", "two stages of a rank may keep the same arrays"),
        Exclusion("offload.residuals", "stages.sum_parts", "the last backward of a batch reads residuals part by part"),
        Exclusion("offload.stash", "chunks_per_rank", "two stages of a rank may keep the same arrays"),
        Exclusion("offload.stash", "stages.sum_parts", "the last backward of a batch reads the stash part by part"),
    ),
)
