"""Sums of gradients over replicas in several parts. The numbers of a run do not change.

The last backward of an update is computed part by part, from the last layers of the stage to the first. The sum of a part over the replicas
begins as soon as the part is computed, and runs while the next part is computed.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
from pydantic import Field

from jpipe._numbers import Int, even_numbers, is_int
from jpipe.capabilities.protocol import Option
from jpipe.errors import InputError, short
from jpipe.ops import OPS

if TYPE_CHECKING:
    import jpipe


class SumParts(pydantic.BaseModel):
    """The field `sum_parts` of a stage; see `jpipe.Stage`."""

    sum_parts: Annotated[tuple[Annotated[Int, Field(ge=1)], ...], Field(strict=False)] = ()


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """The fields of the cost of a stage that sums its gradients in parts.

    Attributes:
        part_times: the share of each part in the time of a backward, the part with the last layers first; empty: in proportion to the
            number of layers.
        part_accumulators: the bytes of the accumulated gradients of each part, in the same order; empty: in proportion to the number of
            layers.
    """

    part_times: tuple[float, ...] = ()
    part_accumulators: tuple[int, ...] = ()

    def seconds_of_part(self, op: str, part: int, stage: "jpipe.Stage") -> float:
        """Return the time of an op for one part of the stage. If the op has a forward, part 0 includes it."""
        cost: Any = self
        *before, backward = (cost.seconds(piece) for piece in OPS[op].pieces)
        share: float = (self.part_times or _by_layers(stage))[part]
        return backward * share + (0.0 if part else sum(before))

    def accumulators_of_part(self, part: int, stage: "jpipe.Stage") -> float:
        """Return the bytes of the accumulated gradients of one part of a stage."""
        cost: Any = self
        return self.part_accumulators[part] if self.part_accumulators else cost.accumulators * _by_layers(stage)[part]


def layers_by_part(stage: "jpipe.Stage") -> tuple[tuple[str, ...], ...]:
    """Return the layers of each part of a stage, in the order in which their gradients are computed: the last layers first."""
    ends = itertools.accumulate(stage.sum_parts)
    return tuple(stage.layers[end - count : end] for count, end in zip(stage.sum_parts, ends, strict=True))[::-1]


def _by_layers(stage: "jpipe.Stage") -> list[float]:
    """Return for each part of a stage its share of the stage's layers."""
    return [len(layers) / len(stage.layers) for layers in layers_by_part(stage)]


def check(plan: "jpipe.Plan") -> None:
    """Check that the parts of a stage hold all its layers, and that the stage has replicas."""
    for s, stage in enumerate(plan.stages):
        where, actual = f"stages.{s}.sum_parts", list(stage.sum_parts)
        if actual and sum(actual) != len(stage.layers):
            raise InputError(
                key=where, expected=f"numbers of layers that sum to {len(stage.layers)}", found=actual, change="change one of the numbers"
            )
        if actual and stage.replicas == 1:
            raise InputError(
                key=where, expected="a stage with replicas", found="a stage without replicas, which sums nothing", change="remove sum_parts"
            )


def even(parts: Any, stages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Divide the layers of each stage with replicas into `parts` parts, at most one for each layer, and return the fields of all stages."""
    if not is_int(parts) or parts < 1:
        raise InputError(where="plan", key="sum_parts", expected="an integer of 1 or more", found=short(parts))
    if parts > 1 and all(stage["replicas"] == 1 for stage in stages):
        raise InputError(
            where="plan",
            key="sum_parts",
            expected="a stage with replicas",
            found="no stage with replicas",
            change=f"remove sum_parts {parts}, or give replicas",
        )
    return [stage | (_parts(stage["layers"], int(parts)) if parts > 1 and stage["replicas"] > 1 else {}) for stage in stages]


def _parts(layers: Sequence[str], parts: int) -> dict[str, tuple[int, ...]]:
    return {"sum_parts": even_numbers(len(layers), min(parts, len(layers)))}


OPTION = Option(
    room="sums_in_parts",
    field="sum_parts",
    of_stages=True,
    check=check,
    even=even,
    with_layers=lambda stage, layers: _parts(layers, len(stage.sum_parts)) if stage.sum_parts else {},
    text=lambda stage: f" in {len(stage.sum_parts)} parts" if len(stage.sum_parts) > 1 else "",
)
