"""The shapes that the batches of a run may have."""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from jpipe.errors import InputError
from jpipe.model._layer import describe
from jpipe.stages._batch import Batch, rows_of
from jpipe.stages._functions import StageFunctions


class Bucket(NamedTuple):
    """One of the shapes that batches may have.

    Attributes:
        spec: shapes and dtypes of one microbatch.
        functions: of each stage, for such microbatches.
    """

    spec: Batch
    functions: Sequence[StageFunctions]


def bucket_of(spec: Batch, specs: Sequence[Batch]) -> int:
    """Which of `specs` the microbatches of a batch have.

    Raises:
        InputError: none of them.
    """
    if spec not in specs:
        those = "the one" if len(specs) == 1 else "one of those"
        raise InputError(f"batch: expected microbatches like {those} of init, {told(specs)}; found {describe(spec)}")
    return specs.index(spec)


def check_buckets(buckets: Sequence[Bucket]) -> None:
    """Refuse shapes that cannot take turns in one run.

    Raises:
        InputError: they differ in their rows or in the names of their arrays, or a layer has other parameters or state with one of them.
    """
    first = buckets[0]
    for bucket in buckets[1:]:
        if rows_of(bucket.spec) != rows_of(first.spec):
            raise InputError(
                f"buckets: expected microbatches of {rows_of(first.spec)} rows, as the others have, found {describe(bucket.spec)}; "
                "give each batch as many rows"
            )
        if jax.tree.structure(bucket.spec) != jax.tree.structure(first.spec):  # type: ignore[operator]
            raise InputError(
                f"buckets: expected the arrays that the others have, {describe(first.spec)}, found {describe(bucket.spec)}; "
                "give each batch the same arrays, which may differ in their shapes"
            )
        for here, there in zip(first.functions, bucket.functions, strict=True):
            for what, own, other in (("parameters", here.specs.fresh, there.specs.fresh), ("state", here.specs.state, there.specs.state)):
                changed = [entry for entry in own if own[entry] != other.get(entry)]
                if changed:
                    raise InputError(
                        f"buckets: expected layer '{changed[0]}' to have the same {what} with batches of each shape, found "
                        f"{describe(own[changed[0]])} with microbatches of {describe(first.spec)} and {describe(other.get(changed[0]))} "
                        f"with {describe(bucket.spec)}; make them independent of the shape, or give one shape"
                    )


def told(specs: Sequence[Batch]) -> str:
    """The shapes, for messages."""
    return " or ".join(map(describe, specs))
