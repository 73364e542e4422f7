"""The gradients of a stage that the devices of a mesh add up once per update, instead of in each backward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jpipe.meshes._partial_sums import PartialSums

Tree = Any


@dataclass(frozen=True)
class LateSums:
    """The gradients that are added up late.

    Until then the gradients of a microbatch have a first dim for the devices of the rows. For the sums of a batch see `PartialSums`.

    Attributes:
        partial: how the devices sum.
        by_entry, by_layer: for each gradient whether it is added up late; by entry like the accumulators, and by layer id.
        vjp_dims: returns for each leaf of the stage's VJP the dim of its rows, or None.
        rows: the number of rows of a microbatch.
    """

    partial: PartialSums
    by_entry: Mapping[str, Tree]
    by_layer: Tree
    vjp_dims: Callable[[], Sequence[int | None]]
    rows: int

    def pull_back(self, vjp: Any, gradient: list[jax.Array]) -> tuple[Tree, list[jax.Array]]:
        """Apply the VJP of a stage to the gradient of its output: return the gradients of the parameters and of the inputs."""
        leaves, treedef = jax.tree.flatten((vjp, gradient))

        def pull(*leaves: Any) -> Any:
            vjp, gradient = jax.tree.unflatten(treedef, leaves)
            return vjp(gradient)

        closed, specs = jax.make_jaxpr(pull, return_shape=True)(*leaves)
        dims = [*self.vjp_dims(), *row_dims_of(gradient, self.rows)]
        late = jax.tree.leaves(self.by_layer)
        late += [False] * (len(jax.tree.leaves(specs)) - len(late))
        results = self.partial.evaluate(closed.jaxpr, closed.consts, leaves, dims, late)
        results = [self.partial.spread(result) if is_late else result for result, is_late in zip(results, late, strict=True)]
        gradients, inputs = jax.tree.unflatten(jax.tree.structure(specs), results)
        return gradients, inputs

    def add(self, entry: str, sums: Tree, gradients: Tree) -> Tree:
        """Add the gradients of a microbatch to the sums of an entry."""
        return jax.tree.map(lambda late, a, b: self.partial.add(a, b) if late else a + b, self.by_entry[entry], sums, gradients)

    def total(self, sums: Mapping[str, Tree]) -> dict[str, Tree]:
        """Add up the sums of some entries over the devices."""
        flags, (leaves, treedef) = jax.tree.leaves({entry: self.by_entry[entry] for entry in sums}), jax.tree.flatten(dict(sums))
        totals = iter(self.partial.total([leaf for leaf, late in zip(leaves, flags, strict=True) if late]))
        added: dict[str, Tree] = jax.tree.unflatten(
            treedef, [next(totals) if late else leaf for leaf, late in zip(leaves, flags, strict=True)]
        )
        return added


def row_dims_of(tree: Tree, rows: int) -> list[int | None]:
    """Return for each array between stages, or its spec, the dim of its rows: the first, if that has as many."""
    return [0 if leaf.ndim and leaf.shape[0] == rows else None for leaf in jax.tree.leaves(tree)]
