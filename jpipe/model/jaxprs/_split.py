"""Cut a backward in two halves: the gradients of the inputs, which the previous stage needs, and the gradients of the weights.

The backward is traced, and its calls and recomputations are inlined into one list of equations. The equations that the gradients of the
inputs need are the first half, the other equations the second. A scan that both halves need becomes two scans. Some arrays are kept between
the halves: arguments of the backward (residuals, the output gradient) and results of the first half, the *stash*. A minimum cut of the
graph of equations chooses those with the fewest bytes. To save bytes, the second half may repeat cheap elementwise operations, but no
product, convolution or loop. Together the halves compute the results of the whole backward. Weight gradients that the first half computes
anyway (for example of a bias) go into the stash.

Reference: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex

from jpipe.model.jaxprs._dependence import body_of, is_literal, nbytes, scan_parts
from jpipe.model.jaxprs._min_cut import cheapest_cut
from jpipe.model.jaxprs._primitives import REPEATABLE
from jpipe.model.jaxprs._wanted import UNKNOWN, Replaced, evaluate_wanted, needed, scan_like, scan_needs


class NotSplittable(ValueError):
    """The backward has side effects, which must happen once and in order."""


@dataclass(frozen=True)
class Halves:
    """The two halves of a backward, as functions of flat lists of arrays."""

    first: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]  # all arguments of the backward -> (outputs of the first half, stash)
    second: Callable[[Sequence[Any], Sequence[Any]], list[Any]]  # (the arguments that it reads, stash) -> outputs of the second half
    arguments: tuple[int, ...]  # the positions of the backward's arguments that the second half reads
    stash: tuple[jax.ShapeDtypeStruct, ...]  # shapes and dtypes of the stash


def split(backward: Callable[..., Sequence[Any]], specs: Sequence[Any], in_first: Sequence[bool], free: Sequence[bool]) -> Halves:
    """Cut a backward, a pure function of flat arguments and outputs, in two.

    The first half computes the outputs that are `in_first`. Keeping a `free` argument costs nothing, because it is kept anyway, like
    weights. Raise NotSplittable if the backward has side effects.
    """
    traced = jax.make_jaxpr(backward)(*specs)
    if traced.effects:
        raise NotSplittable(f"it has side effects: {', '.join(sorted(map(str, traced.effects)))}")
    return _halves(_with_scans_cut(_written_out(traced, {}), in_first, free), in_first, free)


def undivided(backward: Callable[..., Sequence[Any]], specs: Sequence[Any], in_first: Sequence[bool]) -> Halves:
    """For a backward that cannot be cut, return it whole as the first half, with a stash of the outputs of the second half."""
    outputs = jax.eval_shape(backward, *specs)

    def first(arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = backward(*arguments)
        parts = ([result for result, is_first in zip(results, in_first, strict=True) if is_first == half] for half in (True, False))
        return next(parts), next(parts)

    stash = tuple(spec for spec, is_first in zip(outputs, in_first, strict=True) if not is_first)
    return Halves(first, lambda arguments, stashed: list(stashed), (), stash)


# Scans -----------------------------------------------------------------------------------------------------------------


def _with_scans_cut(closed: Any, in_first: Sequence[bool], free: Sequence[bool]) -> Any:
    """Return the jaxpr with two scans in place of each scan that both halves need."""
    jaxpr, replaced = closed.jaxpr, {}
    first, second = (
        needed(jaxpr, [var for var, is_first in zip(jaxpr.outvars, in_first, strict=True) if is_first == half], inside=True)[0]
        for half in (True, False)
    )
    for number, equation in enumerate(jaxpr.eqns):
        if equation.primitive.name == "scan":
            for_first, for_second = ([var in half for var in equation.outvars] for half in (first, second))
            results, _ = scan_needs(equation, for_first)
            if any(for_first) and any(wanted and not is_first for wanted, is_first in zip(for_second, results, strict=True)):
                replaced[number] = _two_scans(equation, results)
    if not replaced:
        return closed
    return _written_out(closed, replaced)


def _written_out(closed: Any, replaced: Replaced) -> Any:
    """Return a jaxpr with its calls inlined, also inside scans, and with some equations replaced."""
    wanted = [True] * len(closed.jaxpr.outvars)
    specs = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *arguments: evaluate_wanted(closed.jaxpr, closed.consts, arguments, wanted, replaced=replaced))(*specs)


def _two_scans(equation: Any, in_first: Sequence[bool]) -> Callable[[list[Any]], list[Any]]:
    """Return two scans in place of one. The first computes these results, and stacks the values that the second needs for the others."""
    body, consts = body_of(equation)
    count, carried = scan_parts(equation, body)
    free = [i < count for i in range(len(body.invars))]
    closed = _with_scans_cut(jex.ClosedJaxpr(body, consts), in_first, free)
    carry_of_first = [i for i in range(carried) if in_first[i]]
    carry_of_second = [i for i in range(carried) if not in_first[i]]
    halves = _halves(closed, in_first, free, {count + i for i in carry_of_second})
    stacked = [i for i in halves.arguments if i - count in carry_of_first]  # carried by the first scan and read by the second

    def both(inputs: list[Any]) -> list[Any]:
        start, xs = inputs[count : count + carried], inputs[count + carried :]

        def first(carry: tuple[Any, ...], x: tuple[Any, ...]) -> Any:
            arguments = [*inputs[:count], *[None] * carried, *x]
            for i, value in zip(carry_of_first, carry, strict=True):
                arguments[count + i] = value
            results, stash = halves.first(arguments)
            split_at = len(carry_of_first)
            return tuple(results[:split_at]), (results[split_at:], stash, [arguments[i] for i in stacked])

        carry, (ys, stash, stacked_arguments) = scan_like(equation, first, [start[i] for i in carry_of_first], tuple(xs))

        def second(carry: tuple[Any, ...], x: Any) -> Any:
            x, stash, stacked_arguments = x
            arguments = dict(enumerate(inputs[:count])) | dict(zip(stacked, stacked_arguments, strict=True)) | x
            arguments |= {count + i: value for i, value in zip(carry_of_second, carry, strict=True)}
            results = halves.second([arguments[i] for i in halves.arguments], stash)
            return tuple(results[: len(carry)]), results[len(carry) :]

        scanned = {i: xs[i - count - carried] for i in halves.arguments if i >= count + carried}
        carry_2, ys_2 = scan_like(equation, second, [start[i] for i in carry_of_second], (scanned, stash, stacked_arguments))
        outputs = {True: iter([*carry, *ys]), False: iter([*carry_2, *ys_2])}
        return [next(outputs[is_first]) for is_first in in_first]

    return both


# The cut ---------------------------------------------------------------------------------------------------------------


def _halves(closed: Any, in_first: Sequence[bool], free: Sequence[bool], absent: Collection[int] = ()) -> Halves:
    """Cut a jaxpr in which no scan is needed by both halves; the first half does not have the arguments `absent`."""
    jaxpr = closed.jaxpr
    wanted = {half: [var for var, is_first in zip(jaxpr.outvars, in_first, strict=True) if is_first == half] for half in (True, False)}
    position = {var: i for i, var in enumerate(jaxpr.invars)}
    free_vars = {*jaxpr.constvars, *(var for var, is_free in zip(jaxpr.invars, free, strict=True) if is_free)}
    second_inputs, early_results = _inputs_of_second(jaxpr, wanted, free_vars, {jaxpr.invars[i] for i in absent})
    stash = [var for var in [*second_inputs, *early_results] if var not in position]
    needs, of_second = needed(jaxpr, wanted[False], {*second_inputs, *early_results})
    read = [var for var in jaxpr.invars if var in needs]
    _, of_first = needed(jaxpr, [*wanted[True], *stash])
    present = [var for i, var in enumerate(jaxpr.invars) if i not in absent]
    first = _function(closed, present, [*wanted[True], *stash], of_first)
    second = _function(closed, [*read, *stash], wanted[False], of_second)
    positions, count = [position[var] for var in present], len(wanted[True])

    def first_half(arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = first(*(arguments[i] for i in positions))
        return results[:count], results[count:]

    specs = tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in stash)
    return Halves(first_half, lambda inputs, stashed: second(*inputs, *stashed), tuple(position[var] for var in read), specs)


def _inputs_of_second(jaxpr: Any, wanted: Mapping[bool, Sequence[Any]], free: set[Any], absent: set[Any]) -> tuple[list[Any], list[Any]]:
    """Return, as variables in order, the inputs of the second half, and which of its results the first half computes."""
    of_first, of_second = (set(needed(jaxpr, wanted[half])[1]) for half in (True, False))
    available = {*jaxpr.constvars, *jaxpr.invars} - absent  # to the first half, or cheap to compute from its variables
    from_free = set(free)
    if of_first:
        for number, equation in enumerate(jaxpr.eqns):
            inputs = [var for var in equation.invars if not is_literal(var)]
            is_cheap = equation.primitive.name in REPEATABLE
            if all(var in from_free for var in inputs) and (is_cheap or number not in of_first):
                from_free.update(equation.outvars)
            if number in of_first or (is_cheap and all(var in available for var in inputs)):
                available.update(equation.outvars)
    producers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    early_results = [
        v for v in dict.fromkeys(wanted[False]) if not is_literal(v) and v in available and v in producers and v not in from_free
    ]
    sinks = {v for v in wanted[False] if not is_literal(v) and v in available and v not in producers}
    for number in of_second:
        if not all(var in available or isinstance(var, jex.DropVar) for var in jaxpr.eqns[number].outvars):
            sinks.update(var for var in jaxpr.eqns[number].invars if not is_literal(var) and var in available)

    def inputs_of(var: Any) -> list[Any] | None:
        if var not in producers or producers[var].primitive.name not in REPEATABLE:
            return None
        return [v for v in producers[var].invars if not is_literal(v) and v not in from_free]

    chosen = cheapest_cut([var for var in sinks if var not in from_free], nbytes, inputs_of)
    positions = {var: i for i, var in enumerate([*jaxpr.invars, *(var for equation in jaxpr.eqns for var in equation.outvars)])}
    return sorted(chosen, key=positions.__getitem__), [var for var in early_results if var not in chosen]


def _function(closed: Any, inputs: Sequence[Any], outputs: Sequence[Any], numbers: Sequence[int]) -> Callable[..., list[Any]]:
    """Return the function that computes `outputs` from `inputs` by the equations with these numbers."""
    jaxpr = closed.jaxpr
    equations = [jaxpr.eqns[number] for number in numbers]
    part = jex.Jaxpr(jaxpr.constvars, list(inputs), list(outputs), equations, jaxpr.effects, UNKNOWN)
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(part, closed.consts))
