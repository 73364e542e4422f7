"""Follow the origins of arrays through the equations of a jaxpr, its calls, branches and loops."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jpipe.model.jaxprs._dependence import body_of, is_call, is_literal, scan_parts
from jpipe.model.jaxprs._origin_rules import origins_of
from jpipe.model.jaxprs._origins import NO_ROW, Origin, is_whole, mixed, of_several, origin_of, over, smallest, together

_MOST_NUMBERS = 1 << 16  # known numbers of one array
_MOST_STEPS = 1 << 12  # of a scan over rows, which are followed one by one
_FEW_STEPS = 64  # of a scan with a counter, which are followed one by one


def follow(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Origin]) -> list[Origin]:
    """Return the origins of the outputs of a jaxpr.

    Args:
        jaxpr: the computation.
        consts: the values of its constants.
        inputs: the origins of its inputs.
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(_of_constant, consts), *inputs], strict=True))

    def read(var: Any) -> Origin:
        return _of_constant(var.val) if is_literal(var) else known[var]

    for equation in jaxpr.eqns:
        name, arguments = equation.primitive.name, list(map(read, equation.invars))
        if is_call(equation):
            results = follow(*body_of(equation), arguments)
        elif name in _CONTROL and not any(argument.depends for argument in arguments):
            results = [origin_of(var.aval.shape) for var in equation.outvars]
        elif name in _CONTROL:
            results = _CONTROL[name](equation, arguments)
        else:
            of_model = any(argument.of_model for argument in arguments)
            results = [_finished(origin, of_model) for origin in origins_of(equation, arguments)]
        known.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _finished(origin: Origin, of_model: bool) -> Origin:
    """Return an origin with as few elements as possible; what several labels make together, such as their count, is taken as a constant."""
    rows = origin.rows if of_model else np.where(of_several(origin.rows), np.int16(NO_ROW), origin.rows)
    numbers = origin.numbers
    if numbers is not None:
        numbers = None if numbers.size > _MOST_NUMBERS or np.isnan(numbers).all() else smallest(numbers)
    return Origin(smallest(rows), numbers, of_model)


def _of_constant(value: Any) -> Origin:
    dtype, shape = jnp.result_type(value), jnp.shape(value)
    is_known = is_whole(dtype) and np.prod(shape, dtype=np.int64) <= _MOST_NUMBERS
    return origin_of(shape)._replace(numbers=np.asarray(value, np.float64)[None] if is_known else None)


# Branches and loops ----------------------------------------------------------------------------------------------------


def _either(one: Origin, other: Origin) -> Origin:
    """Return the origin of an array that is one of two."""
    is_same = one.numbers is not None and other.numbers is not None and np.array_equal(one.numbers, other.numbers, equal_nan=True)
    return Origin(smallest(together([one.rows, other.rows])), one.numbers if is_same else None, one.of_model or other.of_model)


def _chosen(origin: Origin, by: Origin) -> Origin:
    """Return the origin of an array that a scalar has chosen, or that its own element has for each batch that `vmap` adds."""
    if not by.depends:
        return origin
    choice = by.rows.reshape(*by.rows.shape, *[1] * (origin.rows.ndim - by.rows.ndim))
    return Origin(mixed(together([origin.rows, choice])), None, origin.of_model or by.of_model)


def _cond(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    first, *others = (follow(branch.jaxpr, branch.consts, arguments[1:]) for branch in equation.params["branches"])
    for other in others:
        first = list(map(_either, first, other))
    return [_chosen(result, arguments[0]) for result in first]


def _while(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    params = equation.params
    condition, body, first = params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"]
    second = first + params["body_nconsts"]

    def step(carry: list[Origin]) -> tuple[list[Origin], list[Origin]]:
        (goes_on,) = follow(condition.jaxpr, condition.consts, [*arguments[:first], *carry])
        return [_chosen(new, goes_on) for new in follow(body.jaxpr, body.consts, [*arguments[first:second], *carry])], []

    return _until_equal(step, list(arguments[second:]))[0]


def _until_equal(
    step: Callable[[list[Origin]], tuple[list[Origin], list[Origin]]], carry: list[Origin]
) -> tuple[list[Origin], list[Origin]]:
    """Return what a loop carries after any number of steps, and what its steps give."""
    while True:
        new, given = step(carry)
        joined = list(map(_either, carry, new))
        if all(np.array_equal(a.rows, b.rows) and (a.numbers is None) == (b.numbers is None) for a, b in zip(joined, carry, strict=True)):
            return joined, given
        carry = joined


def _scan(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    body, consts = body_of(equation)
    fixed, carried = scan_parts(equation, body)
    carry, xs, length = list(arguments[fixed : fixed + carried]), arguments[fixed + carried :], equation.params["length"]

    def step(carry: list[Origin], x: Sequence[Origin]) -> tuple[list[Origin], list[Origin]]:
        results = follow(body, consts, [*arguments[:fixed], *carry, *x])
        return results[:carried], results[carried:]

    has_rows, has_counter = any(x.rows.shape[1] > 1 for x in xs), any(each.numbers is not None for each in carry)
    if not (length <= _MOST_STEPS if has_rows else has_counter and length <= _FEW_STEPS):
        x = [Origin(over(x.rows, [0])[:, 0], None, x.of_model) for x in xs]
        carry, ys = _until_equal(lambda carry: step(carry, x), carry)
        return [*carry, *(Origin(y.rows[:, None], None, y.of_model) for y in ys)]
    order, given, known = range(length)[:: -1 if equation.params["reverse"] else 1], dict[int, list[Origin]](), dict[Any, Any]()
    for i in order:
        x = [Origin(_item(x.rows, i), None if x.numbers is None else _item(x.numbers, i), x.of_model) for x in xs]
        key = tuple((a.rows.shape, a.rows.tobytes(), None if a.numbers is None else a.numbers.tobytes()) for a in (*carry, *x))
        if key not in known:
            known[key] = step(carry, x)
        carry, given[i] = known[key]
    return [*carry, *(_stacked(ys) for ys in zip(*(given[i] for i in range(length)), strict=True))]


def _item(array: np.ndarray, number: int) -> np.ndarray:
    return array[:, number if array.shape[1] > 1 else 0]


def _stacked(parts: Sequence[Origin]) -> Origin:
    rows = np.stack(np.broadcast_arrays(*(part.rows for part in parts)), axis=1)
    return Origin(smallest(rows), None, any(part.of_model for part in parts))


_CONTROL = {"cond": _cond, "while": _while, "scan": _scan}
