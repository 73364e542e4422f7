"""The stages of a plan and the numbers that a planner predicts for it."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import pydantic
from pydantic import Field

from jpipe._frozen import NOTHING, FrozenMapping
from jpipe._numbers import Float, Int
from jpipe.capabilities.registry import OPTIONS, StageOptions
from jpipe.errors import nearest
from jpipe.plan._axes import Mesh

RECOMPUTE = (
    "none",
    "elementwise",
    "full",
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)
"""Recomputation of a stage.

`none`, `elementwise` (all but the results of elementwise operations is kept), `full` (only the stage input is kept), or a policy of
`jax.checkpoint_policies` by name.
"""


def repeats_forward(policy: str) -> bool:
    """Return whether recomputation makes a backward longer by about a forward; elementwise operations take almost no time.

    Args:
        policy: one of `RECOMPUTE`.
    """
    return policy not in ("none", "elementwise")


class _Layers(pydantic.BaseModel):
    """The fields of a stage that stand before capabilities' in JSON."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)

    layers: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    replicas: Annotated[Int, Field(ge=1, le=65536)] = 1
    recompute: str = "none"
    mesh: Mesh = NOTHING
    fsdp: bool = False


class Stage(StageOptions, _Layers):
    """Consecutive layers that one worker or several replicas run.

    Attributes:
        layers: ids of the layers, in order, of printable characters; at least one.
        replicas: number of workers that share the stage, 1 by default, at most 65536.
        recompute: one of `RECOMPUTE`, "none" by default.
        mesh: axes and sizes of the mesh of each replica, such as `{"data": 2, "model": 4}`; empty, the default: one device. The plan's
            rules say over which axes the rows of a microbatch and the weights are sharded.
        fsdp: shard the weights over the axis of the rows, too; they are gathered where they are used. False by default.
        sum_parts: the number of layers in each part of the sum of gradients over the replicas, in the order of the layers, such as `(4, 4,
            4)`. The last backward of an update is computed part by part, from the last layers to the first, and the sum of a part begins
            while the next part is computed. Empty, the default: one sum after the whole backward.
    """

    @property
    def shape(self) -> FrozenMapping[int]:
        """The mesh without axes of size 1, which shard nothing."""
        return FrozenMapping({axis: size for axis, size in self.mesh.items() if size > 1})

    @property
    def devices_each(self) -> int:
        """The number of devices of each replica: the size of its mesh."""
        return math.prod(self.mesh.values())

    def with_layers(self, layers: Sequence[str]) -> "Stage":
        """Return the stage with other layers, and what follows from these.

        Args:
            layers: their ids, in order.
        """
        more = {key: value for option in OPTIONS if option.with_layers for key, value in option.with_layers(self, layers).items()}
        return self.model_copy(update={"layers": tuple(layers), **more})

    @pydantic.field_validator("recompute")
    @classmethod
    def _known_policy(cls, name: str) -> str:
        if name not in RECOMPUTE:
            raise ValueError(f"unknown recomputation policy {name!r}; {nearest(name, RECOMPUTE)}")
        return name


class Predicted(pydantic.BaseModel):
    """The prediction of a planner for a plan, to be compared with the run; it does not change the run.

    Attributes:
        batch_seconds: the seconds of one batch.
        bubble: share of the workers' time in which they do not compute.
        peak_bytes: the peak bytes of a device of each pipeline rank, including scratch memory.
        delay: the mean delay of gradients over the stages, in updates; see `Plan.mean_delay`.
        stage_seconds: the time of a forward and backward of a microbatch at each stage; empty, the default: unknown.
        devices: the devices that each pipeline rank was planned for, such as "4 × A100"; empty, the default: all are equal.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    batch_seconds: Annotated[Float, Field(gt=0, allow_inf_nan=False)]
    bubble: Annotated[Float, Field(ge=0, le=1)]
    peak_bytes: Annotated[tuple[Annotated[Int, Field(ge=0)], ...], Field(strict=False)]
    delay: Annotated[Float, Field(ge=0, allow_inf_nan=False)] = 0.0
    stage_seconds: Annotated[tuple[Annotated[Float, Field(ge=0, allow_inf_nan=False)], ...], Field(strict=False)] = ()
    devices: Annotated[tuple[str, ...], Field(strict=False)] = ()

    @pydantic.model_serializer(mode="wrap")
    def _known(self, fields: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Leave out the lists that are empty."""
        return {name: value for name, value in fields(self).items() if name not in ("stage_seconds", "devices") or value}
