"""Detect layers and losses that compute with several rows together; in a pipeline these are the rows of a microbatch.

The model is traced with a prime number of rows that divides no other dim, so that dims of rows are recognized by their size.
"""

import functools
import logging
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jpipe.errors import shortened
from jpipe.model._layer import LayerSpec, key_spec
from jpipe.model._losses import Loss, call_with_randomness
from jpipe.model._stack import LayerStack
from jpipe.model.jaxprs._dependence import reached

Tree = Any

_PRIMES = (251, 257, 263, 269, 271, 277, 281, 283, 293, 307)
_FROM_ROWS, _REDUCED, _TOGETHER = 1, 2, 4  # marks: computed from rows; from several of them; not only by adding them
_LINEAR = {
    *("add", "add_any", "sub", "neg", "reduce_sum", "cumsum", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"),
    *("convert_element_type", "reduce_precision", "copy", "slice", "concatenate", "pad", "stop_gradient", "sharding_constraint"),
}
_ORDERED = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort"}


def warn_of_mixed_rows(stack: LayerStack, layers: Mapping[str, LayerSpec], labels: Tree, loss: Loss, rows: int, microbatches: int) -> None:
    """Log a warning, once in a process, for layers and losses that mix the rows of a microbatch.

    Args:
        stack, layers, labels, loss: as in `rows_together`.
        rows: of a microbatch.
        microbatches: of a batch; with one there is no warning, nor for a stack that `mixes_rows`.
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
"""By model, loss and shapes what mixes rows."""


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger("jpipe").warning(message)


def rows_together(stack: LayerStack, layers: Mapping[str, LayerSpec], labels: Tree, loss: Loss) -> tuple[list[str], bool]:
    """Return the layers whose training forward mixes rows, and whether the loss is more than a sum over rows.

    Layers that cannot be traced with another number of rows are left out.

    Args:
        stack: the model.
        layers: from `LayerStack.specs`.
        labels: specs of the labels of a microbatch.
        loss: as in `Pipeline`.
    """
    inputs = layers[stack.ids[0]].x
    dims = {
        dim for leaf in jax.tree.leaves([inputs, labels, [(s.params, s.state, s.output) for s in layers.values()]]) for dim in leaf.shape
    }
    prime = next((prime for prime in _PRIMES if not any(dim % prime == 0 for dim in dims if dim)), None)
    if prime is None:
        return [], False
    x, labels = (jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((prime, *leaf.shape[1:]), leaf.dtype), part) for part in (inputs, labels))
    known: dict[Any, tuple[Tree, bool]] = {}
    mixing: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # already shown when the model was first traced
            for layer_id in stack.ids:
                like = stack.like(layer_id, x)
                if like not in known:
                    known[like] = _of_layer(stack, layer_id, x, prime)
                x, mixes = known[like]
                if mixes:
                    mixing.append(layer_id)
            return mixing, _of_loss(loss, x, labels, prime)
    except Exception:  # a layer or a loss that fits one number of rows only
        return mixing, False


def _of_layer(stack: LayerStack, layer_id: str, x: Tree, prime: int) -> tuple[Tree, bool]:
    """Return the specs of the output, and whether outputs or new state mix rows."""
    layer = stack.layers[layer_id]
    params, state = jax.eval_shape(layer.init, key_spec(), x)
    traced, (y, _) = jax.make_jaxpr(lambda p, s, v, k: layer.apply(p, s, v, k, True), return_shape=True)(params, state, x, key_spec())

    def adds(equation: Any, into: Sequence[int], out: Any, mark: int) -> int:
        return _REDUCED if mark & _FROM_ROWS and (_drops_rows(equation, into, out, prime) or _pairs(out, prime)) else 0

    marks = reached(traced.jaxpr, [_mark(var, prime) for var in traced.jaxpr.invars], adds=adds)
    return y, any(mark & _REDUCED for mark in marks)


def _of_loss(loss: Loss, outputs: Tree, labels: Tree, prime: int) -> bool:
    """Return whether the loss mixes rows in another way than by adding them."""
    traced = jax.make_jaxpr(lambda outputs, labels, key: call_with_randomness(loss, outputs, labels, key)[0])(outputs, labels, key_spec())

    def adds(equation: Any, into: Sequence[int], out: Any, mark: int) -> int:
        if not mark & _FROM_ROWS:
            return 0
        reduced = _REDUCED if _drops_rows(equation, into, out, prime) else 0
        ordered = equation.primitive.name in _ORDERED and reduced
        nonlinear = not _has_body(equation) and any(one & _REDUCED for one in into) and not _is_linear(equation, into)
        return reduced | (_TOGETHER if ordered or nonlinear or _pairs(out, prime) else 0)

    of_outputs = len(jax.tree.leaves(outputs))
    marks = [_mark(var, prime) if i < of_outputs else 0 for i, var in enumerate(traced.jaxpr.invars)]
    return bool(reached(traced.jaxpr, marks, adds=adds)[0] & _TOGETHER)


def _mark(var: Any, prime: int) -> int:
    return _FROM_ROWS if _count(var, prime) else 0


def _count(var: Any, prime: int) -> int:
    """Return the number of dims that are rows."""
    return sum(dim > 0 and dim % prime == 0 for dim in getattr(var.aval, "shape", ()))


def _drops_rows(equation: Any, into: Sequence[int], out: Any, prime: int) -> bool:
    """Return whether an output mixes rows: its inputs have dims of rows and it has none, or it runs along them."""
    rows = [var for var, mark in zip(equation.invars, into, strict=True) if mark & _FROM_ROWS and _count(var, prime)]
    if equation.primitive.name in _ORDERED:
        axis = equation.params.get("axis", equation.params.get("dimension", 0))
        return any(var.aval.shape[axis] % prime == 0 for var in rows)
    is_truth = out.aval.dtype == bool  # vectorized loops test whether any row continues
    return bool(rows) and not is_truth and not _count(out, prime)


def _pairs(out: Any, prime: int) -> bool:
    """Return whether an array has an entry for each pair of rows."""
    return _count(out, prime) > 1 or any(dim > 0 and dim % prime**2 == 0 for dim in getattr(out.aval, "shape", ()))


def _is_linear(equation: Any, into: Sequence[int]) -> bool:
    """Return whether an equation is linear in the values computed from rows."""
    name, moving = equation.primitive.name, [bool(mark & _FROM_ROWS) for mark in into]
    match name:
        case "mul" | "dot_general":
            return sum(moving) < 2
        case "div":
            return not moving[1]
        case "select_n":
            return not moving[0]
    return name in _LINEAR


def _has_body(equation: Any) -> bool:
    parts = [inner for value in equation.params.values() for inner in (value if isinstance(value, (tuple, list)) else (value,))]
    return any(hasattr(part, "eqns") or hasattr(part, "jaxpr") for part in parts)
