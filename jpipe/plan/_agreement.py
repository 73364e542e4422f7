"""Parallel pipelines that agree rarely (DiLoCo): when their stages agree, and how the agreed weights move.

Replica k of every stage forms pipeline k, of w. Each pipeline makes its updates from its own microbatches alone, by the schedule, with
optimizer state of its own; no gradients are summed. All counts from 0; update u makes version u + 1.

    agreement   after update u of stage s, if (u + 1 - o_s) mod H = 0, between that update and the first forward that reads version u + 1
    changes     D_k = A - W_k: the agreed weights A since the last agreement (at first the initial weights) less version u + 1 of pipeline k
    mean        D = (D_0 + … + D_{w-1}) / w, each pipeline counting once, whatever the weights of its microbatches
    outer step  V = D + μ V, A = A - η (D + μ V): SGD with Nesterov's momentum; V begins with zeros
    goes on     version u + 1 of every pipeline is A: its next update starts from A

Order: update u, agreement, then whatever reads version u + 1, update u + 1 included. Versions that microbatches in flight have read stay as
they are until their backwards are done: an agreement changes the newest version only. So a gradient that is late (PipeDream, PipeDream-2BW)
is applied to the agreed weights, as it is to any newer version. The optimizer state of a pipeline is its own throughout.

o_s is 0 where all stages agree at once. In F fragments of consecutive stages, fragment f = floor(s F / d) of stage s of d has
o_s = floor(f H / F): each stage agrees every H updates, and fragments at different updates (Streaming DiLoCo, without its delay). The first
round of a fragment with o_s > 0 has o_s updates.

The agreed weights are what is evaluated and exported; between agreements they are those of the last one, with H = 1, η = 1, μ = 0 and SGD
those of data parallelism. References: DiLoCo (arXiv:2311.08105), algorithm 1; Streaming DiLoCo (arXiv:2501.18512), section 3.
"""

import reprlib
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from jpipe.plan._stage import Int, as_int


class OuterOptimizer(pydantic.BaseModel):
    """The optimizer that moves the weights on which parallel pipelines agree, with the mean of their changes as gradient.

    Attributes:
        optimizer: "nesterov", SGD with Nesterov's momentum.
        learning_rate: 0.7 by default, as in DiLoCo; 1 without momentum makes the agreed weights the mean of those of the pipelines.
        momentum: at least 0 and below 1, 0.9 by default; with 0 no momentum is kept.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    optimizer: Literal["nesterov"] = "nesterov"
    learning_rate: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9


class Agreement(pydantic.BaseModel):
    """When the parallel pipelines of a plan agree on their weights, and how.

    Attributes:
        every: H, the number of updates of each stage from one agreement to the next, 1 or more.
        outer: how the agreed weights move.
        fragments: None, the default: all stages agree after the same update. "stages": one stage after the other, at updates that are
            spread over the H. A number: as many fragments of consecutive stages, at most as many as there are stages.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    every: Annotated[Int, Field(ge=1, le=10**9)]
    outer: OuterOptimizer = OuterOptimizer()
    fragments: Literal["stages"] | Annotated[Int, Field(ge=1)] | None = None

    @pydantic.field_validator("fragments", mode="before")
    @classmethod
    def _stages_or_count(cls, value: object) -> object:
        count = as_int(value)
        if count not in (None, "stages") and not (type(count) is int and count >= 1):
            raise ValueError(f"expected 'stages', a number of 1 or more, or null, found {reprlib.repr(value)}")
        return count

    def last(self, s: int, depth: int, updates: int) -> int:
        """Return the version of stage s at its last agreement, after some updates; 0 before the first agreement.

        Args:
            s: the stage.
            depth: the number of stages.
            updates: how many updates the stage has made.
        """
        fragments = depth if self.fragments == "stages" else self.fragments or 1
        offset = s * fragments // depth * self.every // fragments
        return max(updates - (updates - offset) % self.every, 0)
