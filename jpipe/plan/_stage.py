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
    "auto",
    "none",
    "elementwise",
    "full",
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)
"""The recomputation policies of a stage.

`none` keeps all residuals, `elementwise` keeps all except results of elementwise operations, and `full` keeps only the stage input. `auto`
is `none` on CPUs, and `elementwise` on GPUs and TPUs. The other names are policies of `jax.checkpoint_policies`.
"""


def repeats_forward(policy: str) -> bool:
    """Return whether a policy makes a backward longer by about a forward. "elementwise" does not, because it recomputes in almost no time.

    Args:
        policy: one of `RECOMPUTE`.
    """
    return policy not in ("auto", "none", "elementwise")


class _Layers(pydantic.BaseModel):
    """The fields of a stage that stand before the fields of capabilities in JSON."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)

    layers: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    replicas: Annotated[Int, Field(ge=1, le=65536)] = 1
    recompute: str = "auto"
    mesh: Mesh = NOTHING
    fsdp: bool = False


class Stage(StageOptions, _Layers):
    """Consecutive layers that one worker or several replicas run.

    Attributes:
        layers: the ids of the layers, in order; at least one. Ids have only printable characters.
        replicas: the number of workers that share the stage, 1 by default, at most 65536.
        recompute: one of `RECOMPUTE`, "auto" by default.
        mesh: the axes and sizes of the mesh of each replica, such as `{"data": 2, "model": 4}`. Empty, the default: one device. The plan's
            rules say over which axes the rows of a microbatch and the weights are sharded.
        fsdp: also shard the weights over the mesh axis that shards the rows; they are gathered where they are used. False by default.
        sum_parts: divide the sum of gradients over the replicas into parts: the number of layers in each part, in the order of the layers,
            such as `(4, 4, 4)`. The last backward of an update is computed part by part, from the last layers to the first, and the sum of
            a part begins while the next part is computed. Empty, the default: one sum after the whole backward.
    """

    @property
    def shape(self) -> FrozenMapping[int]:
        """The mesh without axes of size 1, which shard nothing."""
        return FrozenMapping({axis: size for axis, size in self.mesh.items() if size > 1})

    @property
    def devices_each(self) -> int:
        """The number of devices of each replica: the size of its mesh."""
        return math.prod(self.mesh.values())

    def resolved(self, platform: str) -> "Stage":
        """Return the stage with the recomputation policy that "auto" is on a platform, "cpu", "gpu" or "tpu"."""
        if self.recompute != "auto":
            return self
        return self.model_copy(update={"recompute": "none" if platform == "cpu" else "elementwise"})

    def with_layers(self, layers: Sequence[str]) -> "Stage":
        """Return the stage with other layers. Options that depend on the layers are adapted.

        Args:
            layers: the ids of the new layers, in order.
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
        batch_seconds: the time of one batch, in seconds.
        bubble: the share of the workers' time in which they do not compute.
        peak_bytes: for each pipeline rank the peak bytes on one of its devices, including temporaries.
        delay: the mean delay of gradients over the stages, in updates; see `Plan.mean_delay`.
        stage_seconds: for each stage the time of a forward and backward of one microbatch, in seconds. Empty, the default: unknown.
        devices: for each pipeline rank the devices that it was planned for, such as "4 × A100". Empty, the default: all devices are equal.
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
