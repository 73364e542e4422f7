"""The options of schedules, each declared once. Plans and configs inherit them as fields; schedules and planners hold them as one value."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jpipe._numbers import Int
from jpipe.errors import short

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "noam": "schedules already keep just enough microbatches in flight for every worker to be busy; set max_in_flight for fewer",
        "scale_learning_rate": "give each stage its own learning rate with jpipe.optimizers.per_stage, or optimizer.per_stage of a config",
    }
)
"""Options of earlier versions, which were false by default, each with what to use instead."""


class ScheduleOptions(pydantic.BaseModel):
    """Options of a schedule. They are fields of a plan, and keys of the section `plan` of a config.

    To add an option, add a field and its description here, and its name to the `options` of the schedules that read it.

    Attributes:
        extra_in_flight: additional microbatches in flight between neighbouring stages, which hide the latency of slow links. With 0, the
            default, and no replicas, stage s of d stages has n_s = d - s microbatches in flight.
        max_in_flight: the largest number of microbatches in flight on a replica of any stage. If it is below n_s, stages wait, but they
            hold fewer activations and weight versions (docs/explanation/memory.md). None: no limit.
        vertical_sync: every stage reads the weight version that the first stage read for the microbatch. False by default.
        stash: true, the default: the backward of a microbatch reads the weight version that its forward read. False: each forward and
            backward reads the newest weights, so that no older version is kept while the run trains.
        update_every: "batch", the default: all stages update after each batch. "replicas": a stage updates after as many microbatches as
            it has replicas, as in the original PipeDream.
        flush_first: the number of batches at the start of a run that end with a flush, so that they read the newest weights. 0 by default.
        split_backward: "joint", the default: each backward is one computation. "early": compute each backward in two halves, and send the
            input gradient after the first half, to hide slow links (docs/explanation/zero-bubble.md).
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    extra_in_flight: Annotated[Int, Field(ge=0, le=64)] = 0
    max_in_flight: Annotated[Int, Field(ge=1, le=10**9)] | None = None
    vertical_sync: bool = False
    stash: bool = True
    update_every: Literal["batch", "replicas"] = "batch"
    flush_first: Annotated[Int, Field(ge=0, le=10**9)] = 0
    split_backward: Literal["joint", "early"] = "joint"

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_removed(cls, fields: Any) -> Any:
        """Drop options that no longer exist if they are off, as in files of earlier versions."""
        if not isinstance(fields, dict) or REMOVED.keys().isdisjoint(fields):
            return fields
        for name, instead in REMOVED.items():
            if fields.get(name, False) is not False:
                raise ValueError(f"the option {name} no longer exists, found {short(fields[name])}; remove it: {instead}")
        return {name: value for name, value in fields.items() if name not in REMOVED}


class PlanOptions(ScheduleOptions):
    """The options of a plan's schedule: those that configs also have, and an order, which only plans have.

    Attributes:
        order: for `auto_zero_bubble`: for each rank what it computes in a batch, such as "F0.0 F0.1 I0.0 W0.0". "F0.1" is the forward of
            microbatch 1 at stage 0. The microbatches belong to one replica, and are counted from 0 in each batch. See
            `jpipe.schedules.greedy_order`.
        order_limit: the largest number of microbatches that a rank may hold from the forward to the end of the backward, summed over the
            rank's stages. If an order holds more, the plan raises an error. None: no limit.
    """

    order: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    order_limit: Annotated[Int, Field(ge=1)] | None = None

    @pydantic.field_validator("order", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if isinstance(value, (str, bytes)):
            raise ValueError(f"expected a list of texts, one for each rank, found {short(value)}; put it into a list")
        return value


NO_OPTIONS = PlanOptions()
"""The options with their defaults."""
