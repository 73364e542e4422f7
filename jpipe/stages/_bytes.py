"""The bytes of the arrays of a stage, from shapes alone."""

from typing import Any

import jax

from jpipe.programs._costs import StageCost
from jpipe.stages._functions import StageFunctions, floats_of


def measure_bytes(functions: StageFunctions, recomputes: bool) -> StageCost:
    """The exact sizes of one stage, from shapes alone; times are units (a forward 1, a backward 2, one that recomputes 3)."""
    f, specs = functions, functions.specs
    y, new_state, saved = jax.eval_shape(f.forward, specs.params, *specs.arguments, specs.rng)
    kept_arguments, kept_outputs = f.residuals.keep(specs.arguments, (y, new_state))
    weight = nbytes(jax.ShapeDtypeStruct((), f.loss_dtype))
    return StageCost(
        backward=3.0 if recomputes else 2.0,
        inputs=nbytes(specs.x),
        labels=nbytes(specs.labels),
        outputs=nbytes(y),
        residuals=nbytes((saved, kept_arguments, kept_outputs)),
        kept_outputs=nbytes(kept_outputs),
        message=nbytes(y) if f.last else nbytes(floats_of(y)) + weight,
        gradient=0 if f.first else nbytes(floats_of(specs.x)) + weight,
        weights=nbytes((specs.params, f.scale_spec)),
        optimizer=nbytes(f.optimizer_spec),
        state=nbytes(specs.state),
        accumulators=nbytes(f.accumulators_spec),
        shared=tuple(
            nbytes([f.accumulators_spec["gradients"][name] for name in names]) if f.number in stages else 0
            for stages, names in f.sharing.groups
        ),
    )


def nbytes(tree: Any) -> int:
    """Bytes of all arrays (or specs) of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
