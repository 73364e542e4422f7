"""The bytes of the arrays of a stage, from shapes alone."""

from typing import Any, Literal

import jax

from jpipe.programs._costs import Passed, StageCost
from jpipe.stages._functions import StageFunctions, floats_of


def measure_bytes(functions: StageFunctions, recomputes: bool, splits: bool = False) -> StageCost:
    """The exact sizes of one stage, from shapes alone.

    Times are units: a forward 1, a backward 2 and each of its halves 1, and 1 more where they recompute.

    Args:
        functions: of the stage.
        recomputes: whether its backward recomputes.
        splits: whether it is cut in two; only then the size of the stash is looked for.
    """
    f, specs = functions, functions.specs
    y, new_state, saved = jax.eval_shape(f.forward, specs.params, *specs.arguments, specs.rng)
    kept_arguments, kept_outputs = f.residuals.keep(specs.arguments, (y, new_state))
    weight = nbytes(jax.ShapeDtypeStruct((), f.loss_dtype))
    return StageCost(
        backward=3.0 if recomputes else 2.0,
        backward_input=2.0 if recomputes else 1.0,
        inputs=nbytes(specs.x),
        labels=nbytes(specs.labels),
        outputs=nbytes(y),
        residuals=nbytes((saved, kept_arguments, kept_outputs)),
        kept_outputs=nbytes(kept_outputs),
        stash=nbytes(f.stash_spec) if splits else 0,
        message=nbytes(y) if f.last else nbytes(floats_of(y)) + weight,
        gradient=0 if f.first else nbytes(floats_of(specs.x)) + weight,
        weights=nbytes((specs.params, f.scale_spec)),
        optimizer=nbytes(f.optimizer_spec),
        state=nbytes(specs.state),
        accumulators=nbytes(f.accumulators_spec),
        squares=nbytes(f.squares_spec([len(f.counted)])),
        shared=tuple(
            nbytes([f.accumulators_spec["gradients"][name] for name in names]) if f.number in stages else 0
            for stages, names in f.sharing.groups
        ),
    )


def kept_by_both(before: StageFunctions, after: StageFunctions, splits: tuple[bool, bool]) -> tuple[Passed, ...]:
    """The arrays that a stage gives to the next one and that both keep.

    Args:
        before: the stage.
        after: the next one.
        splits: for each of them whether its backward is cut in two.
    """
    sizes, state = list(map(nbytes, jax.tree.leaves(after.specs.x))), len(jax.tree.leaves(after.specs.state))
    found = []
    for i, size in enumerate(sizes):
        if i in before.residuals.outputs:
            late = splits[0] and before.reads_output_late(i)
            is_kept = state + i in after.residuals.arguments
            receiver: Literal["F", "I", "W"] = "F" if not is_kept else "W" if splits[1] and after.reads_argument_late(state + i) else "I"
            found.append(Passed(size, "W" if late else "I", receiver))
    return tuple(found)


def nbytes(tree: Any) -> int:
    """Bytes of all arrays (or specs) of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
