"""The equations between two cuts as a function, and the values that pass each cut."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jpipe.model.jaxprs._dependence import is_literal, nbytes
from jpipe.model.jaxprs._min_cut import cheapest_cut
from jpipe.model.jaxprs._wanted import UNKNOWN
from jpipe.model.traced._chain import Chain, is_cheap, operations

_WORTH = 0.99  # a smaller set of values passes a cut only if it has at most this share of the bytes
_AGAIN = 0.05  # the largest share of a layer's operations that may be computed again for the smaller set


@dataclass(frozen=True)
class Segment:
    """The part of a chain between two positions, as a jaxpr from (leaves, the key if used, `takes`) to (`gives`, new state)."""

    leaves: tuple[int, ...]  # the parameters and layer state that it reads, by number
    written: tuple[int, ...]  # the layer state that it writes, by number
    uses_key: bool  # whether it draws random numbers
    takes: tuple[jax.ShapeDtypeStruct, ...]  # the shape and dtype of each value from earlier segments
    # the shape and dtype of each value for later segments; for the last segment, of each output of the model
    gives: tuple[jax.ShapeDtypeStruct, ...]
    jaxpr: Any  # its equations

    @cached_property
    def _function(self) -> Callable[..., Sequence[Any]]:
        return jex.jaxpr_as_fun(self.jaxpr)

    def __call__(self, leaves: Sequence[Any], key: Any, taken: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the values of `gives`, and the new layer state of `written`."""
        results = self._function(*leaves, *([key] if self.uses_key else ()), *taken)
        results = [result if isinstance(result, jax.Array) else jnp.asarray(result) for result in results]  # a constant is not a JAX array
        return results[: len(self.gives)], results[len(self.gives) :]

    @cached_property
    def text(self) -> str:
        """The computation as text, which is equal for segments that differ only in their random numbers."""
        return re.sub(r"(random_fold_in \S+) \d+:|0x[0-9a-f]+", r"\1", str(self.jaxpr))


def segments_of(chain: Chain, positions: Sequence[int], in_evaluation: Sequence[Segment] | None = None) -> list[Segment]:
    """Return the segments of a chain that is cut at these positions; for the training chain `in_evaluation` has those in evaluation.

    Layer state that only these read, such as a counter, is written in the segment that reads it.
    """
    bounds = [0, *positions, len(chain.equations)]
    passes, again = _passing(chain, bounds)
    reads = [frozenset[Any]().union(*chain.reads[begin:end]) for begin, end in itertools.pairwise(bounds)]
    if in_evaluation is not None:
        reads = [here.union(segment.leaves) for here, segment in zip(reads, in_evaluation, strict=True)]
    written = _written(chain, bounds, reads)
    return [
        _segment(chain, [*again[k], *chain.equations[begin:end]], passes[k], passes[k + 1], written[k])
        for k, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]


def _written(chain: Chain, bounds: Sequence[int], reads: Sequence[frozenset[Any]]) -> list[list[int]]:
    """Return the layer state that each segment writes, given the layer state that each segment reads.

    The segment that computes state from the inputs writes it. State that does not depend on inputs, such as a counter, is written by all
    segments that read it, because each has a copy.
    """
    count = len(bounds) - 1
    written: list[set[int]] = [set() for _ in range(count)]
    changed = {leaf: value for leaf, value in chain.new_state.items() if value is not chain.leaves[leaf]}
    for leaf, value in changed.items():
        number = None if is_literal(value) else chain.made.get(value)
        if number is not None:
            written[max(k for k in range(count) if bounds[k] <= max(number, 0))].add(leaf)
        elif not any(leaf in each for each in reads):
            written[0].add(leaf)
    is_free = {leaf for leaf, value in changed.items() if is_literal(value) or value not in chain.made}
    for k in range(count):
        held = {*reads[k], *written[k]} & is_free
        while held - written[k]:
            written[k] |= held
            held = is_free & chain.needs_of(changed[leaf] for leaf in held)  # the leaves from which the new values are computed
    return [sorted(leaves) for leaves in written]


def _segment(chain: Chain, equations: Sequence[Any], taken: Sequence[Any], given: Sequence[Any], written: Sequence[int]) -> Segment:
    results = [*given, *(chain.new_state[leaf] for leaf in written)]
    body: dict[int, Any] = {}
    for equation in equations:
        body.update((id(source), source) for source in chain.behind(equation.invars))
        body[id(equation)] = equation
    body.update((id(source), source) for source in chain.behind(results))
    read = {var for equation in body.values() for var in equation.invars if not is_literal(var)}
    read.update(var for var in results if not is_literal(var))
    leaves = [number for number, var in enumerate(chain.leaves) if var in read]
    uses_key = chain.key in read
    consts = [var for var in chain.consts if var in read]
    arguments = [*(chain.leaves[number] for number in leaves), *([chain.key] if uses_key else ()), *taken]
    effects = set().union(*(equation.effects for equation in body.values()))
    jaxpr = jex.Jaxpr(consts, arguments, results, list(body.values()), effects, UNKNOWN)
    closed = jex.ClosedJaxpr(jaxpr, [chain.consts[var] for var in consts])
    return Segment(tuple(leaves), tuple(written), uses_key, _specs(taken), _specs(given), closed)


def _specs(variables: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in variables)


# What passes a cut -----------------------------------------------------------------------------------------------------


def _passing(chain: Chain, bounds: Sequence[int]) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return for each bound the variables that pass it, and the equations that the segment after it computes again.

    It goes from the last cut to the first: a segment takes the variables that it reads, and those that it must pass on.
    """
    passes: list[list[Any]] = [[] for _ in bounds]
    again: list[list[Any]] = [[] for _ in bounds]
    passes[0], passes[-1] = list(chain.inputs), list(chain.outputs)
    for k in range(len(bounds) - 2, 0, -1):
        begin, end = bounds[k], bounds[k + 1]
        read = [var for equation in chain.equations[begin:end] for var in equation.invars]
        wanted = [var for var in (*read, *passes[k + 1]) if not is_literal(var) and var in chain.made and chain.made[var] < begin]
        passes[k], again[k] = _smallest(chain, list(dict.fromkeys(wanted)), int(chain.work[end] - chain.work[begin]))
    return passes, again


def _smallest(chain: Chain, wanted: list[Any], work: int) -> tuple[list[Any], list[Any]]:
    """Return the variables with the fewest bytes from which `wanted` can be computed cheaply, and the equations that compute `wanted`."""

    def inputs_of(var: Any) -> list[Any] | None:
        number = chain.made[var]
        if number < 0 or not is_cheap(chain.equations[number]) or chain.reads[number]:
            return None
        return [v for v in chain.equations[number].invars if not is_literal(v) and v in chain.made]

    chosen = set(cheapest_cut(wanted, nbytes, inputs_of))
    numbers, to_do = set[int](), [var for var in wanted if var not in chosen]
    while to_do:
        var = to_do.pop()
        if chain.made[var] not in numbers:
            numbers.add(chain.made[var])
            to_do += [v for v in inputs_of(var) or () if v not in chosen]
    again = [chain.equations[number] for number in sorted(numbers)]
    is_worth = sum(map(nbytes, chosen)) <= _WORTH * sum(map(nbytes, wanted)) and sum(map(operations, again)) <= _AGAIN * work
    if not is_worth:
        chosen, again = set(wanted), []
    return sorted(chosen, key=lambda var: (chain.made[var], _position(chain, var))), again


def _position(chain: Chain, var: Any) -> int:
    """Return the position of a variable among the results of its equation."""
    number = chain.made[var]
    variables = chain.inputs if number < 0 else chain.equations[number].outvars
    return next(i for i, each in enumerate(variables) if each is var)
