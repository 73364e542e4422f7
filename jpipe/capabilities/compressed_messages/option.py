"""Compressed messages of a plan, between stages and between replicas: what is rounded to fewer bits where it is sent, and how.

    bfloat16  each number rounded to bfloat16: 2 bytes
    int8      per row, blocks of at most 256 values: the scale is the largest magnitude of the block times 1/127, as float32; each value
              divided by it and rounded to a whole number: 1 byte, and 4 bytes for each block
    fp8       the same with float8_e4m3 and 448 in place of whole numbers and 127, for activations and for gradients: the scales give the
              range, so that the third bit of the mantissa is worth more than the further exponents of float8_e5m2

A row is one index of the first dim, so that what a row becomes depends on this row alone. Floating-point arrays are compressed, where that
makes them smaller; whole numbers, keys and complex numbers are sent as they are. A block with NaN or infinity arrives as NaN.

Every message from one stage to the next or back is rounded, also between two stages of one rank, where nothing is sent: so the numbers
depend on the stages of the plan, and not on where they run. The stage that receives computes with the rounded values; the backward of the
stage that sends ignores the rounding (straight-through). Evaluations and predictions round the same activations, always to nearest.

Sums of gradients over the replicas of a stage: for each update replica k has the sum G_k over its microbatches, their weight w_k, and the
error E_k, at first 0, which rounding has left:

    sent        C_k = the rounded G_k + w_k E_k; blocks of at most 256 neighbouring values of an array, on a mesh of a shard
    error       E_k = (G_k + w_k E_k - C_k) / w_k, 0 where that is not finite; unchanged if w_k = 0
    sum         C_0 + C_1 + ..., added by each replica in this order: all get the same bits

So what rounding loses of an update goes into the next one (error feedback, as in EF-SGD and 1-bit Adam). The weights and the losses of the
microbatches, and the layer state that replicas average, are sent as they are.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from jpipe.capabilities.protocol import Exclusion, Option
from jpipe.errors import InputError, short

if TYPE_CHECKING:
    import jpipe

Kind = Literal["bfloat16", "int8", "fp8"]
"""What the values of a message are rounded to."""

Message = Literal["activations", "gradients", "sums"]
"""What is sent: the outputs of a stage for a microbatch, the gradients of its inputs, or what replicas sum for an update."""

BLOCK = 256
"""The most values that share a scale."""


class Links(pydantic.BaseModel):
    """How the messages of a plan are compressed.

    Attributes:
        activations: what forwards send to the next stage: "bfloat16", "int8" or "fp8"; None, the default: as they are.
        gradients: likewise the gradients of activations, which backwards send to the stage before.
        sums: likewise the gradients of weights that the replicas of a stage sum, with error feedback.
        rounding: "nearest", the default, or "stochastic": up or down at random, so that the mean is exact. The random numbers follow from
            the key of the run, the microbatch (of sums: the update and the replica) and the stage.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    activations: Kind | None = None
    gradients: Kind | None = None
    sums: Kind | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_rows(cls, fields: Any) -> Any:
        """Drop `rows: null`, which version 0.4 wrote into each plan with compressed messages."""
        if not isinstance(fields, Mapping):
            return fields
        kept = dict(fields)
        if (rows := kept.pop("rows", None)) is not None:
            raise ValueError(f"expected no 'rows', a key that version 0.4 had, found {short(rows)}; remove it")
        return kept

    def kind(self, message: Message) -> Kind | None:
        """Return how a kind of message is compressed; None: it is sent as it is."""
        return {"activations": self.activations, "gradients": self.gradients, "sums": self.sums}[message]

    def compressed_bytes(self, message: Message, size: int) -> int:
        """Return the bytes of a message of float32 that takes this many bytes uncompressed, in whole blocks."""
        kind = self.kind(message)
        if kind is None:
            return math.ceil(size)
        return math.ceil(size * (Fraction(16) if kind == "bfloat16" else 8 + Fraction(32, BLOCK)) / 32)

    @property
    def draws(self) -> bool:
        """Whether messages between stages are rounded with random numbers."""
        return self.rounding == "stochastic" and (self.activations is not None or self.gradients is not None)


def check(plan: "jpipe.Plan") -> None:
    """Check that what a plan compresses is sent.

    Raises:
        ValueError: sums are to be compressed, and no stage has replicas.
    """
    assert plan.links is not None
    if plan.links.sums is not None and max(plan.replicas) == 1:
        raise InputError(
            key="links.sums",
            expected="a stage with replicas",
            found=f"{plan.links.sums!r} and none",
            change="remove it, or give a stage replicas",
        )


OPTION = Option(
    room="compressed_messages",
    field="links",
    check=check,
    exclusions=(
        Exclusion(
            "ties",
            "links.sums",
            "gradients of shared parameters are summed between stages, where nothing is compressed",
            "put the layers that share a parameter into one stage, or remove one of them",
        ),
    ),
)
