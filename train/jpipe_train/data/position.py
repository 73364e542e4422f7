"""Positions in the training data. They are counted in rows, so that a resumed run may change the batch size."""

import math
from fractions import Fraction
from typing import Annotated, Any, Protocol, runtime_checkable

import pydantic

Count = Annotated[int, pydantic.Field(strict=True, ge=0, le=2**53)]


class Position(pydantic.BaseModel):
    """A place in the training data."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)

    batch: Count  # the number of the batch that begins at this position
    # the number of rows before this position; one number per bucket if batches have several shapes
    rows: Annotated[tuple[Count, ...], pydantic.Field(min_length=1, max_length=10**4)]
    pieces: Annotated[Count, pydantic.Field(ge=1)]  # the batch size at the start of the run. A running text is cut into this many pieces.

    @property
    def total(self) -> int:
        """The number of rows before this position, in all buckets together."""
        return sum(self.rows)

    def later(self, batch: int, batch_size: int) -> "Position":
        """Return the position of batch `batch`, if all batches from here on have `batch_size` rows of one shape."""
        return Position(batch=batch, rows=(self.total + (batch - self.batch) * batch_size,), pieces=self.pieces)


def rows_in(epochs: float, rows: int) -> int:
    """Return `epochs` times `rows`, rounded up. `epochs` is taken as the decimal number that Python prints for it."""
    return math.ceil(Fraction(repr(epochs)) * rows)


def steps_until(end: int, first: Position, batch_size: int) -> int:
    """Return the number of steps of a run that ends with row `end` - 1, perhaps in the middle of a batch."""
    return first.batch + max(-(-(end - first.total) // batch_size), 0)


def start(batch_size: int, buckets: int = 1) -> Position:
    """Return the position of batch 0 in a new run."""
    return Position(batch=0, rows=(0,) * buckets, pieces=batch_size)


@runtime_checkable
class Ordered(Protocol):
    """Training batches that know the position of each batch in the data."""

    @property
    def first_position(self) -> Position:
        """The position of the first batch; no earlier batch can be read."""
        ...

    def position(self, batch: int) -> Position:
        """Return the position of a batch that is not before the first batch."""
        ...

    def continued(self, position: Position) -> Any:
        """Return batches of the same data that begin at `position`."""
        ...
