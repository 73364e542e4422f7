"""Detect layers and losses that compute with several rows together. In a pipeline these are the rows of a microbatch."""

import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.errors import shortened
from jpipe.model._function_arguments import Loss, call_with_randomness
from jpipe.model._layer import LayerSpec, key_spec
from jpipe.model._stack import LayerStack
from jpipe.model.jaxprs._dependence import body_of, is_call, is_literal, scan_parts
from jpipe.model.jaxprs._origin_rules import origins_of
from jpipe.model.jaxprs._origins import NO_ROW, Origin, is_whole, mixed, of_several, origin_of, over, smallest, together

Tree = Any

COUNTS = (3, 5, 7, 11, 13, 17, 19, 23)
"""Numbers of rows to trace with. The first that divides no dim is used, so that the dim of the rows can be recognized."""


def warn_of_mixed_rows(stack: LayerStack, layers: Mapping[str, LayerSpec], labels: Tree, loss: Loss, rows: int, microbatches: int) -> None:
    """Log a warning, once in a process, for layers and losses that mix the rows of a microbatch.

    There is none if a batch has one microbatch, or if the stack `mixes_rows`.
    """
    if microbatches == 1 or stack.mixes_rows or jax.process_index() > 0:
        return
    known = _KNOWN.setdefault(stack, {})
    leaves, treedef = jax.tree.flatten((layers[stack.ids[0]].x, labels))
    asked = loss, treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    if asked not in known:
        known[asked] = rows_together(stack, layers, labels, loss)
    ids, loss_too = known[asked]
    sees = f"the {rows} rows of a microbatch, not the {rows * microbatches} of a batch"
    if ids:
        names = f"layer{'s' if len(ids) > 1 else ''} {shortened([repr(layer_id) for layer_id in ids])}"
        _warn_once(f"{names}: the rows of a microbatch are computed together, as in batch normalization: such a layer sees {sees}")
    if loss_too:
        _warn_once(f"loss: it is more than a sum over rows, as a loss over pairs of rows is: it sees {sees}")


_KNOWN: weakref.WeakKeyDictionary[LayerStack, dict[Any, tuple[list[str], bool]]] = weakref.WeakKeyDictionary()
"""The results of `rows_together`, by model, and by loss and shapes."""


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger("jpipe").warning(message)


def rows_together(stack: LayerStack, layers: Mapping[str, LayerSpec], labels: Tree, loss: Loss, dim: int = 0) -> tuple[list[str], bool]:
    """Return the layers that mix rows in their training forward, and whether the loss is more than a sum over rows.

    A layer mixes rows if one row of its outputs, or its new state, depends on another row of its inputs. With `dim` 1, positions count as
    rows. If a layer or the loss does not accept another number of rows, all are traced with the rows of a microbatch. If one then fails,
    the later layers and the loss are not examined.
    """
    x = layers[stack.ids[0]].x
    known = [x, labels, [(layer.params, layer.state, layer.output) for layer in layers.values()]]
    dims = {size for leaf in jax.tree.leaves(known) for size in leaf.shape if size}
    rows = jax.tree.leaves((x, labels))[0].shape[dim]
    count = next((count for count in COUNTS if not any(size % count == 0 for size in dims)), COUNTS[0])
    mixing: list[str] = []
    for number in (count, rows):
        mixing.clear()
        x, labels = with_rows((x, labels), number, dim)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the first trace of the model has shown these warnings
                return mixing, _rows_together(stack, x, labels, loss, number, dim, mixing)
        except Exception:  # noqa: S112 - a layer or a loss fits only one number of rows, or has too many elements
            continue
    return mixing, False


def with_rows(tree: Tree, count: int, dim: int = 0) -> Tree:
    """Return specs with `count` rows, which are in this dim."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*leaf.shape[:dim], count, *leaf.shape[dim + 1 :]), leaf.dtype), tree)


def _rows_together(stack: LayerStack, x: Tree, labels: Tree, loss: Loss, count: int, dim: int, mixing: list[str]) -> bool:
    """Add the ids of the layers that mix `count` rows to `mixing`, and return whether the loss mixes the rows."""
    known: dict[Any, tuple[Tree, list[Origin], bool]] = {}
    origins = _in_rows(x, count, dim)
    for layer_id in stack.ids:
        like = stack.like(layer_id, x), tuple((origin.rows.shape, origin.rows.tobytes()) for origin in origins)
        if like not in known:
            known[like] = _of_layer(stack, layer_id, x, origins, count, dim)
        x, origins, mixes = known[like]
        if mixes:
            mixing.append(layer_id)
    return _of_loss(loss, (x, origins), labels, count, dim)


def _in_rows(tree: Tree, count: int, dim: int, *, of_model: bool = True) -> list[Origin]:
    """Return the origins of arrays with `count` rows in this dim, or else in the first of this size; without one they depend on no row."""

    def in_dim(shape: tuple[int, ...]) -> int | None:
        return dim if shape[dim : dim + 1] == (count,) else shape.index(count) if count and count in shape else None

    return [origin_of(leaf.shape, in_dim(leaf.shape), of_model=of_model) for leaf in jax.tree.leaves(tree)]


def _of_layer(stack: LayerStack, layer_id: str, x: Tree, inputs: Sequence[Origin], count: int, dim: int) -> tuple[Tree, list[Origin], bool]:
    """Return the specs and the origins of a layer's outputs, and whether outputs or new state mix rows."""
    layer = stack.layers[layer_id]
    params, state = jax.eval_shape(layer.init, key_spec(), x)
    traced, (y, _) = jax.make_jaxpr(lambda p, s, k, v: layer.apply(p, s, v, k, True), return_shape=True)(params, state, key_spec(), x)
    held = _in_rows(state, count if stack.carries_rows else 0, dim)
    arguments = [*_in_rows(params, 0, dim), *held, origin_of(()), *inputs]
    results = [origin._replace(numbers=None) for origin in follow(traced.jaxpr, traced.consts, arguments)]
    outputs, mixes = results[: len(jax.tree.leaves(y))], not all(origin.is_apart(count) for origin in results)
    return y, [new if new.is_apart(count) else old for new, old in zip(outputs, _in_rows(y, count, dim), strict=True)], mixes


def _of_loss(loss: Loss, outputs: tuple[Tree, list[Origin]], labels: Tree, count: int, dim: int) -> bool:
    """Return whether the loss mixes rows in a way other than adding them."""
    traced = jax.make_jaxpr(lambda key, y, labels: call_with_randomness(loss, y, labels, key)[0])(key_spec(), outputs[0], labels)
    inputs = [origin_of(()), *outputs[1], *_in_rows(labels, count, dim, of_model=False)]
    return bool((follow(traced.jaxpr, traced.consts, inputs)[0].rows[0] < 0).any())


# Origins through equations, calls, branches and loops -----------------------------------------------------------------

_MOST_NUMBERS = 1 << 16  # the largest size of an array with known numbers
_MOST_STEPS = 1 << 12  # the largest number of steps of a scan over rows that is followed step by step
_FEW_STEPS = 64  # the same for a scan with a counter


def follow(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Origin]) -> list[Origin]:
    """Return the origins of the outputs of a jaxpr."""
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
    """Return an origin with as few elements as possible. Values from several labels only, such as their count, become constants."""
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
    """Return the origin of an array that may be either of two arrays."""
    is_same = one.numbers is not None and other.numbers is not None and np.array_equal(one.numbers, other.numbers, equal_nan=True)
    return Origin(smallest(together([one.rows, other.rows])), one.numbers if is_same else None, one.of_model or other.of_model)


def _chosen(origin: Origin, by: Origin) -> Origin:
    """Return the origin of an array that a scalar has chosen; under `vmap`, each batch has a scalar."""
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
    """Return the origins of a loop's carry after any number of steps, and the origins of a step's outputs."""
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
