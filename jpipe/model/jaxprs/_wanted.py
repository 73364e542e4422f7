"""Evaluation of only the wanted results of a jaxpr, without unneeded side effects.

XLA removes unread computations, but keeps side effects: a host callback would get dummy values in place of missing ones.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core as jex

from jpipe.model.jaxprs._dependence import body_of, is_call, is_literal, propagate, scan_parts

Tree = Any

UNKNOWN = jex.DebugInfo("evaluated in part", "<unknown>", None, None)
"""The debug info of a jaxpr without names of arguments and results for messages."""


def without_effects(function: Callable[..., Tree], is_dummy: Sequence[bool] | None = None) -> Callable[..., Tree]:
    """Return a function of pytrees without the side effects that no result needs and that depend on a dummy argument.

    Without `is_dummy` only the side effects that a result needs stay.
    """

    def quiet(*arguments: Tree) -> Tree:
        closed, outputs = jax.make_jaxpr(function, return_shape=True)(*arguments)
        leaves, treedef = jax.tree.flatten(outputs)
        trees = None if is_dummy is None else zip(arguments, is_dummy, strict=True)
        marks = None if trees is None else [mark for tree, mark in trees for _ in jax.tree.leaves(tree)]
        results = evaluate_wanted(closed.jaxpr, closed.consts, jax.tree.leaves(arguments), [True] * len(leaves), marks)
        return jax.tree.unflatten(treedef, results)

    return quiet


Replaced = Mapping[int, Callable[[list[Any]], list[Any]]]
"""By number of an equation, the function to evaluate in its place."""


def evaluate_wanted(
    jaxpr: Any,
    consts: Sequence[Any],
    arguments: Sequence[Any],
    wanted: Sequence[bool],
    is_dummy: Sequence[bool] | None = None,
    replaced: Replaced = MappingProxyType({}),
) -> list[Any]:
    """Return the wanted results of a jaxpr, with its calls inlined, and None for the others.

    Arguments that these do not need may be None. A side effect that no result needs stays only if it depends on no dummy; without
    `is_dummy` none stays. `replaced` has, by number of an equation, a function that computes all its results from all its inputs.
    """
    doubtful = None if is_dummy is None else _dummies(jaxpr, is_dummy)
    needs, numbers = needed(
        jaxpr, [var for var, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted], inside=True, doubtful=doubtful
    )
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(var: Any) -> Any:
        return var.val if is_literal(var) else values.get(var)

    for number in numbers:
        equation = jaxpr.eqns[number]
        inputs, results = list(map(read, equation.invars)), [var in needs for var in equation.outvars]
        if number in replaced:
            outputs = replaced[number](inputs)
        elif is_call(equation):
            marks = None if doubtful is None else [var in doubtful for var in _variables(equation)]
            outputs = evaluate_wanted(*body_of(equation), inputs, results, marks)
        elif equation.primitive.name == "cond" and not _stays(equation, doubtful):
            outputs = _cond_wanted(equation, inputs, results)
        elif equation.primitive.name == "scan" and not _stays(equation, doubtful):
            outputs = _scan_wanted(equation, inputs, results)
        else:
            outputs = bind(equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(var) if is_wanted else None for var, is_wanted in zip(jaxpr.outvars, wanted, strict=True)]


def _cond_wanted(equation: Any, inputs: list[Any], results: Sequence[bool]) -> list[Any]:
    """Return the wanted results of a `cond`, and None for each other result."""
    wanted = [i for i, is_wanted in enumerate(results) if is_wanted]
    present = [i for i, value in enumerate(inputs) if i and value is not None]

    def branch(closed: Any, *values: Any) -> list[Any]:
        arguments = dict(zip(present, values, strict=True))
        outputs = evaluate_wanted(closed.jaxpr, closed.consts, [arguments.get(i) for i in range(1, len(inputs))], results)
        return [outputs[i] for i in wanted]

    branches = [functools.partial(branch, closed) for closed in equation.params["branches"]]
    outputs = dict(zip(wanted, jax.lax.switch(inputs[0], branches, *(inputs[i] for i in present)), strict=True))
    return [outputs.get(i) for i in range(len(results))]


def _scan_wanted(equation: Any, inputs: list[Any], results: Sequence[bool]) -> list[Any]:
    """Return the wanted results of a scan and the carried results that they need, and None for each other result."""
    body, consts = body_of(equation)
    count, carried = scan_parts(equation, body)
    results, used = scan_needs(equation, results)
    carries = [i for i in range(carried) if results[i]]
    scanned = [i for i in range(count + carried, len(inputs)) if used[i]]

    def step(carry: tuple[Any, ...], x: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        arguments = [*inputs[:count], *[None] * (len(inputs) - count)]
        for i, value in zip([*(count + i for i in carries), *scanned], [*carry, *x], strict=True):
            arguments[i] = value
        outputs = evaluate_wanted(body, consts, arguments, results)
        return tuple(outputs[i] for i in carries), tuple(y for y in outputs[carried:] if y is not None)

    carry, ys = scan_like(equation, step, [inputs[count + i] for i in carries], tuple(inputs[i] for i in scanned))
    outputs = iter([*carry, *ys])
    return [next(outputs) if is_wanted else None for is_wanted in results]


def scan_like(equation: Any, step: Callable[..., Any], carry: Sequence[Any], xs: Any) -> Any:
    """Run a scan with the length, direction and unrolling of an equation's scan."""
    return jax.lax.scan(step, tuple(carry), xs, **{name: equation.params[name] for name in ("length", "reverse", "unroll")})


def bind(equation: Any, inputs: list[Any]) -> list[Any]:
    """Return the results of one equation, with None for results that are not read.

    It goes through a jaxpr, because the way to bind an equation differs between JAX versions.
    """
    values = {var: value for var, value in zip(equation.invars, inputs, strict=True) if not is_literal(var)}
    read = [var for var in equation.outvars if not isinstance(var, jex.DropVar)]
    jaxpr = jex.Jaxpr((), list(values), read, [equation], equation.effects, UNKNOWN)
    results = dict(zip(read, jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))(*values.values()), strict=True))
    return [results.get(var) for var in equation.outvars]


# What is needed --------------------------------------------------------------------------------------------------------


def needed(
    jaxpr: Any, wanted: Iterable[Any], known: Collection[Any] = (), *, inside: bool = False, doubtful: Collection[Any] | None = None
) -> tuple[set[Any], list[int]]:
    """Return the variables, and the ordered numbers of the equations, that are needed to compute wanted variables from known ones.

    With `inside` a call or a scan needs only the inputs that its wanted results depend on, otherwise all. If `doubtful` has the variables
    with dummy values, equations with side effects that read none are needed, too.
    """
    needs, numbers = {var for var in wanted if not is_literal(var)}, []
    for number in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[number]
        inputs = _inputs_needed(equation, [var in needs and var not in known for var in equation.outvars], inside, doubtful)
        if inputs is not None:
            numbers.append(number)
            needs.update(var for var, used in zip(equation.invars, inputs, strict=True) if used and not is_literal(var))
    return needs, numbers[::-1]


def _inputs_needed(equation: Any, results: list[bool], inside: bool, doubtful: Collection[Any] | None) -> list[bool] | None:
    """Return for each input of an equation whether its wanted results need this input, or None if the equation is not needed."""
    stays = _stays(equation, doubtful)
    if inside and is_call(equation) and (any(results) or (equation.effects and doubtful is not None)):
        body, _ = body_of(equation)
        wanted = [var for var, is_wanted in zip(body.outvars, results, strict=True) if is_wanted]
        marks = None if doubtful is None else _dummies(body, [var in doubtful for var in _variables(equation)])
        needs, numbers = needed(body, wanted, inside=True, doubtful=marks)
        return [var in needs for var in body.invars] if numbers or any(results) else None
    if not any(results) and not stays:
        return None
    if inside and equation.primitive.name == "scan" and not stays:
        return scan_needs(equation, results)[1]
    if inside and equation.primitive.name == "cond" and not stays:
        jaxprs = [closed.jaxpr for closed in equation.params["branches"]]
        of_branches = [
            needed(jaxpr, [var for var, used in zip(jaxpr.outvars, results, strict=True) if used], inside=True)[0] for jaxpr in jaxprs
        ]
        return [
            True,
            *(
                any(jaxpr.invars[i] in needs for jaxpr, needs in zip(jaxprs, of_branches, strict=True))
                for i in range(len(equation.invars) - 1)
            ),
        ]
    return [True] * len(equation.invars)


def scan_needs(equation: Any, results: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Return, for the wanted results of a scan, the results that must be computed and the inputs that they need."""
    body, _ = body_of(equation)
    count, carried = scan_parts(equation, body)
    results = list(results)
    while True:
        needs, _ = needed(body, [var for var, wanted in zip(body.outvars, results, strict=True) if wanted], inside=True)
        inputs = [var in needs for var in body.invars]
        fed_back = [a or b for a, b in zip(results[:carried], inputs[count : count + carried], strict=True)]
        if fed_back == results[:carried]:
            return results, inputs
        results[:carried] = fed_back


def _stays(equation: Any, doubtful: Collection[Any] | None) -> bool:
    """Return whether an equation is kept because of its side effects."""
    return doubtful is not None and bool(equation.effects) and not any(var in doubtful for var in _variables(equation))


def _dummies(jaxpr: Any, arguments: Sequence[bool]) -> set[Any]:
    """Return the variables of a jaxpr that depend on dummy arguments."""
    dummies = {var for var, is_dummy in zip(jaxpr.invars, arguments, strict=True) if is_dummy}
    for equation in jaxpr.eqns:
        into = [int(var in dummies) for var in _variables(equation)]
        if any(into):
            dummies.update(var for var, is_dummy in zip(equation.outvars, propagate(equation, into), strict=True) if is_dummy)
    return dummies


def _variables(equation: Any) -> list[Any]:
    """Return the inputs of an equation, with None in place of literals, which cannot be hashed."""
    return [None if is_literal(var) else var for var in equation.invars]
