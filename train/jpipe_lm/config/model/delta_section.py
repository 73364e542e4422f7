"""The key `model.delta` of a config: blocks with a gated delta rule in place of attention."""

from typing import Annotated

from pydantic import Field, model_validator

from jpipe import InputError
from jpipe_train.config.section import Count, Section


class DeltaConfig(Section):
    """Some blocks have a recurrent state of fixed size, which a gated delta rule changes at each position, in place of attention.

    The state of each of `value_heads` heads is a matrix of `key_size` by `value_size` numbers. Consecutive heads share the queries and keys
    of one of `key_heads` heads. Queries, keys and values first pass a convolution over `convolution` positions. `layers` is a pattern of
    blocks with the rule that repeats along the depth; the other blocks have attention.
    """

    key_heads: Count
    value_heads: Count
    key_size: Count
    value_size: Count
    convolution: Annotated[int, Field(ge=2, le=1000)] = 4
    layers: Annotated[list[bool], Field(min_length=1, max_length=1000)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> "DeltaConfig":
        if self.value_heads % self.key_heads:
            raise InputError(f"value_heads {self.value_heads} is not divisible by key_heads {self.key_heads}", change="change one of them")
        return self

    @property
    def channels(self) -> int:
        """The numbers of all queries, keys and values of a position."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size
