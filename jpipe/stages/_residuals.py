"""The residuals that a backward needs from its forward: no weights, nothing computed from weights alone, no array twice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax

from jpipe.model._dependence import is_literal, reached

Tree = Any


class Source(NamedTuple):
    """Where the backward finds one leaf of the VJP.

    `saved`: position among the arrays that the forward returns for this. `argument`: the leaf is an argument of the forward, at this
    position in its flattened (state, x, labels). `output`: likewise in its flattened (y, new state). `weights`: computed from weights,
    constants and random numbers alone; the backward computes it again.
    """

    kind: Literal["saved", "argument", "output", "weights"]
    position: int = 0


@dataclass(frozen=True)
class Residuals:
    """For one stage, the source of each leaf of its VJP, and which arguments and outputs are kept until the backward."""

    sources: tuple[Source, ...]
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many arrays the forward returns for the backward."""
        return len({source.position for source in self.sources if source.kind == "saved"})

    def saved(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves of the VJP that the forward must return: each array once, in order of first use."""
        kept: dict[int, Any] = {}
        for source, leaf in zip(self.sources, leaves, strict=True):
            if source.kind == "saved":
                kept.setdefault(source.position, leaf)
        return tuple(kept.values())

    def keep(self, arguments: Tree, outputs: Tree) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arrays (or specs) of (state, x, labels) and of (y, new state) that are kept until the backward."""
        kept_arguments: tuple[Any, ...] = ()
        kept_outputs: tuple[Any, ...] = ()
        if self.arguments:
            leaves = jax.tree.leaves(arguments)
            kept_arguments = tuple(leaves[i] for i in self.arguments)
        if self.outputs:
            leaves = jax.tree.leaves(outputs)
            kept_outputs = tuple(leaves[i] for i in self.outputs)
        return kept_arguments, kept_outputs


def find_residuals(forward: Callable[..., tuple[Tree, list[Any]]], params: Tree, arguments: Tree, rng: Tree) -> Residuals:
    """Trace `forward(params, arguments, rng) -> (outputs, vjp leaves)` on specs and decide the source of every VJP leaf.

    `jax.vjp` alone would keep the weights, and cast or masked copies of them, once per microbatch. So a leaf that depends on weights but
    on no argument is not saved. A leaf that depends only on `rng` (a dropout mask) is saved, because drawing it again costs more. `rng`
    is (microbatch, key) or Nones; the backward gets it, too.
    """
    closed = jax.make_jaxpr(forward)(params, arguments, rng)
    jaxpr = closed.jaxpr
    count = [len(jax.tree.leaves(part)) for part in (params, arguments, rng)]
    by_arguments = reached(jaxpr, [0] * count[0] + [1] * count[1] + [0] * count[2])
    by_weights = reached(jaxpr, [1] * count[0] + [0] * (count[1] + count[2]))
    by_draw = reached(jaxpr, [0] * (count[0] + count[1]) + [1] * count[2])
    argument_of = {var: i for i, var in enumerate(jaxpr.invars[count[0] : count[0] + count[1]])}
    draws = set(jaxpr.invars[count[0] + count[1] :])
    leaves_from = len(jax.tree.leaves(jax.eval_shape(forward, params, arguments, rng)[0]))
    output_of = {var: i for i, var in reversed(list(enumerate(jaxpr.outvars[:leaves_from]))) if not is_literal(var)}
    saved: dict[Any, int] = {}
    sources = []
    for i, var in enumerate(jaxpr.outvars[leaves_from:], start=leaves_from):
        only_drawn = by_draw[i] and not by_weights[i]
        if is_literal(var) or var in draws or not (by_arguments[i] or only_drawn):
            sources.append(Source("weights"))
        elif var in argument_of:
            sources.append(Source("argument", argument_of[var]))
        elif var in output_of:
            sources.append(Source("output", output_of[var]))
        else:
            sources.append(Source("saved", saved.setdefault(var, len(saved))))
    arguments_kept = tuple(sorted({s.position for s in sources if s.kind == "argument"}))
    outputs_kept = tuple(sorted({s.position for s in sources if s.kind == "output"}))
    return Residuals(tuple(sources), arguments_kept, outputs_kept)


def restore_leaves(
    residuals: Residuals, leaves: Sequence[Any], kept: tuple[Sequence[Any], Sequence[Any]], saved: Sequence[Any]
) -> list[Any]:
    """The VJP's leaves for the backward: those of source `weights` from `leaves`, traced again, the others from the forward."""
    arguments = dict(zip(residuals.arguments, kept[0], strict=True))
    outputs = dict(zip(residuals.outputs, kept[1], strict=True))
    found: dict[str, Any] = {"argument": arguments, "output": outputs, "saved": saved}
    return [
        leaf if source.kind == "weights" else found[source.kind][source.position]
        for leaf, source in zip(leaves, residuals.sources, strict=True)
    ]
