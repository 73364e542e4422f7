"""The residuals that a backward needs from its forward: no weights, no arrays computed only from weights, and no array twice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jpipe.model.jaxprs._dependence import is_literal, reached
from jpipe.model.jaxprs._wanted import evaluate_wanted

Tree = Any

_WEIGHTS, _ARGUMENTS, _RNG, _HOST = (1 << bit for bit in range(4))  # bits for what a leaf depends on


class Source(NamedTuple):
    """Where the backward gets one leaf of the VJP.

    The kinds: "saved": the leaf is at `position` among the arrays that the forward returns for the backward. "argument": it is an argument
    of the forward, at `position` in the flattened (state, x, labels). "output": it is an output of the forward, at `position` in the
    flattened (y, new state). "weights": it depends only on weights, constants and random numbers, and the backward computes it again.
    """

    kind: Literal["saved", "argument", "output", "weights"]
    position: int = 0


@dataclass(frozen=True)
class Residuals:
    """The sources of the VJP of a stage's forward.

    Attributes:
        sources: the source of each leaf of the VJP.
        arguments, outputs: the positions of the forward's arguments and outputs that are kept until the backward.
        forward: the traced forward `(weights, arguments, rng) -> (y, new state), VJP`; its last results are the leaves of the VJP.
        results: the shapes and dtypes of the results of the forward: ((y, new state), VJP).
    """

    sources: tuple[Source, ...]
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    forward: Any
    results: tuple[tuple[Tree, Tree], Any]

    @property
    def count(self) -> int:
        """The number of arrays that the forward returns for the backward."""
        return len({source.position for source in self.sources if source.kind == "saved"})

    def run(self, params: Tree, arguments: Tree, rng: Tree) -> tuple[Tree, tuple[Any, ...]]:
        """Run the traced forward: return (y, new state), and the leaves of the VJP that it returns for the backward.

        The model is not traced again: JAX caches the VJPs of jitted functions, so that another trace may find other leaves.
        """
        outputs, vjp = self.linearize(params, arguments, rng)
        return outputs, self.saved(jax.tree.leaves(vjp))

    def linearize(self, params: Tree, arguments: Tree, rng: Tree) -> tuple[Tree, Any]:
        """Run the traced forward: return (y, new state), and the VJP."""
        results = jex.jaxpr_as_fun(self.forward)(*jax.tree.leaves((params, arguments, rng)))
        outputs, vjp = jax.tree.unflatten(jax.tree.structure(self.results), results)
        return outputs, vjp

    def saved(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Select the leaves of the VJP that the forward must return: each array once, in order of first use, without dims of size one.

        With such a dim TPUs keep an array in other tiles than they compute in, so the forward and the backward would copy it.
        """
        saved: dict[int, Any] = {}
        for source, leaf in zip(self.sources, leaves, strict=True):
            if source.kind == "saved" and source.position not in saved:
                saved[source.position] = jnp.squeeze(leaf)
        return tuple(saved.values())

    def keep(self, arguments: Tree, outputs: Tree) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Select the arrays (or specs) of (state, x, labels) and of (y, new state) that are kept until the backward."""
        of_arguments, of_outputs = (
            jax.tree.leaves(tree) if positions else [] for tree, positions in ((arguments, self.arguments), (outputs, self.outputs))
        )
        return tuple(of_arguments[i] for i in self.arguments), tuple(of_outputs[i] for i in self.outputs)

    def vjp(self, params: Tree, rng: Tree, forward_arrays: tuple[Sequence[Any], Sequence[Any]], saved: Sequence[Any]) -> Any:
        """Return the VJP of a forward. Leaves that depend only on weights are computed again, without side effects."""
        jaxpr = self.forward.jaxpr
        weights, drawn = jax.tree.leaves(params), jax.tree.leaves(rng)
        arguments = [*weights, *[None] * (len(jaxpr.invars) - len(weights) - len(drawn)), *drawn]
        first = len(jaxpr.outvars) - len(self.sources)
        wanted = [*[False] * first, *(source.kind == "weights" for source in self.sources)]
        again = evaluate_wanted(jaxpr, self.forward.consts, arguments, wanted)[first:]
        leaves_of_kind: dict[str, Any] = {
            "argument": dict(zip(self.arguments, forward_arrays[0], strict=True)),
            "output": dict(zip(self.outputs, forward_arrays[1], strict=True)),
            "saved": saved,
        }
        leaves = [
            leaf if source.kind == "weights" else leaves_of_kind[source.kind][source.position]
            for leaf, source in zip(again, self.sources, strict=True)
        ]
        specs, structure = jax.tree.flatten(self.results[1])
        shaped = [
            leaf.reshape(spec.shape) if source.kind == "saved" else leaf
            for leaf, spec, source in zip(leaves, specs, self.sources, strict=True)
        ]
        return jax.tree.unflatten(structure, shaped)


def find_residuals(forward: Callable[..., tuple[Tree, Any]], params: Tree, arguments: Tree, rng: Tree) -> Residuals:
    """Trace `forward(params, arguments, rng) -> (outputs, vjp)` on specs and decide the source of every leaf of the VJP.

    `jax.vjp` would keep the weights, and cast or masked copies of them, once per microbatch. So a leaf that depends on weights but on no
    argument is not saved. A leaf that depends only on `rng` (a dropout mask) is saved, because drawing it again costs more. A leaf that
    depends on a host callback is saved, because the callback must run only once. `rng` is (microbatch, key) or Nones; the backward also
    gets it.
    """
    closed, (outputs, vjp) = jax.make_jaxpr(forward, return_shape=True)(params, arguments, rng)
    jaxpr = closed.jaxpr
    count = [len(jax.tree.leaves(part)) for part in (params, arguments, rng)]
    marks = reached(jaxpr, [_WEIGHTS] * count[0] + [_ARGUMENTS] * count[1] + [_RNG] * count[2], _HOST)
    argument_of = {var: i for i, var in enumerate(jaxpr.invars[count[0] : count[0] + count[1]])}
    draws = set(jaxpr.invars[count[0] + count[1] :])
    leaves_from = len(jax.tree.leaves(outputs))
    output_of = {var: i for i, var in reversed(list(enumerate(jaxpr.outvars[:leaves_from]))) if not is_literal(var)}
    saved: dict[Any, int] = {}
    sources = []
    for var, mark in zip(jaxpr.outvars[leaves_from:], marks[leaves_from:], strict=True):
        only_drawn = mark & (_WEIGHTS | _RNG) == _RNG
        if is_literal(var) or var in draws or not (mark & (_ARGUMENTS | _HOST) or only_drawn):
            sources.append(Source("weights"))
        elif var in argument_of:
            sources.append(Source("argument", argument_of[var]))
        elif var in output_of:
            sources.append(Source("output", output_of[var]))
        else:
            sources.append(Source("saved", saved.setdefault(var, len(saved))))
    arguments_kept = tuple(sorted({s.position for s in sources if s.kind == "argument"}))
    outputs_kept = tuple(sorted({s.position for s in sources if s.kind == "output"}))
    return Residuals(tuple(sources), arguments_kept, outputs_kept, closed, (outputs, vjp))
