"""Which outputs of a traced computation depend on which of its inputs."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

Adds = Callable[[Any, Sequence[int], Any, int], int]
"""(equation, marks of its inputs, one of its outputs, the marks of that) -> marks to add to those of the output."""


def reached(jaxpr: Any, marks: Sequence[int], adds: Adds | None = None) -> list[int]:
    """For each output of a jaxpr the union of the marks (sets as bits of an int) of all inputs that it depends on.

    Looks into nested calls, loops and branches; what it does not know depends on everything that goes in.

    Args:
        jaxpr: what is computed.
        marks: of its inputs.
        adds: gives more marks, for each output of each equation that depends on a marked input.
    """
    found = {var: mark for var, mark in zip(jaxpr.invars, marks, strict=True) if mark}
    for equation in jaxpr.eqns:
        into = [0 if is_literal(var) else found.get(var, 0) for var in equation.invars]
        if any(into):
            through = _through(equation, into, adds)
            if adds is not None:
                through = [mark | adds(equation, into, var, mark) for var, mark in zip(equation.outvars, through, strict=True)]
            found.update((var, mark) for var, mark in zip(equation.outvars, through, strict=True) if mark)
    return [0 if is_literal(var) else found.get(var, 0) for var in jaxpr.outvars]


def is_literal(var: Any) -> bool:
    """Whether a variable of a jaxpr is a constant written out."""
    return hasattr(var, "val")


def _through(equation: Any, into: list[int], adds: Adds | None) -> list[int]:
    """The marks of an equation's outputs."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        branches = [reached(branch.jaxpr, into[1:], adds) for branch in params["branches"]]
        return [into[0] | _union(marks) for marks in zip(*branches, strict=True)]
    if name == "while":
        return _through_while(params, into, adds)
    body = params.get("jaxpr", params.get("call_jaxpr"))
    body = getattr(body, "jaxpr", body)
    if not (hasattr(body, "eqns") and len(body.invars) == len(into) and len(body.outvars) == len(equation.outvars)):
        return [_union(into)] * len(equation.outvars)
    if name == "scan":
        return _through_scan(body, into, *scan_parts(equation, body), adds)
    return reached(body, into, adds)


def _through_while(params: Any, into: list[int], adds: Adds | None) -> list[int]:
    """The body is given back what it carries, until no more is reached; whether it goes on depends on the condition."""
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    for_condition, for_body = into[:of_condition], into[of_condition : of_condition + of_body]
    carried = into[of_condition + of_body :]
    while True:
        (goes_on,) = reached(params["cond_jaxpr"].jaxpr, for_condition + carried, adds)
        results = reached(params["body_jaxpr"].jaxpr, for_body + carried, adds)
        fed_back = [old | new | goes_on for old, new in zip(carried, results, strict=True)]
        if fed_back == carried:
            return carried
        carried = fed_back


def _through_scan(body: Any, into: list[int], consts: int, carry: int, adds: Adds | None) -> list[int]:
    """The body is given back what it carries, until no more is reached."""
    into = list(into)
    while True:
        results = reached(body, into, adds)
        fed_back = [old | new for old, new in zip(into[consts : consts + carry], results[:carry], strict=True)]
        if fed_back == into[consts : consts + carry]:
            return [*fed_back, *results[carry:]]
        into[consts : consts + carry] = fed_back


def scan_parts(equation: Any, body: Any) -> tuple[int, int]:
    """How many constants and how many carried arrays a scan has. Told from shapes, since JAX versions name its parameters differently:
    what is scanned over, and what is stacked, has one dim less inside."""
    scanned = sum(outer.aval.shape != inner.aval.shape for outer, inner in zip(equation.invars, body.invars, strict=True))
    carry = sum(outer.aval.shape == inner.aval.shape for outer, inner in zip(equation.outvars, body.outvars, strict=True))
    return len(equation.invars) - scanned - carry, carry


def _union(marks: Sequence[int]) -> int:
    return functools.reduce(operator.or_, marks, 0)
