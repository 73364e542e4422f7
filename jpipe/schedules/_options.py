"""The options of schedules, each declared once: plans and configs inherit them, schedules and planners hold them as one value."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jpipe._numbers import Int
from jpipe.errors import short

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "noam": "the schedules have as many microbatches in flight as keep every worker busy; set max_in_flight for fewer",
        "scale_learning_rate": "give each stage its own learning rate with jpipe.optimizers.per_stage, or optimizer.per_stage of a config",
    }
)
"""Options of earlier versions, which were false by default, and what to use in their place."""


class ScheduleOptions(pydantic.BaseModel):
    """Options of a schedule: fields of a plan and of `jpipe.schedules.Shape`, and keys of the section `plan` of a config.

    A new option is a field here with its description, and a name in the `options` of the schedules that read it.

    Attributes:
        extra_in_flight: additional microbatches in flight between neighbouring stages, which hide the latency of slow links. 0 means
            n_s = d - s.
        max_in_flight: the most microbatches in flight on a replica of any stage. Below n_s, stages wait, and hold fewer activations and
            weight versions (docs/explanation/memory.md). None: no limit.
        vertical_sync: every stage reads the version that the first stage read. False by default.
        update_every: "batch": all stages update after each batch. "replicas": stage s updates after r_s microbatches, as in the original
            PipeDream. "batch" by default.
        flush_first: flush after each of the first batches, this many, so that they read the newest weights. 0 by default.
        split_backward: "early": compute each backward in two halves, and send the input gradient after the first, to hide slow links
            (docs/explanation/zero-bubble.md). "joint" by default.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    extra_in_flight: Annotated[Int, Field(ge=0, le=64)] = 0
    max_in_flight: Annotated[Int, Field(ge=1, le=10**9)] | None = None
    vertical_sync: bool = False
    update_every: Literal["batch", "replicas"] = "batch"
    flush_first: Annotated[Int, Field(ge=0, le=10**9)] = 0
    split_backward: Literal["joint", "early"] = "joint"

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_removed(cls, fields: Any) -> Any:
        """Drop removed options that are off, as files of earlier versions have them."""
        if not isinstance(fields, dict) or REMOVED.keys().isdisjoint(fields):
            return fields
        for name, instead in REMOVED.items():
            if fields.get(name, False) is not False:
                raise ValueError(f"{name} is no option any more, found {short(fields[name])}; remove it: {instead}")
        return {name: value for name, value in fields.items() if name not in REMOVED}


class PlanOptions(ScheduleOptions):
    """The options of a plan's schedule: what configs also have, and an order of its own, which only plans have.

    Attributes:
        order: for `auto_zero_bubble`: what each rank computes in a batch, such as "F0.0 F0.1 I0.0 W0.0": a forward of stage 0,
            microbatch 0, and so on; microbatches of one replica, counted from 0 in each batch. See `jpipe.schedules.greedy_order`.
        order_limit: the most microbatches that a rank may hold between forward and the end of the backward, summed over its stages; an
            order that holds more raises an error. None: no limit.
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
"""Every option has its default."""
