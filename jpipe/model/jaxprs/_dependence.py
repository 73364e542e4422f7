"""Dependence in jaxprs: which outputs depend on which inputs or on host callbacks, are always zero, or are an input unchanged."""

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "eval_jaxpr"})
"""Primitives that only run their body."""


def reached(jaxpr: Any, marks: Sequence[int], host: int = 0) -> list[int]:
    """Return for each output of a jaxpr the union of the marks, bits of an int, of all inputs that it depends on.

    The function looks into nested calls, loops and branches. Results of unknown equations depend on all inputs of the equation. `host`
    marks results of equations with side effects or host callbacks; with it, every equation except calls and scans makes each result depend
    on all its inputs, as in `evaluate_wanted`.
    """
    mark_of = {var: mark for var, mark in zip(jaxpr.invars, marks, strict=True) if mark}
    for equation in jaxpr.eqns:
        into = [0 if is_literal(var) else mark_of.get(var, 0) for var in equation.invars]
        if host or any(into):
            results = propagate(equation, into, host)
            mark_of.update((var, mark) for var, mark in zip(equation.outvars, results, strict=True) if mark)
    return [0 if is_literal(var) else mark_of.get(var, 0) for var in jaxpr.outvars]


def calls_host(jaxpr: Any) -> bool:
    """Return whether a computation, or a computation nested in it, has side effects or calls back to the host."""
    return any(_calls_host(equation) for equation in jaxpr.eqns)


def _calls_host(equation: Any) -> bool:
    return bool(equation.effects) or "callback" in equation.primitive.name or any(calls_host(body) for body, _ in bodies(equation))


def bodies(equation: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield (jaxpr, constants) for each jaxpr in the parameters of an equation."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(body := getattr(item, "jaxpr", item), "eqns"):
                yield body, getattr(item, "consts", ())


def body_of(equation: Any) -> tuple[Any, Sequence[Any]]:
    """Return the (jaxpr, constants) inside an equation; the jaxpr is None if there is none."""
    body = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return getattr(body, "jaxpr", body), getattr(body, "consts", ())


def is_call(equation: Any) -> bool:
    """Return whether an equation only runs its body."""
    return equation.primitive.name in CALLS and len(getattr(body_of(equation)[0], "invars", ())) == len(equation.invars)


def is_literal(var: Any) -> bool:
    """Return whether a variable of a jaxpr is a literal."""
    return hasattr(var, "val")


def nbytes(var: Any) -> int:
    """Return the bytes of a variable; a random key counts as 8."""
    return int(np.prod(var.aval.shape, dtype=np.int64)) * getattr(var.aval.dtype, "itemsize", 8)


_ZERO_OF_ZERO = {
    *("abs", "broadcast_in_dim", "ceil", "convert_element_type", "copy", "cumsum", "div", "dynamic_slice", "expand_dims", "floor"),
    *("gather", "imag", "neg", "real", "reduce_precision", "reduce_sum", "reshape", "rev", "round", "sharding_constraint", "sign"),
    *("sin", "slice", "sqrt", "square", "squeeze", "stop_gradient", "tanh", "transpose"),
}
"""Primitives with a zero result if their first operand is zero, except for 0 / 0, which no optimizer needs."""
_ZERO_OF_ANY = {"dot_general", "mul"}
"""Primitives with a zero result if one operand is zero and the other is finite."""
_OF_ALL = {"add": np.add, "add_any": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum}
"""Primitives with a known result if all operands are known."""
_SAME = {"broadcast_in_dim", "copy", "expand_dims", "reshape", "squeeze", "stop_gradient"}
"""Primitives that repeat or rearrange the numbers of their operand."""

_Known = float | None
"""The number that all elements of an array equal for any inputs of the computation; None: not known."""


def always_zero(jaxpr: Any, consts: Sequence[Any], zeros: Sequence[bool]) -> list[bool]:
    """Return for each output of a jaxpr whether it is always zero, given the inputs that are.

    The function looks into nested calls and branches, but not into loops. Results of unknown equations count as not zero.
    """
    with np.errstate(all="ignore"):
        return [value == 0 for value in _known(jaxpr, consts, [0.0 if zero else None for zero in zeros])]


def _known(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[_Known]) -> list[_Known]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(_number, consts), *inputs], strict=True))

    def read(var: Any) -> _Known:
        return _number(var.val) if is_literal(var) else known.get(var)

    for equation in jaxpr.eqns:
        known.update(zip(equation.outvars, _known_results(equation, list(map(read, equation.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def _known_results(equation: Any, inputs: list[_Known]) -> Sequence[_Known]:
    """Return the known results of an equation."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        branches = [_known(branch.jaxpr, branch.consts, inputs[1:]) for branch in params["branches"]]
        return [_common(results) for results in zip(*branches, strict=True)]
    if is_call(equation):
        return _known(*body_of(equation), inputs)
    unknown: list[_Known] = [None] * len(equation.outvars)
    is_zero = (name in _ZERO_OF_ZERO and inputs[0] == 0) or (name in _ZERO_OF_ANY and 0 in inputs)
    if is_zero or (name == "integer_pow" and inputs[0] == 0 and params["y"] > 0):
        return [0.0]
    if name in _SAME:
        return [inputs[0]]
    if name in ("select_n", "concatenate", "pad"):
        return [_common(inputs[1:] if name == "select_n" else inputs)]
    numbers = [value for value in inputs if value is not None]
    if len(numbers) < len(inputs):
        return unknown
    if name in _OF_ALL:
        return [float(_OF_ALL[name](numbers[0], numbers[1]))]
    if name == "convert_element_type":
        return [float(np.asarray(numbers[0]).astype(params["new_dtype"]))]
    return [float(min(max(numbers[1], numbers[0]), numbers[2]))] if name == "clamp" else unknown


def _common(values: Sequence[_Known]) -> _Known:
    return values[0] if all(value == values[0] for value in values) else None


def _number(value: Any) -> _Known:
    """Return the number that all elements of a constant equal, or None."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return None
    array = np.asarray(value)
    is_one = array.size > 0 and array.dtype != object and not jnp.issubdtype(array.dtype, np.complexfloating)
    return float(array.flat[0]) if is_one and (array == array.flat[0]).all() else None


def passed_on(jaxpr: Any) -> list[int | None]:
    """Return for each output of a jaxpr the position of the input that it passes on unchanged, or None if it is computed."""
    position = {var: i for i, var in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        if is_call(equation):
            for var, source in zip(equation.outvars, passed_on(body_of(equation)[0]), strict=True):
                if source is not None and not is_literal(equation.invars[source]) and equation.invars[source] in position:
                    position[var] = position[equation.invars[source]]
    return [None if is_literal(var) else position.get(var) for var in jaxpr.outvars]


def propagate(equation: Any, into: list[int], host: int = 0) -> list[int]:
    """Return the marks of an equation's outputs. `into` has the marks of its inputs; `host` is as in `reached`."""
    name, params = equation.primitive.name, equation.params
    body, _ = body_of(equation)
    if host:
        if is_call(equation):
            return reached(body, into, host)
        if name == "scan":
            return _propagate_scan(body, into, *scan_parts(equation, body), host)
        return [union(into) | (host if _calls_host(equation) else 0)] * len(equation.outvars)
    if name == "cond":
        branches = [reached(branch.jaxpr, into[1:]) for branch in params["branches"]]
        return [into[0] | union(marks) for marks in zip(*branches, strict=True)]
    if name == "while":
        return _propagate_while(params, into)
    if not (hasattr(body, "eqns") and len(body.invars) == len(into) and len(body.outvars) == len(equation.outvars)):
        return [union(into)] * len(equation.outvars)
    if name == "scan":
        return _propagate_scan(body, into, *scan_parts(equation, body))
    return reached(body, into)


def _propagate_while(params: Any, into: list[int]) -> list[int]:
    """Propagate marks through a while loop until nothing changes. All results also depend on the condition."""
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    for_condition, for_body = into[:of_condition], into[of_condition : of_condition + of_body]
    carried = into[of_condition + of_body :]
    while True:
        (condition,) = reached(params["cond_jaxpr"].jaxpr, for_condition + carried)
        results = reached(params["body_jaxpr"].jaxpr, for_body + carried)
        fed_back = [old | new | condition for old, new in zip(carried, results, strict=True)]
        if fed_back == carried:
            return carried
        carried = fed_back


def _propagate_scan(body: Any, into: list[int], consts: int, carry: int, host: int = 0) -> list[int]:
    """Propagate marks through a scan until nothing changes."""
    into = list(into)
    while True:
        results = reached(body, into, host)
        fed_back = [old | new for old, new in zip(into[consts : consts + carry], results[:carry], strict=True)]
        if fed_back == into[consts : consts + carry]:
            return [*fed_back, *results[carry:]]
        into[consts : consts + carry] = fed_back


def scan_parts(equation: Any, body: Any) -> tuple[int, int]:
    """Return (number of constants, number of carried arrays) of a scan.

    They are found from shapes, because JAX versions name the parameters differently: scanned and stacked arrays have one dim less inside.
    """
    scanned = sum(outer.aval.shape != inner.aval.shape for outer, inner in zip(equation.invars, body.invars, strict=True))
    carry = sum(outer.aval.shape == inner.aval.shape for outer, inner in zip(equation.outvars, body.outvars, strict=True))
    return len(equation.invars) - scanned - carry, carry


def union(marks: Iterable[int]) -> int:
    """Return the marks that any of these have."""
    return functools.reduce(operator.or_, marks, 0)
