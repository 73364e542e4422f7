"""Positions in the training data, counted in rows, so that a resumed run may change the batch size."""

import math
from fractions import Fraction
from typing import Annotated, Any, Protocol, runtime_checkable

import pydantic

Count = Annotated[int, pydantic.Field(strict=True, ge=0, le=2**53)]


class Position(pydantic.BaseModel):
    """A place in the training data.

    Attributes:
        batch: the number of the batch that begins at this position.
        rows: how many rows come before it; one number per bucket if batches have several shapes.
        pieces: the batch size with which the run began: a running text is cut into that many pieces.
    """

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)

    batch: Count
    rows: Annotated[tuple[Count, ...], pydantic.Field(min_length=1, max_length=10**4)]
    pieces: Annotated[Count, pydantic.Field(ge=1)]

    @property
    def total(self) -> int:
        """The number of rows before it, in all buckets."""
        return sum(self.rows)

    def later(self, batch: int, batch_size: int) -> "Position":
        """Return where batch `batch` begins, if all batches from here on have `batch_size` rows of one shape."""
        return Position(batch=batch, rows=(self.total + (batch - self.batch) * batch_size,), pieces=self.pieces)


def rows_in(epochs: float, rows: int) -> int:
    """Return the number of rows in `epochs` passes over `rows` rows, rounded up; `epochs` is read as the decimal that it prints as."""
    return math.ceil(Fraction(repr(epochs)) * rows)


def steps_until(end: int, first: Position, batch_size: int) -> int:
    """Return the number of steps of a run that ends with row `end` - 1, which may be in the middle of a batch.

    Args:
        end: the rows of the whole run.
        first: where the order of the batches begins.
        batch_size: rows of a batch from there on.
    """
    return first.batch + max(-(-(end - first.total) // batch_size), 0)


def start(batch_size: int, buckets: int = 1) -> Position:
    """Return the position of batch 0 of a run that begins."""
    return Position(batch=0, rows=(0,) * buckets, pieces=batch_size)


@runtime_checkable
class Ordered(Protocol):
    """Training batches that know where in the data each batch begins."""

    @property
    def first_position(self) -> Position:
        """The position of the first batch; no earlier batch can be read."""
        ...

    def position(self, batch: int) -> Position:
        """Return the position of a batch, not earlier than `first_position`."""
        ...

    def continued(self, position: Position) -> Any:
        """Return the same data in an order that begins at `position`."""
        ...
