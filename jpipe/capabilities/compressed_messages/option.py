"""Compressed messages of a plan, between stages and between replicas: which arrays are rounded to fewer bits, and how.

A bottleneck changes the model instead, so that messages have fewer numbers; see `bottleneck.py`.

    bfloat16  each number is rounded to bfloat16: 2 bytes
    int8      each row is divided into blocks of at most 256 values; the scale of a block is its largest magnitude times 1/127, as float32;
              each value is divided by the scale and rounded to an integer: 1 byte per value, and 4 bytes per block
    fp8       like int8, with float8_e4m3 and 448 instead of integers and 127, for activations and gradients; the scales give the range, so
              the third bit of the mantissa is worth more than the additional exponents of float8_e5m2

A row is one index of the first dim, so the compressed row depends only on this row. Floating-point arrays are compressed if this makes them
smaller; integers, keys and complex numbers are sent unchanged. A block with NaN or infinity arrives as NaN.

Every message between consecutive stages is rounded, even if both stages are on one rank and nothing is sent. So the numbers depend on the
stages of the plan, not on the devices. The receiving stage computes with rounded values; the sending stage's backward ignores the rounding
(straight-through). Evaluations and predictions round the same activations, but always to nearest.

Sums of gradients over the replicas of a stage: for each update, replica k has the sum G_k over its microbatches, their weight w_k, and the
rounding error E_k, which is 0 at first:

    sent        C_k = round(G_k + w_k E_k), in blocks of at most 256 neighbouring values of an array, or on a mesh of a shard
    error       E_k = (G_k + w_k E_k - C_k) / w_k, 0 where this is not finite; unchanged if w_k = 0
    sum         C_0 + C_1 + ..., which each replica adds in this order, so all replicas get the same bits

So the rounding error of an update is added to the next update (error feedback, as in EF-SGD and 1-bit Adam). The weights and losses of the
microbatches, and the layer state that replicas average, are sent unchanged.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from jpipe._numbers import Int
from jpipe.capabilities.protocol import Exclusion, Option
from jpipe.errors import InputError, short

if TYPE_CHECKING:
    import jpipe

Kind = Literal["bfloat16", "int8", "fp8"]
"""The format to which the values of a message are rounded."""

Message = Literal["activations", "gradients", "sums"]
"""A kind of message: outputs of a stage for a microbatch, gradients of its inputs, or gradients of weights that replicas sum."""

BLOCK = 256
"""The largest number of values that share a scale."""


class Bottleneck(pydantic.BaseModel):
    """Layers that make the model narrow between two of its layers; they are trained with it.

    Attributes:
        width: the number of features that pass, W.
        after: the ids of the layers behind which the model is narrow. None, the default: the last layer of each stage but the last one. A
            pipeline sets it, so that the plan of a run names the places; another plan for the same run needs the same places.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    width: Annotated[Int, pydantic.Field(ge=1)]
    after: Annotated[tuple[str, ...], pydantic.Field(strict=False)] | None = None


class Links(pydantic.BaseModel):
    """How the messages of a plan are compressed.

    Attributes:
        activations: the format of the activations that forwards send to the next stage: "bfloat16", "int8" or "fp8". None, the default:
            they are sent unchanged.
        gradients: the format of the gradients of activations that backwards send to the previous stage.
        sums: the format of the gradients of weights that the replicas of a stage sum, with error feedback.
        rounding: "nearest", the default, or "stochastic": up or down at random, so that the mean is exact. The random numbers depend on the
            key of the run, the microbatch (for sums: the update and the replica) and the stage.
        bottleneck: layers that make the model narrow at the cuts, so that messages have fewer numbers. None, the default: the model is not
            changed.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    activations: Kind | None = None
    gradients: Kind | None = None
    sums: Kind | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"
    bottleneck: Bottleneck | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_rows(cls, fields: Any) -> Any:
        """Drop `rows: null`, which version 0.4 wrote into each plan with compressed messages."""
        if not isinstance(fields, Mapping):
            return fields
        kept = dict(fields)
        if (rows := kept.pop("rows", None)) is not None:
            raise ValueError(f"expected no key 'rows', which only version 0.4 had, found {short(rows)}; remove it")
        return kept

    def kind(self, message: Message) -> Kind | None:
        """Return the format of a kind of message; None: it is sent unchanged."""
        return {"activations": self.activations, "gradients": self.gradients, "sums": self.sums}[message]

    def compressed_bytes(self, message: Message, size: int) -> int:
        """Return the compressed bytes of a message of float32 that takes `size` bytes uncompressed; all blocks count as full."""
        kind = self.kind(message)
        if kind is None:
            return math.ceil(size)
        return math.ceil(size * (Fraction(16) if kind == "bfloat16" else 8 + Fraction(32, BLOCK)) / 32)

    @property
    def draws(self) -> bool:
        """Whether messages between stages are rounded with random numbers."""
        return self.rounding == "stochastic" and (self.activations is not None or self.gradients is not None)


def check(plan: "jpipe.Plan") -> None:
    """Check that a plan sends what it compresses."""
    assert plan.links is not None
    if plan.links.sums is not None and max(plan.replicas) == 1:
        raise InputError(
            key="links.sums",
            expected="a stage with replicas",
            found=f"{plan.links.sums!r} and no replicas",
            change="remove links.sums, or give a stage replicas",
        )


OPTION = Option(
    room="compressed_messages",
    field="links",
    check=check,
    exclusions=(
        Exclusion(
            "ties",
            "links.sums",
            "gradients of shared parameters are summed between stages, and these messages are not compressed",
            "put the layers that share a parameter into one stage, or remove one of them",
        ),
    ),
)
